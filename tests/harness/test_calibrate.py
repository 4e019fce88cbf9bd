# SPDX-License-Identifier: Apache-2.0
"""The client held against a server that knows what it did, and the arithmetic of that comparison."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from builders import cell_run, small_trace
from fake_server import FakeServer

from harness import calibrate
from harness.cli import main
from harness.store import RunStore
from harness.trace import save_trace


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


async def test_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    """A terminal sends it to the server of known delay as well, which is the harness's to end."""
    save_trace(small_trace(), tmp_path / "t.jsonl")
    out = tmp_path / "out"
    words = f"run --trace {tmp_path}/t.jsonl --rates 1 --out {out}"
    async with FakeServer() as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "harness", *words.split(), "--arm", f"a={server.url}"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stderr and (await process.stderr.readline()).startswith(b"plan: ")
        await asyncio.sleep(1.5)  # of some 10 s
        os.killpg(process.pid, signal.SIGINT)
        err = (await process.stderr.read()).decode()
        assert await process.wait() == 2
    assert err == f"error: interrupted; 0 cells kept in {out}; go on with --resume\n"
    assert "client_calibration" not in RunStore.open(out).manifest


async def test_a_client_that_leaves_before_its_answer_is_not_told_of() -> None:
    """As each one that an interruption cuts off: the next one is answered, and nothing is printed."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "harness.known_delay", "--delay-s", "0.2"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout
    port = int((await process.stdout.readline()).rpartition(b":")[2])
    for stays in (False, True):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
        if stays:
            assert (await reader.read()).endswith(b"0\r\n\r\n")
        writer.close()
        await writer.wait_closed()
    _, err = await process.communicate(b"")
    assert (process.returncode, err) == (0, b"")


def test_the_worst_of_a_runs_points_is_its_error_bar() -> None:
    """A run that was begun by an older harness has a bar and no list of points."""
    manifest: dict[str, Any] = {"client_calibration": {"error_ms": {"p95": 5.0}}}
    calibrate.keep(manifest, {"error_ms": {"p95": 0.2}})
    assert manifest["client_calibration"]["error_ms"]["p95"] == 5.0
    calibrate.keep(manifest, {"error_ms": {"p95": 7.0}})
    assert manifest["client_calibration"]["error_ms"]["p95"] == 7.0
    assert len(manifest["client_calibrations"]) == 3


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    arguments = ["calibrate", "--rates", "100", "--body-kb", "2", "--seconds", "0.5", "--json", str(out)]
    assert main(arguments) == 0
    (point,) = json.loads(out.read_bytes())["points"]
    assert (point["offered_qps"], point["body_bytes"], point["n"]) == (100.0, 2000, 50)
    assert point["error_ms"]["p50"] < calibrate.DELAY_S * 1e3  # not the delay itself
    assert "CPU ms/request" in capsys.readouterr().out
