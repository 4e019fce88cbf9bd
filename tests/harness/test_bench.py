# SPDX-License-Identifier: Apache-2.0
"""The whole pair against the fake engine: real processes, sockets, signals and files."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.arms import Arm
from harness.baseline import Baseline, spread
from harness.cli import main
from harness.errors import UserError
from harness.launches import flags_of, launch_order
from harness.load import RequestRecord
from harness.stats import percentile
from harness.store import RunStore
from harness.trace import make_trace

FAKE = Path(__file__).with_name("fake_engine.py")
SMALL = "--quick --requests 4 --cohort-size 2 --output-tokens 8 --rates 0.5,1.2"
pytestmark = pytest.mark.usefixtures("client_is_trusted")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def arguments(out: Path, *more: str) -> list[str]:
    engine = f"{sys.executable} {FAKE}"
    places = ["--out", str(out), "--cache", str(out.parent / "cache"), "--engine-command", engine]
    return ["bench", *SMALL.split(), *places, *more]


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def engines_of(out: Path) -> list[str]:
    """Command lines of running processes that have to do with this run."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if process.name.isdigit() and str(out) in command and str(os.getpid()) != process.name:
            found.append(command)
    return found


def test_pair_from_checkpoint_to_headline(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(out)) == 0
    manifest, summary = read(out / "manifest.json"), read(out / "summary.json")

    baseline = read(out / "baseline.json")
    ttft = [request["first_token_s"] - request["due_s"] for request in baseline["unloaded"]]
    assert baseline["unloaded_ttft_p50_s"] == percentile(ttft, 50)
    assert manifest["limits"]["applied"] == pytest.approx(
        {"15": 4.8 * baseline["unloaded_ttft_p50_s"], "25": 8.0 * baseline["unloaded_ttft_p50_s"]}
    )
    ends = [request["done_s"] for request in baseline["burst"]]
    assert baseline["capacity_qps"] == 4 / max(ends)
    assert manifest["rates"] == [float(f"{share * baseline['capacity_qps']:.3g}") for share in (0.5, 1.2)]
    assert baseline["trace_sha256"] != manifest["trace"]["sha256"]

    assert [arm["name"] for arm in summary["arms"]] == ["tp2", "dcp2"]
    for arm in summary["arms"]:
        assert [cell["offered_qps"] for cell in arm["cells"]] == manifest["rates"]
        assert [(cell["n"], cell["failed"]) for cell in arm["cells"]] == [(4, 0), (4, 0)]
    assert [arm["topology"]["dcp"] for arm in summary["arms"]] == [1, 2]
    assert summary["arms"][1]["kv_tokens"] == 2 * summary["arms"][0]["kv_tokens"]
    assert summary["parity"]["ok"] and summary["parity"]["compared"] == 6 * 3 * 20
    assert read(out / "parity.json")["prefills_beside"]["dcp2"] > 0
    assert summary["notes"] == []

    for arm in manifest["arms"]:
        assert arm["engine"]["argv"][2:6] == ["serve", "--profile", "cpu", "--topology"]
        assert [rank["rank"] for rank in arm["engine"]["ranks"]] == [0, 1]
    assert list(manifest["steps_s"]) == [
        *("checkpoint", "trace", "reference", "tp2 start", "tp2 parity", "tp2 baseline"),
        *("calibration", "tp2 sweep"),
        *("dcp2 start", "dcp2 parity", "dcp2 sweep"),
    ]
    shown = capsys.readouterr()
    assert "| tp2 " in shown.out and "| dcp2 " in shown.out
    assert re.search(r"cell 4/4 dcp2 @ \S+ QPS  sent 4 running 0 done 4/4", shown.err)
    assert engines_of(out) == []


def test_one_bad_arm_is_refused_and_the_other_ones_cells_are_kept(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"wrong_topology": "dcp2", "wrong_by": 0.25}))
    assert main(arguments(out)) == 2
    shown = capsys.readouterr()
    refusal = "parity refused: prompt p0 (40 tokens), position 0, |Δlogprob| 0.25 > 0.001 (dcp2 vs reference)"
    assert f"error: {refusal}" in shown.err.splitlines()[-1]
    summary = read(out / "summary.json")
    assert summary["parity"]["ok"] is False and summary["parity"]["diverged"][0]["prompt"] == "p0"
    assert [len(arm["cells"]) for arm in summary["arms"]] == [2, 0]
    headline = shown.out.partition("## Cells")[0]
    assert refusal in headline and "| tp2" not in headline
    assert "dcp2 was not measured: this run compares nothing." in summary["notes"]
    assert engines_of(out) == []


def test_engine_that_dies_in_a_cell_leaves_it_aborted(
    out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    baseline_and_warm_up = (4 + 4) * 8 + 8
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"die_after_tokens": baseline_and_warm_up + 12}))
    assert main(arguments(out)) == 2
    shown = capsys.readouterr()
    line, *log = shown.err[shown.err.index("error: ") :].splitlines()
    assert re.fullmatch(
        r"error: engine tp2 died while measuring at \S+ QPS \(exit status 7\); its log is \S+ and ends:", line
    )
    assert log[-1] == "  | RuntimeError: the fake engine was told to die here"
    assert str(out / "logs" / "tp2.log") in line
    (cell,) = RunStore.open(out).cells()
    assert cell.facts["aborted"] and len(cell.records) == 4
    (kept,) = read(out / "summary.json")["arms"][0]["cells"]
    assert kept["invalid_reasons"] == ["interrupted"]
    assert "## Cells" in shown.out


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (
            {"inactive_feature": "cpu_dcp_mla"},
            "error: arm tp2 is not what its name says: cpu_dcp_mla is not active on rank 0: as told; "
            "cpu_dcp_mla is not active on rank 1: as told; it is not measured, see the engine's log",
        ),
        ({"exit_at_start": 3}, "error: engine tp2 died while starting (exit status 3); its log is"),
        (
            {"unused_path": "decode_merge"},
            "error: arm dcp2 is not what its name says: decode_merge has not run",
        ),
    ],
)
def test_arm_without_its_proof_is_not_measured(
    fault: dict[str, object],
    error: str,
    out: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", json.dumps(fault))
    arm = "dcp2" if "dcp2" in error else "tp2"
    assert main(arguments(out, "--arms", arm)) == 2
    assert error in capsys.readouterr().err
    assert not list((out / "cells").iterdir())
    assert engines_of(out) == []


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--arms", "tp2,ep2"], "error: arm 'ep2' is not known; use tpN or dcpN, for example tp2 or dcp2\n"),
        (["--arms", "tp2,tp2"], "error: --arms tp2,tp2 names an arm twice; name each once\n"),
        (["--rates", "0.3,fast"], "error: rate 'fast' is not a number"),
        (["--sla", "8,4"], "error: --sla '8,4' is not usable"),
        (["--budget", "-1"], "error: --budget is -1; give a positive number"),
        (["--bisect", "0.025"], "error: --bisect needs --resident: else every rate"),
        (["--engine-command", "false"], "error: checkpoint failed (exit status 1); its log is"),
    ],
)
def test_wrong_words_are_named_before_anything_runs(
    more: list[str], error: str, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(out, *more)) == 2
    assert error in capsys.readouterr().err
    assert not out.exists()


def test_folder_in_use_is_left_alone(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out.mkdir()
    (out / "mine").write_text("")
    assert main(arguments(out)) == 2
    assert f"error: {out} is already in use" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine"]


def bench_process(out: Path, *more: str, **faults: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "harness", *arguments(out, *more)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "FAKE_ENGINE": json.dumps(faults)},
    )


def read_until(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"ended without saying {text!r}")


def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_ctrl_c_in_a_cell_keeps_it_and_finishes_the_report(out: Path) -> None:
    with bench_process(out, "--absolute-rates", "--rates", "0.1,0.2", "--requests", "3") as process:
        read_until(process, "cell 1/4 tp2")
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.splitlines()[-1] == f"error: interrupted; 1 cells kept in {out}"
    assert "no: interrupted" in shown
    (cell,) = RunStore.open(out).cells()
    assert cell.facts["aborted"] and {record.status for record in cell.records} >= {"cancelled"}
    assert engines_of(out) == []


def test_ctrl_c_while_an_engine_starts(out: Path) -> None:
    with bench_process(out, never_ready=True) as process:
        read_until(process, "tp2 start ...")
        assert eventually(lambda: len(engines_of(out)) >= 3)  # the bench, the supervisor, the engine
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert errors.splitlines()[-1] == f"error: interrupted; 0 cells kept in {out}"
    assert engines_of(out) == []


def test_nothing_outlives_a_killed_bench(out: Path) -> None:
    with bench_process(out, never_ready=True, children=True) as process:
        read_until(process, "tp2 start ...")
        children = out / "proof" / "tp2" / "children.json"
        assert eventually(lambda: children.exists() and children.stat().st_size > 0)
        assert len(engines_of(out)) >= 3  # the bench, the supervisor, the engine
        process.kill()
        assert eventually(lambda: engines_of(out) == [])
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in read(children)))


def test_arms_by_name() -> None:
    assert Arm.parse("tp2").topology == {"tp": 2, "dcp": 1, "ep": 1, "nodes": 1}
    assert Arm.parse("dcp8").topology == {"tp": 8, "dcp": 8, "ep": 1, "nodes": 1}
    for wrong in ("", "tp", "tp0", "TP2", "tp2x", "dcp-2"):
        with pytest.raises(UserError, match="is not known"):
            Arm.parse(wrong)


def record(first_token_s: float, done_s: float) -> RequestRecord:
    return RequestRecord(
        "r", 0, "default", 100, 8, due_s=0.0, first_token_s=first_token_s, done_s=done_s, status="ok"
    )


def test_limits_and_rates_follow_from_the_baseline() -> None:
    unloaded = tuple(record(ttft, 9.0) for ttft in (0.5, 0.1, 0.3))
    burst = tuple(record(1.0, done) for done in (2.0, 8.0, 5.0, 3.0))
    baseline = Baseline("", unloaded, burst)
    assert baseline.unloaded_ttft_p50_s == 0.3
    assert baseline.capacity_qps == 4 / 8.0
    limits = baseline.limits("tp2")
    assert limits.applied == pytest.approx({"15": 1.44, "25": 2.4})
    assert "4.8x and 8x the unloaded P50 TTFT of tp2, 0.3 s over 3 requests" in limits.rule
    assert baseline.rates([0.3, 0.33333, 1.2]) == (0.15, 0.167, 0.6)


def test_unloaded_requests_cover_the_lengths() -> None:
    trace = make_trace(
        requests=24,
        min_tokens=100,
        max_tokens=340,
        output_tokens=1,
        cohort_size=6,
        arrivals="poisson",
        seed=1,
        vocab_size=99,
    )
    lengths = [len(request.prompt) for request in spread(trace.requests, 8)]
    every = sorted(len(request.prompt) for request in trace.requests)
    assert lengths == every[1::3]
    assert len(spread(trace.requests, 99)) == 24


def test_launches_alternate() -> None:
    assert launch_order(["a", "b"], 3) == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]


def test_a_port_or_a_path_makes_it_no_other_engine() -> None:
    argv = "python -m x serve --topology tp2 --model /m --port {} --proof-dir {} -- --max-model-len 9"
    first, other = (flags_of(argv.format(*own).split()) for own in ((1, "/a"), (2, "/b")))
    assert first == other == ["serve", "--topology", "tp2", "--", "--max-model-len", "9"]
    assert flags_of(argv.replace("9", "8").split()) != first


def test_two_launches_killed_and_resumed(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SIGKILL during the second launch's cells; of what was measured only a spoiled cell is measured again."""
    words = arguments(out, "--launches", "2", "--absolute-rates", "--sla", "1,2")
    words[words.index("0.5,1.2")] = "20,40"
    process = subprocess.Popen([sys.executable, "-m", "harness", *words], stderr=subprocess.DEVNULL)
    while len(list((out / "cells").glob("*.json"))) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    kept = {path: path.stat().st_mtime_ns for path in (out / "cells").glob("*.parquet")}
    complete = {path.with_suffix(".parquet") for path in (out / "cells").glob("*.json")}
    spoiled = min(complete)
    facts = read(spoiled.with_suffix(".json")) | {"loop_lag_ms": {"p99": 1e6}}
    spoiled.with_suffix(".json").write_text(json.dumps(facts))
    assert main([*words, "--resume"]) == 0
    aside = {path.stem.rpartition("-")[0] for path in (out / "set_aside").glob("*.json")}
    assert spoiled.stem in aside and (out / "set_aside" / f"{spoiled.stem}-1.parquet").exists()
    cells = list(RunStore.open(out).cells())
    assert [str(cell.key) for cell in cells] == [
        f"{arm}_q{rate}_r{launch}" for arm in ("dcp2", "tp2") for rate in (20, 40) for launch in (0, 1)
    ]
    assert all(cell.facts["launch"] == cell.key.repeat for cell in cells)
    assert len(read(out / "manifest.json")["sessions"]) == 2
    assert all(check["ok"] for check in read(out / "manifest.json")["parity_checks"])
    steps = read(out / "manifest.json")["steps_s"]  # of the second session
    assert {"tp2 launch 2 parity", "tp2 launch 2 sweep"} <= steps.keys()  # no launch is timed unchecked
    unspoiled = {path for path in complete & kept.keys() if path.stem not in aside}
    assert all(path.stat().st_mtime_ns == kept[path] for path in unspoiled)
    assert not any(cell.facts["aborted"] for cell in cells)
    assert engines_of(out) == []
    assert main([*words, "--resume", "--seed", "9"]) == 2
    assert "was measured with another trace" in capsys.readouterr().err
    assert main([*words, "--resume", "--sla", "1,3"]) == 2
    assert 'was begun with limits {"applied": {"15": 1.0, "25": 2.0}' in capsys.readouterr().err
    assert main([*words, "--resume", "--rates", "20,30"]) == 2
    assert "was begun with the rates 20, 40; resume it with the same" in capsys.readouterr().err


def test_a_budget_that_holds_no_cell_is_planned_told_and_noted(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 0.001 requests a second a cell lasts an hour: it is never begun."""
    words = arguments(out, "--arms", "tp2", "--absolute-rates", "--sla", "1,2", "--budget", "5", "--json")
    words[words.index("0.5,1.2")] = "0.001,20"
    assert main(words) == 0
    shown = capsys.readouterr()
    plan, done = (json.loads(line) for line in shown.out.splitlines())
    assert (plan["event"], plan["cells"], plan["budget_s"]) == ("plan", 2, 300.0)
    assert plan["walk_s"] > 3000 and plan["may_not_fit_qps"] == [0.001, 20.0]
    assert (done["event"], done["cells"], done["dir"]) == ("done", 0, str(out))
    assert "plan: 2 cells" in shown.err and "budget 5 min, which 0.001, 20 QPS may not fit into" in shown.err
    assert any("--resume goes on" in note for note in read(out / "manifest.json")["notes"])
    assert not (out / "baseline.json").exists()  # nothing would follow from it
    assert engines_of(out) == []
