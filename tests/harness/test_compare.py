# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import cell_run, manifest, small_trace

from harness.cli import main
from harness.store import CellKey, RunStore
from harness.trace import Trace

TRACE = small_trace()


def run(path: Path, shift_s: float, trace: Trace = TRACE, slip_s: float = 0.001, **changes: object) -> str:
    store = RunStore.create(path, manifest(trace, **changes), trace)  # type: ignore[arg-type]
    for arm, own_s in (("tp2", 0.0), ("dcp2", 0.2)):
        cell = cell_run([0.5 + shift_s + own_s] * 6)
        cell = replace(cell, records=[replace(r, dispatched_s=r.due_s + slip_s) for r in cell.records])
        store.write_cell(CellKey(arm, 1.0, 0), cell, trace_sha256=trace.sha256, cache_salt="s", launch=0)
    return str(path)


def test_runs_of_the_same_trace_are_put_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = manifest(TRACE)["limits"] | {"applied": {"15": 5.0, "25": 6.0}}
    before, after = run(tmp_path / "before", 0.0), run(tmp_path / "after", 0.3, limits=limits)
    assert main(["compare", before, after, "--arm", "tp2", "--out", str(tmp_path / "out" / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert "after:tp2 - before:tp2 | 1   | TTFT   | 6     | +0.3000" in printed
    assert "source 15 s applied as 1 s" in printed and "here those of before hold for both" in printed
    assert "dcp2" not in printed
    assert "after:tp2" in (tmp_path / "out" / "page.html").read_text()
    assert not (tmp_path / "before" / "summary.json").exists()


def test_all_arms_stand_against_the_first_runs_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", run(tmp_path / "a", 0.0), run(tmp_path / "b", 0.3)]) == 0
    printed = capsys.readouterr().out
    for line in ("a:dcp2 - a:tp2", "b:tp2 - a:tp2", "b:dcp2 - a:tp2"):
        assert line in printed


def test_a_note_on_a_session_names_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sessions = [{}, {"gpus": [{"memory.used": "2048 MiB"}]}]
    assert main(["compare", run(tmp_path / "a", 0.0), run(tmp_path / "b", 0.3, sessions=sessions)]) == 0
    assert "b, session 2: 2048 MiB of GPU 0 in use before its engines started" in capsys.readouterr().out


def test_different_traces_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = small_trace(seed=8)
    assert main(["compare", run(tmp_path / "a", 0.0), run(tmp_path / "b", 0.0, other)]) == 2
    error = capsys.readouterr().err
    assert (
        TRACE.sha256[:12] in error and other.sha256[:12] in error and "measure both with one trace" in error
    )


def test_an_unknown_arm_or_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "a", 0.0)
    assert main(["compare", folder, folder, "--arm", "tp9"]) == 2
    assert "has no arm tp9; it has tp2, dcp2" in capsys.readouterr().err
    assert main(["compare", folder, str(tmp_path / "none")]) == 2


def test_a_run_beside_itself_keeps_two_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run(tmp_path / "a", 0.0)
    assert main(["compare", folder, folder, "--arm", "tp2"]) == 0
    assert "a-2:tp2 - a-1:tp2 | 1   | TTFT   | 6     | +0.0000" in capsys.readouterr().out
    assert json.loads((tmp_path / "a" / "manifest.json").read_bytes())["arms"][0]["name"] == "tp2"


def test_a_run_that_parity_refused_is_no_result_beside_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = {"ok": False, "compared": 1, "diverged": [], "refusal": "parity refused: prompt p0"}
    broken = run(tmp_path / "b", 0.3, parity=refused)
    assert main(["compare", run(tmp_path / "a", 0.0), broken]) == 0
    printed = capsys.readouterr().out
    assert "**parity refused: prompt p0**" in printed and "highest passing QPS" not in printed


@pytest.mark.parametrize("refusal", [None, "parity refused: prompt p1"])
def test_every_launch_that_counts_passed_parity(
    refusal: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last check passed, whatever dcp2's launch of these cells was told; without a check it was told nothing."""
    passed = {"ok": True, "compared": 1, "diverged": [], "refusal": None}
    checks = [
        {"launches": {"tp2": 0, "dcp2": 0}, "ok": refusal is None, "refusal": refusal},
        {"launches": {"tp2": 0, "dcp2": 1}, "ok": True, "refusal": None},
    ]
    folders = [run(tmp_path / name, 0.0, parity=passed, parity_checks=checks) for name in ("a", "b")]
    for words in (["compare", *folders], ["report", folders[0]]):
        assert main(words) == 0
        printed = capsys.readouterr().out
        told = "launch 1 of dcp2 was timed, but parity refused: prompt p1" in printed
        assert told == (refusal is not None) == ("highest passing QPS" not in printed)
    unchecked = run(tmp_path / "c", 0.0, parity=passed, parity_checks=checks[1:])
    assert main(["report", unchecked]) == 0
    assert "launch 1 of dcp2 was timed, but its parity was not checked" in capsys.readouterr().out


def test_a_launch_without_a_cell_that_counts_refuses_neither_its_run_nor_a_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parity refused the first launch of dcp2, all of whose cells were spoiled by a late client."""
    passed = {"ok": True, "compared": 1, "diverged": [], "refusal": None}
    checks = [
        {"launches": {"dcp2": 0}, "ok": False, "refusal": "parity refused: prompt p1"},
        {"launches": {"tp2": 0, "dcp2": 1}, "ok": True, "refusal": None},
    ]
    spoiled = run(tmp_path / "spoiled", 0.0, slip_s=0.04, parity=passed, parity_checks=checks)
    for words in (["compare", spoiled, run(tmp_path / "other", 0.0)], ["report", spoiled]):
        assert main(words) == 0
        printed = capsys.readouterr().out
        assert "do not count" in printed and "launch 1 of dcp2 was timed" not in printed
    assert json.loads((tmp_path / "spoiled" / "summary.json").read_bytes())["parity"] == passed


def test_each_run_is_judged_by_what_it_declared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A client 40 ms late counts where the run declared shared cores, whichever run stands first."""
    shared = run(tmp_path / "shared", 0.0, slip_s=0.04, shared_cores=True)
    own = run(tmp_path / "own", 0.0, slip_s=0.04)
    for folders in ((shared, own), (own, shared)):
        assert main(["compare", *folders, "--arm", "tp2"]) == 0
        printed = capsys.readouterr().out
        assert "1 of 2 cells do not count (own:tp2 at 1 QPS" in printed
        assert "The client of shared:tp2 shares its cores with the engine" in printed
        assert "The client of own:tp2 has its own cores" in printed
        assert "differ in shared_cores" in printed and "each one's cells are judged by its own" in printed


def test_the_worse_error_bar_holds_for_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def bar(p95: float) -> dict[str, object]:
        error = {"p50": 0.1, "p95": p95, "max": 2.0}
        return {"error_ms": error, "n": 40, "body_bytes": 1e4, "offered_qps": 20.0}

    good = run(tmp_path / "good", 0.0, client_calibration=bar(0.2), code_sha256="a")
    bad = run(tmp_path / "bad", 0.0, client_calibration=bar(1.5), code_sha256="b")
    none = run(tmp_path / "none", 0.0)
    for folders in ((good, bad), (bad, good)):
        assert main(["compare", *folders]) == 0
        printed = capsys.readouterr().out
        assert "P95 1.50 ms" in printed and "P95 0.20" not in printed and "differ in code_sha256" in printed
    assert main(["compare", good, none]) == 0
    printed = capsys.readouterr().out
    assert "P95 0.20 ms" in printed and "The client's own error was not measured in none." in printed
