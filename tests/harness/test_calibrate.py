# SPDX-License-Identifier: Apache-2.0
"""The client held against a server that knows what it did, and the arithmetic of that comparison."""

import json
from pathlib import Path

import pytest
from builders import cell_run, small_trace

from harness import calibrate
from harness.cli import main


def test_the_error_is_reported_minus_true_ttft() -> None:
    """Due at 0, 1, 2 s; the server wrote at 0.5, 1.5, 2.5 s after the start at 100 s; reported 1, 2, 3 ms later."""
    run = cell_run([0.501, 0.502, 0.503], started_monotonic_s=100.0, cpu_s=0.006, encode_s=0.003)
    stamps = {
        f"salt-r{i:04d}": {"head_s": 100.1 + i + (0.1 if i == 2 else 0), "body_s": 0.0, "token_s": 100.5 + i}
        for i in range(3)
    }
    accuracy = calibrate.accuracy_of(run, stamps, "salt", 1.0, 7000)
    assert accuracy.error_ms == pytest.approx({"p50": 2.0, "p95": 3.0, "max": 3.0})
    assert accuracy.gap_cv == pytest.approx(0.05 / 1.05)  # gaps of 1 and 1.1 s
    assert accuracy.slip_p99_ms == pytest.approx(1.0)
    assert (accuracy.cpu_ms, accuracy.encode_ms) == pytest.approx((2.0, 1.0))


async def test_a_brief_calibration_sends_the_traces_longest_body() -> None:
    trace = small_trace()
    point = await calibrate.brief(trace, 20.0)
    assert point["n"] == calibrate.LEAST_REQUESTS
    assert point["body_bytes"] == 7 * max(len(request.prompt) for request in trace.requests)
    assert 0 < point["error_ms"]["p50"] <= point["error_ms"]["p95"] <= point["error_ms"]["max"]
    assert f"P95 {point['error_ms']['p95']:.2f} ms" in calibrate.error_bar(point)


@pytest.mark.parametrize(("lowest", "offered"), [(0.1, 5.0), (8.0, 8.0), (60.0, 20.0)])
async def test_it_sends_about_as_seldom_as_the_cells(
    monkeypatch: pytest.MonkeyPatch, lowest: float, offered: float
) -> None:
    asked = []

    async def measure_point(_: object, rate: float, size: int, count: int) -> calibrate.Accuracy:
        asked.append(rate)
        return calibrate.Accuracy(rate, size, count, {}, 0.0, 0.0, 0.0, 0.0, False)

    monkeypatch.setattr(calibrate, "measure_point", measure_point)
    assert (await calibrate.brief(small_trace(), lowest))["offered_qps"] == offered
    assert asked == [offered]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    arguments = ["calibrate", "--rates", "100", "--body-kb", "2", "--seconds", "0.5", "--json", str(out)]
    assert main(arguments) == 0
    (point,) = json.loads(out.read_bytes())["points"]
    assert (point["offered_qps"], point["body_bytes"], point["n"]) == (100.0, 2000, 50)
    assert point["error_ms"]["p50"] < calibrate.DELAY_S * 1e3  # not the delay itself
    assert "CPU ms/request" in capsys.readouterr().out
