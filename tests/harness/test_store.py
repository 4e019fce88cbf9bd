# SPDX-License-Identifier: Apache-2.0
"""A run's folder: who may go on with it, and what of it can be read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import cell_run, manifest, small_trace

from harness.cli import main
from harness.errors import UserError
from harness.load import CellRun
from harness.report import write_report
from harness.scrape import Sample
from harness.sla import Limits, Rule
from harness.store import CellKey, RunStore

TRACE = small_trace()
FAST = cell_run([0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
PAIR = {CellKey(arm, 1.0, 0): FAST for arm in ("tp2", "dcp2")}


def store_of(path: Path, cells: dict[CellKey, CellRun], **changes: Any) -> RunStore:
    store = RunStore.create(path, manifest(TRACE, **changes), TRACE)
    for key, run in cells.items():
        store.write_cell(key, run, trace_sha256=TRACE.sha256, cache_salt="s")
    return store


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    path.write_text(json.dumps(content))


def test_another_schema_and_what_is_lacking_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a folder of another version of the harness is, for every command that reads one."""

    def told(*arguments: object) -> str:
        assert main([*map(str, arguments)]) == 2
        return capsys.readouterr().err

    run = store_of(tmp_path / "run", PAIR).path
    edit(run / "cells" / "tp2_q1_r0.json", lambda facts: facts.pop("loop_lag_ms"))
    assert "tp2_q1_r0.json lacks loop_lag_ms; use the version of the harness that wrote it" in told(
        "report", run
    )
    edit(run / "manifest.json", lambda found: (found.pop("notes"), found["trace"].clear()))
    assert "manifest.json lacks notes;" in told("compare", run, run)
    edit(run / "manifest.json", lambda found: found.update(schema=2))
    assert "manifest.json is in schema 2, this harness reads 1; use the one that wrote it" in told(
        "report", run
    )


def test_facts_that_must_agree(tmp_path: Path) -> None:
    """Limits by their values, a checkpoint by its content; what neither side states agrees."""
    facts = {"checkpoint": {"path": "/here", "sha256": "1"}, "timeouts": {"drain_s": 300.0}}
    store = store_of(tmp_path / "run", {}, **facts)
    asked = store.manifest
    limits = asked["limits"]
    store.require_same(asked | {"launches": None})
    store.require_same(asked | {"checkpoint": {"path": "/there", "sha256": "1"}})
    store.require_same(asked | {"limits": limits | {"rule": "in other words", "source": {}}})
    rule = vars(Rule.parse("tail=5@p95"))
    for fact, value, begun in (
        ("checkpoint", {"path": "/here", "sha256": "2"}, 'checkpoint "1"'),
        ("timeouts", {"drain_s": 5.0}, r'timeouts \{"drain_s": 300.0\}'),
        ("launches", 2, "launches null"),
        ("limits", limits | {"applied": Limits.of(1.0, 3.0, "r").applied}, "limits"),
        ("limits", limits | {"rules": [rule]}, "limits"),
    ):
        with pytest.raises(UserError, match=f"was begun with {begun}.*; resume it with the same, or choose"):
            store.require_same(asked | {fact: value})


def test_a_cell_that_is_measured_again_keeps_no_older_samples(tmp_path: Path) -> None:
    """An engine that exported metrics in the cell that was cut short, and none in its repetition."""
    key = CellKey("tp2", 1.0, 0)
    store = store_of(tmp_path / "run", {})
    for samples in ([Sample(1000.0, running=1.0)], []):
        store.write_cell(key, FAST, samples, trace_sha256=TRACE.sha256, cache_salt="s")
    assert store.cell(key).samples == []


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    store_of(tmp_path / "run", {})
    with pytest.raises(UserError, match="already in use"):
        store_of(tmp_path / "run", {})
    with pytest.raises(UserError, match="holds no run"):
        RunStore.open(tmp_path)


def test_a_run_goes_on_with_its_own_arms_only(tmp_path: Path) -> None:
    store_of(tmp_path / "run", PAIR)
    RunStore.resume(tmp_path / "run", manifest(TRACE, ("dcp2",)), TRACE)
    with pytest.raises(UserError, match=r"was begun with the arms tp2, dcp2, without tp1;"):
        RunStore.resume(tmp_path / "run", manifest(TRACE, ("tp2", "tp1")), TRACE)


def test_a_run_with_another_trace_is_refused(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run", {})
    store.write_manifest(store.manifest | {"trace": {"sha256": "0" * 64}})
    with pytest.raises(UserError, match="was measured with trace 0000"):
        store.trace()


def test_a_cell_of_another_trace_is_not_mixed_in(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run", PAIR)
    store.write_cell(CellKey("tp2", 3.0, 0), FAST, trace_sha256="0" * 64, cache_salt="s")
    with pytest.raises(UserError, match=r"tp2_q3_r0\.json was measured with trace 0000"):
        write_report(store)


def test_a_damaged_cell_is_named(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run", PAIR)
    (store.path / "cells" / "tp2_q1_r0.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=r"cannot read .*tp2_q1_r0\.parquet"):
        write_report(store)
