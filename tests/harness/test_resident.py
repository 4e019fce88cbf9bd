# SPDX-License-Identifier: Apache-2.0
"""All arms' engines at once, against the fake engine: deaths, resumption, arms that fail, what is kept of it."""

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web
from builders import cell_run, manifest, record, small_trace
from commands import arguments, measured, on_gpus, read

from harness import load
from harness.cli import main
from harness.engines.process import Engine, free_port
from harness.errors import UserError
from harness.fleet import Fleet, gather_all
from harness.parity import at_fault
from harness.resident_sweep import touched
from harness.run_folder import RunFolder
from harness.serving import on_cpu
from harness.steps import Steps
from harness.store import Cell, CellKey, RunStore

pytestmark = pytest.mark.usefixtures("client_is_trusted")


def test_killed_restarted_and_resumed_as_another_launch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    long = ["--lone-prompts", "1", "--contexts", "2"]
    monkeypatch.setattr(sys, "argv", ["harness", "first"])
    assert main(on_gpus(out, *long, "--kill", "dcp2")) == 0
    manifest = read(out / "manifest.json")
    (death,) = manifest["deaths"]
    assert death["arm"] == "dcp2" and death["rehearsed"] and death["cells"] == ["dcp2_q6_r0"]
    assert "killed by SIGKILL" in death["cause"] and death["restart_s"] > 0
    aborted = read(out / "set_aside" / "dcp2_q6_r0-1.json")
    assert aborted["aborted"]
    first = measured(out)
    assert all(launch == (arm == "dcp2") for arm, _, _, launch in first) and len(first) == 6
    assert [arm for arm, rate, *_ in first if rate == 12] == ["dcp2-stock", "dcp2", "tp2"]
    assert [arm["kv_tokens"] for arm in manifest["arms"]] == [1_048_576, 2_097_152, 2_097_152]
    assert all(arm["kv_bytes"] == 1 << 30 for arm in manifest["arms"])
    assert set(read(out / "long_context-1.json")["lone"]) == {"tp2", "dcp2", "dcp2-stock"}
    assert len(read(out / "long_context-1.json")["together"]["arms"]["dcp2"]["ttft_s"]) == 2
    assert read(out / "residency-1.json")["idle_beside"] == ["dcp2", "dcp2-stock"]
    again = read(out / "parity-dcp2-launch2.json")
    assert again["ok"] and [pair["pair"] for pair in again["pairs"]][2:] == [
        "tp2 vs dcp2",
        "tp2 vs dcp2, concurrent",
    ]
    notes = " ".join(manifest["notes"])
    assert "One launch of each engine" in notes  # dcp2's first launch has no cell left
    assert "a rehearsal); it was started again in" in notes and "Idle engines beside" in notes
    assert "residency-1.json" in notes
    pairs = [pair["pair"] for pair in manifest["parity"]["pairs"]]
    others = ("dcp2", "dcp2, concurrent", "dcp2-stock", "dcp2-stock, concurrent")
    assert manifest["parity"]["ok"] and pairs[3:] == [f"tp2 vs {other}" for other in others]

    monkeypatch.setattr(sys, "argv", ["harness", "second"])
    assert main(on_gpus(out, "--repeats", "2", "--resume")) == 0
    assert "tp2 vs dcp2-stock: 64 positions" in capsys.readouterr().err.rpartition("warm-up took")[2]
    both = measured(out)
    assert both[:6] == first and len(both) == 12
    assert all(cell[2:] == (1, 1 + (cell[0] == "dcp2")) for cell in both[6:])
    assert "One launch" not in " ".join(read(out / "manifest.json")["notes"])
    floors = read(out / "summary.json")["noise_floor"]
    assert {floor["arm"] for floor in floors} == {"tp2", "dcp2", "dcp2-stock"}
    manifest = read(out / "manifest.json")
    commands = [session["command"] for session in manifest["sessions"]]
    assert commands == ["python -m harness first", "python -m harness second"]
    checks = manifest["parity_checks"]
    assert [(check["session"], check["launches"], check["ok"]) for check in checks] == [
        (1, {"tp2": 0, "dcp2": 0, "dcp2-stock": 0}, True),
        (1, {"dcp2": 1}, True),
        (2, {"tp2": 1, "dcp2": 2, "dcp2-stock": 1}, True),
    ]
    kept = out / "parity" / "check-1"
    assert read(kept / "verdict.json")["ok"] and (kept / "prompts.json.gz").exists()
    assert {path.name for path in kept.glob("*dcp*.json.gz")} == {"dcp2.json.gz", "dcp2-stock.json.gz"}
    pids = {read(out / "parity" / f"check-{n}" / "proof" / "dcp2" / "rank-1.json")["pid"] for n in (1, 2, 3)}
    assert len(pids) == 3


def test_a_launch_that_is_timed_despite_its_refusal_takes_the_headline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's first check passed; dcp2-stock comes back wrong, and its cells are of that launch."""
    faults = {"wrong_prefill_kv": "stock", "right_once": str(tmp_path / "was-up")}
    monkeypatch.setenv("FAKE_ENGINE", json.dumps(faults))
    out = tmp_path / "run"
    assert main(on_gpus(out, "--kill", "dcp2-stock", "--despite-refusal")) == 0
    assert read(out / "manifest.json")["parity"]["ok"]
    refusal = read(out / "summary.json")["parity"]["refusal"]
    assert refusal.startswith("launch 2 of dcp2-stock was timed, but parity refused: prompt p0")
    assert read(out / "summary.json")["paired"] == [] and refusal in (out / "table.md").read_text()
    assert main(["parity", str(out), "--tolerance", "2"]) == 0
    assert read(out / "summary.json")["parity"]["ok"]
    assert read(out / "parity" / "check-2" / "verdict.json")["before"]["refusal"] in refusal


def test_an_engine_that_comes_back_wrong_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {"wrong_prefill_kv": "stock", "right_once": str(tmp_path / "was-up")}
    monkeypatch.setenv("FAKE_ENGINE", json.dumps(faults))
    out = tmp_path / "run"
    assert main(on_gpus(out, "--kill", "dcp2-stock")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        "error: dcp2-stock was left out: parity refused: prompt p0 (40 tokens), position 0"
    )
    assert {arm for arm, *_ in measured(out)} == {"tp2", "dcp2"} and len(measured(out)) == 4
    manifest = read(out / "manifest.json")
    assert manifest["parity"]["ok"] and not read(out / "parity-dcp2-stock-launch2.json")["ok"]
    assert manifest["deaths"][0]["restart_s"] is None and manifest["left_out"].keys() == {"dcp2-stock"}


def cell_of(name: str, began_s: float, *outcomes: str, aborted: bool = False) -> Cell:
    """Its requests end a second after each other."""
    records = [record(index, done_s=float(index), status=status) for index, status in enumerate(outcomes)]
    arm, _, rate = name.partition("@")
    return Cell(CellKey(arm, float(rate), 0), {"started_unix_s": began_s, "aborted": aborted}, records, [])


def test_a_death_spoils_only_what_it_touched() -> None:
    """tp2 dies at 305 s, during a cell of its own; dcp2 lives. Overload before, or cancelled, is no one's death."""
    overload = cell_of("tp2@1", 0, "ok", "timeout", "ok", "timeout")
    cancelled = cell_of("dcp2@1", 100, "ok", "ok", "cancelled", "cancelled")
    timed_out = cell_of("dcp2@2", 200, "ok", "timeout", "stream_error")
    dies = cell_of("tp2@2", 300, "ok", "ok", "cancelled", "stream_error", "http_error")
    answers_no_more = cell_of("tp2@3", 400, "connect_error", "connect_error")
    cut_short = cell_of("dcp2@3", 500, "ok", "cancelled", aborted=True)
    cells = [overload, cancelled, timed_out, dies, answers_no_more, cut_short]
    assert touched(cells, ["tp2"]) == [cell.key for cell in (dies, answers_no_more, cut_short)]
    silent = [
        cell_of("tp2@1", 0, "ok", "timeout"),
        cell_of("tp2@2", 100, "ok"),
        cell_of("tp2@3", 200, "stream_error"),
    ]
    assert touched(silent, ["tp2"]) == [silent[-1].key]
    drained = cell_of("tp2@2", 300, "ok", "ok", "cancelled")
    assert touched([overload, drained], ["tp2"]) == []


def test_arms_of_one_launch_are_named(tmp_path: Path) -> None:
    """tp2 was started again between its two cells."""
    trace = small_trace()
    run = RunFolder(RunStore.create(tmp_path / "run", manifest(trace), trace), manifest(trace))
    for arm, rate, launch in (("tp2", 1.0, 0), ("tp2", 2.0, 1), ("dcp2", 1.0, 0)):
        key = CellKey(arm, rate, 0)
        run.store.write_cell(key, cell_run([0.5]), trace_sha256=trace.sha256, cache_salt="", launch=launch)
    run.note_launches()
    (note,) = run.manifest["notes"]
    assert note.startswith("One launch of the engine of dcp2: how much launches")


def test_budget_ends_the_sweep_and_resume_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(arguments(out, "--resident", "--budget", "0.002")) == 0
    assert measured(out) == []
    assert "Not every cell was measured" in capsys.readouterr().out
    assert main(arguments(out, "--resident", "--resume")) == 0
    assert len(measured(out)) == 4 and "tp2 vs reference" in str(read(out / "parity.json")["pairs"])


def test_arm_that_disagrees_is_left_out_beside_a_pair_that_agrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"wrong_prefill_kv": "stock"}))
    out = tmp_path / "run"
    assert main(on_gpus(out)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        "error: dcp2-stock was left out: parity refused: prompt p0 (40 tokens), position 0"
    )
    assert {arm for arm, *_ in measured(out)} == {"tp2", "dcp2"}
    assert read(out / "parity.json")["ok"] and not read(out / "parity-with-dcp2-stock.json")["ok"]


def test_arms_at_fault() -> None:
    pairs = ["tp2 vs dcp2", "dcp2-stock alone vs concurrent", "dcp2-shard vs reference", "tp2 vs dcp4"]
    diverged = [{"pair": pair, "explained": pair.endswith("dcp4")} for pair in pairs]
    assert at_fault(diverged, "tp2") == {"dcp2", "dcp2-stock", "dcp2-shard"}
    itself = {"pair": "tp2 alone vs concurrent", "explained": False}
    assert at_fault([itself], "tp2") == {"tp2"}
    assert at_fault([{"pair": "tp2 vs reference", "explained": False}], "tp2") == {"tp2"}


def test_arm_that_does_not_prove_itself_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer paths never ran: the other two are compared, and the command fails at the end."""
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"unused_path": "peer_decode_merge"}))
    out = tmp_path / "run"
    assert main(on_gpus(out)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: dcp2 was left out: arm dcp2 is not what its name says: peer_decode_merge")
    assert {arm for arm, *_ in measured(out)} == {"tp2", "dcp2-stock"}
    notes = read(out / "manifest.json")["notes"]
    assert any(note.startswith("dcp2 was left out") for note in notes)
    assert not any("residency" in note for note in notes)  # idleness was not measured
    assert read(out / "summary.json")["left_out"].keys() == {"dcp2"}
    assert "Left out: dcp2 (reasons below)" in (out / "table.md").read_text()


def test_a_rehearsal_that_did_not_happen_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All four are sent and answered between two looks at them."""
    monkeypatch.setattr(load, "PROGRESS_S", 60.0)
    out = tmp_path / "run"
    words = arguments(out, "--resident", "--kill", "dcp2")
    words[words.index("6,12")] = "4000"
    assert main(words) == 0
    assert "No rank of dcp2 was killed" in " ".join(read(out / "manifest.json")["notes"])
    assert read(out / "manifest.json")["deaths"] == []


async def test_others_are_given_up_when_too_few_are_left() -> None:
    async def fails() -> None:
        raise UserError("no")

    began = time.monotonic()
    outcomes = await gather_all(
        [asyncio.sleep(60), fails(), asyncio.sleep(0, "done")], lambda failed: failed > 0
    )
    assert time.monotonic() - began < 30
    assert str(outcomes[0]).startswith("given up") and str(outcomes[1]) == "no" and outcomes[2] == "done"


@pytest.mark.parametrize("despite", [False, True])
def test_arms_that_disagree(
    despite: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a reference the arms are each other's: an arm that differs refuses the pair."""
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"wrong_topology": "dcp2", "wrong_by": 0.5}))
    out = tmp_path / "run"
    assert main(on_gpus(out, *(["--despite-refusal"] if despite else []))) == (0 if despite else 2)
    shown = capsys.readouterr()
    assert "|Δlogprob| 0.5 > 0.3 (tp2 vs dcp2)" in (shown.out if despite else shown.err)
    assert len(measured(out)) == (6 if despite else 0)
    assert "fixed-cohort P50 TTFT |" not in shown.out.partition("## Cells")[0]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--resident", "--arms", "tp2,dcp2-stock"], "arm dcp2-stock needs GPUs"),
        (["--resident", "--image", "x"], "--resident starts processes; leave --image out"),
        (["--resident", "--kill", "dcp4"], "--kill dcp4 is none of the arms tp2,dcp2"),
        (["--resident", "--context-tokens", "-5"], "--context-tokens is -5; give at least 1"),
        (["--resident", "--parity-tolerance", "nan"], "--parity-tolerance is nan; give a positive number"),
        (["--resident", "--parity-lengths", "40,no"], "'40,no' is not a list of counts"),
    ],
)
def test_wrong_words(more: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tmp_path / "run", *more)) == 2
    assert f"error: {error}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_boundaries_are_bisected_on_a_grid_that_both_arms_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone a prefill takes up to 0.15 s; at 60 requests a second the last of four waits for all others."""
    out = tmp_path / "run"
    words = arguments(out, "--resident", "--bisect", "29", "--json")
    for before, after in (("6,12", "2,60"), ("15,25", "0.3,25"), ("0.01", "0.09")):
        words[words.index(before)] = after
    assert main(words) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (events[0]["event"], events[0]["cells"], events[0]["bisect_qps"]) == ("plan", 4, 29.0)
    assert events[-1]["event"] == "done" and events[-1]["cells"] == 6
    cells = measured(out)
    assert {(arm, rate) for arm, rate, *_ in cells[4:]} == {("tp2", 29.0), ("dcp2", 29.0)}


@dataclass
class Alive:
    """An engine whose process lives on, and does not end while it is watched."""

    url: str

    def alive(self) -> bool:
        return True

    async def dying(self) -> bool:
        return False


async def test_an_engine_that_is_only_slow_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than a probe's usual 3 s, as beside many long prompts; one that fails or never answers is dead."""

    async def health(request: web.Request) -> web.Response:
        await asyncio.sleep(float(request.match_info["after_s"]))
        return web.Response(status=int(request.match_info["status"]))

    app = web.Application()
    app.router.add_get("/{status}/{after_s}/health", health)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        trace = small_trace()
        folder = RunFolder(RunStore.create(tmp_path / "run", manifest(trace), trace), manifest(trace))
        fleet = Fleet(on_cpu(("p",), tmp_path, 1, 9), folder, Steps(sys.stderr), 0)
        fleet.engines = {
            name: cast(Engine, Alive(f"http://127.0.0.1:{port}/{name}"))
            for name in ("200/3.2", "503/0", "200/60")
        }
        monkeypatch.setattr("harness.fleet.ANSWERS_WITHIN_S", 5.0)
        assert await fleet.dead() == []
        assert await fleet.dead(list(fleet.engines)) == ["503/0", "200/60"]
    finally:
        await runner.cleanup()


def test_equal_bytes_are_read_from_proofs(tmp_path: Path) -> None:
    """Whole blocks: 10 of 10 bytes are as many as 9 of 11, and more than 9 of 10 by no more than a block."""
    trace = small_trace()
    run = RunFolder(RunStore.create(tmp_path / "run", manifest(trace), trace), manifest(trace))

    def proves(arm: str, kv_blocks: int, block_bytes: int) -> None:
        rank = {"kv_blocks": kv_blocks, "kv_bytes": kv_blocks * block_bytes}
        run.arm(arm).update(kv_bytes=rank["kv_bytes"], engine={"ranks": [rank]})

    proves("tp2", 10, 10)
    run.require_equal_bytes()
    proves("dcp2", 9, 11)
    run.require_equal_bytes()
    proves("dcp2", 8, 11)
    with pytest.raises(UserError, match="differ in bytes"):
        run.require_equal_bytes()


def test_each_command_calibrates_and_the_worst_is_the_runs(tmp_path: Path) -> None:
    trace = small_trace()
    run = RunFolder(RunStore.create(tmp_path / "run", manifest(trace), trace), manifest(trace))
    points = [{"error_ms": {"p95": p95}} for p95 in (0.2, 0.5, 0.1)]
    for point in points:
        run.keep_calibration(point)
    kept = read(tmp_path / "run" / "manifest.json")
    assert kept["client_calibration"] == points[1] and kept["client_calibrations"] == points
