# SPDX-License-Identifier: Apache-2.0
"""What a report says of differences between cells: in pairs, of every two arms, of single requests far off."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from builders import cell_run, manifest
from test_report import FAST, TRACE, store_of, summary_of

from harness.report import write_report
from harness.report.tables import markdown_report
from harness.store import CellKey, RunStore

ONE_OFF = cell_run([0.5, 0.6, 1.5, 0.8, 0.9, 0.95])
STEADY = cell_run([0.51, 0.61, 0.71, 0.81, 0.91, 0.96])


def test_whole_answers_are_compared_in_pairs(tmp_path: Path) -> None:
    """Medians of the cells say sooner (0.86 s after 0.95), five of six answers end 10 ms later."""
    summary = summary_of(tmp_path / "run", {CellKey("tp2", 1.0, 0): ONE_OFF, CellKey("dcp2", 1.0, 0): STEADY})
    assert [arm["at_load"]["answer_p50_s"] for arm in summary["arms"]] == pytest.approx([0.95, 0.86])
    answer = summary["paired"][0]["answer"]
    assert (answer["n"], answer["delta_p50_s"], answer["resolved"]) == (6, pytest.approx(0.01), False)
    text = markdown_report(summary)
    told = "The whole answer of dcp2 ends 10 ms later than that of tp2 at the median of 6 paired requests:"
    assert f"{told} no interval, not resolved." in text
    assert re.search(r"\| dcp2 - tp2 \| 1 +\| answer +\| 6 +\| \+0\.0100 ", text)


def test_a_request_far_off_in_one_cell_only_is_told(tmp_path: Path) -> None:
    cells = {CellKey("tp2", 1.0, 0): ONE_OFF, CellKey("dcp2", 1.0, 0): STEADY}
    two = summary_of(tmp_path / "two", cells)
    assert two["far_off"] == []  # of two cells nobody knows which is off
    summary = summary_of(tmp_path / "three", cells | {CellKey("dcp2", 1.0, 1): STEADY})
    (found,) = summary["far_off"]
    assert (found["arm"], found["repeat"], found["id"]) == ("tp2", 0, "r0002")
    told = "r0002 in repeat 0 of tp2 at 1 QPS 1.500 s, 0.710 to 0.710 s in 2 other cells"
    assert f"1 request far off in one cell only, TTFT: {told}." in markdown_report(summary)
    slower = cells | {CellKey("tp2", 1.0, 0): STEADY, CellKey("dcp2", 1.0, 1): cell_run([2.0] * 6)}
    assert summary_of(tmp_path / "slower", slower)["far_off"] == []  # a slow cell, no request of it
    failed = cells | {CellKey("tp2", 1.0, 0): cell_run([0.5, None, 0.7, 0.8, 0.9, 0.95])}
    text = markdown_report(summary_of(tmp_path / "failed", failed | {CellKey("dcp2", 1.0, 1): STEADY}))
    assert "r0001 in repeat 0 of tp2 at 1 QPS failed, 0.610 to 0.610 s in 2 other cells" in text


def test_how_noisy_the_time_per_later_token_is(tmp_path: Path) -> None:
    """Of r0003 two tokens lie 0.1 s apart in one cell, 0.15 s in the other of the same arm."""
    records = [
        replace(r, token_s=[r.token_s[0], r.token_s[0] + 0.15]) if r.id == "r0003" else r
        for r in FAST.records
    ]
    cells = {CellKey("tp2", 1.0, 0): FAST, CellKey("dcp2", 1.0, 0): FAST}
    once = markdown_report(summary_of(tmp_path / "once", cells))
    assert "How far chance moves the time per later token is not known" in once
    cells[CellKey("dcp2", 1.0, 1)] = replace(FAST, records=records)
    text = markdown_report(summary_of(tmp_path / "twice", cells))
    assert "one request (r0003) took 100.00 and 150.00 ms in cells of the same arm (dcp2)" in text


def test_each_cell_tells_its_launch(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", manifest(TRACE), TRACE)
    for repeat, launch in ((0, 3), (1, 4)):
        key = CellKey("tp2", 1.0, repeat)
        store.write_cell(key, FAST, trace_sha256=TRACE.sha256, cache_salt="", launch=launch)
    assert re.search(r"\| repeat \| launch \| n ", text := write_report(store))
    assert re.search(r"\| 0 +\| 3 +\| 6 +\|", text) and re.search(r"\| 1 +\| 4 +\| 6 +\|", text)
    rows = csv.DictReader(io.StringIO((store.path / "cells.csv").read_text()))
    assert [(row["repeat"], row["launch"]) for row in rows] == [("0", "3"), ("1", "4")]


def test_every_arm_stands_against_every_earlier_one(tmp_path: Path) -> None:
    arms = ("tp2", "dcp2", "dcp2-stock")
    store = store_of(tmp_path / "run", {CellKey(arm, 1.0, 0): FAST for arm in arms}, arms=arms)
    text = write_report(store)
    assert all(f"| {pair} " in text for pair in ("dcp2 - tp2", "dcp2-stock - tp2", "dcp2-stock - dcp2"))
    rows = csv.DictReader(io.StringIO((store.path / "paired.csv").read_text()))
    pairs = [("tp2", "dcp2"), ("tp2", "dcp2-stock"), ("dcp2", "dcp2-stock")]
    assert [(row["first"], row["other"]) for row in rows] == [pair for pair in pairs for _ in range(6)]


def test_the_fixed_cohorts_size_is_told_of_each_arm(tmp_path: Path) -> None:
    cells = {CellKey("tp2", 1.0, 0): FAST, CellKey("dcp2", 1.0, 0): FAST}
    assert "(n = 3, repeats pooled)" in markdown_report(summary_of(tmp_path / "same", cells))
    cells[CellKey("dcp2", 1.0, 1)] = FAST
    assert "(n = 3 of tp2, 6 of dcp2, repeats pooled)" in markdown_report(summary_of(tmp_path / "a", cells))
    single = cell_run([0.5] * 6, records=[replace(r, cohort=i) for i, r in enumerate(FAST.records)])
    cells = dict.fromkeys(cells, single)
    text = markdown_report(summary_of(tmp_path / "b", cells))
    assert "(n = 1 of tp2, 2 of dcp2, repeats pooled; it is one request, no P50 of several)" in text
