# SPDX-License-Identifier: Apache-2.0
"""Clocks and power while cells run, from a stand-in for nvidia-smi; nothing here needs a GPU."""

import asyncio
import os
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from builders import cell_run, manifest, small_trace
from fake_server import FakeServer

from harness import nvidia
from harness.compare import compared
from harness.files import read_parquet
from harness.load import Target
from harness.nvidia import GpuSample, GpuSampler
from harness.report import build_summary
from harness.report.tables import markdown_report
from harness.store import CellKey, RunStore
from harness.sweep import Plan, measure

LOOPS = """
case "$*" in *--loop=1*) ;; *) echo asked once; exit 1;; esac
n=0
while :; do
  echo "0, $((1900 + n)), 3201, 612.50, 55, 0x0000000000000004"
  echo "1, 1980, 3201, [N/A], 41, 0x0000000000000000"
  n=$((n + 5)); sleep 0.1
done
"""


def nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that runs `script`, found first."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


async def measured(path: Path) -> RunStore:
    trace = small_trace()
    store = RunStore.create(path, manifest(trace, ("a",)), trace)
    async with FakeServer() as server:
        assert await measure(store, [Target("a", server.url, "m")], trace, Plan((20.0,)))
    return store


async def test_each_cell_keeps_its_clocks_and_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, LOOPS, monkeypatch)
    store = await measured(tmp_path / "run")
    key = CellKey("a", 20.0, 0)
    first, second = store.cell(key).facts["gpus"]
    assert first["gpu"] == 0 and first["power_w"] == {"min": 612.5, "median": 612.5, "max": 612.5}
    assert first["sm_mhz"]["min"] == 1900 and first["event_reasons"] == ["0x0000000000000004"]
    assert second["power_w"] is None and second["temperature_c"]["max"] == 41
    rows = read_parquet(store.path / "cells" / f"{key}.gpus.parquet")
    assert len(rows) == first["samples"] + second["samples"] >= 4
    times_s = [row["t_s"] for row in rows]
    assert times_s[0] <= 0 < times_s[-1] and times_s == sorted(times_s)  # before its first request, and on
    store.set_aside(key)
    assert (store.path / "set_aside" / f"{key}-1.gpus.parquet").exists()


@pytest.mark.parametrize("script", [None, "exit 9", "echo '[Not Supported]'"])
async def test_without_gpus_there_is_nothing_to_keep(
    script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script:
        nvidia_smi(tmp_path, script, monkeypatch)
    store = await measured(tmp_path / "run")
    assert [cell.facts["gpus"] for cell in store.cells()] == [[]]
    assert not list(store.path.rglob("*.gpus.parquet"))


async def test_one_that_hangs_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the event loop, nor a cell's end, nor its beginning for longer than a first reading may take."""
    monkeypatch.setattr(nvidia, "FIRST_WITHIN_S", 2.0)
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    async with GpuSampler([sys.executable, "-c", "import time; time.sleep(60)"]) as gpus:
        await asyncio.sleep(0.1)
    ticking.cancel()
    assert gpus.samples == [] and ticks[-1] - ticks[0] < 20
    assert max(later - tick for tick, later in pairwise(ticks)) < 1.0


BEGAN_S = 1000.0
"""Of each cell: one request after the other is under way in the first 0.6 of each of six seconds."""


def sampled(t_s: float, sm_mhz: float | None, reasons: int | str, gpu: int = 0) -> GpuSample:
    mask = reasons if isinstance(reasons, str) else f"0x{reasons:016x}"
    return GpuSample(BEGAN_S + t_s, gpu, sm_mhz, 3201.0, 650.0, 55.0, mask)


def run_of(path: Path, cells: Mapping[tuple[str, float], Sequence[GpuSample]], **changes: Any) -> RunStore:
    trace = small_trace()
    store = RunStore.create(path, {**manifest(trace), **changes}, trace)
    for (arm, qps), gpus in cells.items():
        run = cell_run([0.5] * 6, started_unix_s=BEGAN_S)
        store.write_cell(CellKey(arm, qps, 0), run, trace_sha256=trace.sha256, cache_salt="s", gpus=gpus)
    return store


def clocks_told(store: RunStore) -> list[str]:
    """By table.md."""
    lines = markdown_report(build_summary(store.manifest, list(store.cells()))).splitlines()
    return [line for line in lines if "SM clock" in line]


SLOWED = [
    sampled(-0.4, 1980, 0),  # before the first request
    sampled(0.2, 1500, 0x4),
    sampled(0.2, 345, 0x1, gpu=1),  # nothing runs on it
    sampled(0.2, 1600, 0x4 | 0x20, gpu=2),
    sampled(0.8, 1980, 0x4),  # between two requests
    sampled(1.2, None, 0x4),
    sampled(1.2, 1200, "[N/A]"),
    sampled(9.0, 1980, 0x4),
]
FREE = [sampled(0.2, 1980, 0), sampled(2.3, 1900, 0x8)]
SESSIONS = [{"gpus": [{"clocks.max.sm": "1980 MHz"}, {"clocks.max.sm": "[N/A]"}]}, {}]


def test_the_report_tells_the_clocks_of_busy_gpus_and_what_held_them_down(tmp_path: Path) -> None:
    elsewhere = [sampled(0.2, 700, 0x80)]  # at a rate that the other arm was not measured at
    cells = {("tp2", 1.0): FREE, ("dcp2", 1.0): SLOWED, ("dcp2", 2.0): elsewhere}
    store = run_of(tmp_path / "run", cells, sessions=SESSIONS)
    assert clocks_told(store) == [
        "Note: Mean SM clock of busy GPUs (looked at once a second; busy: a request was under way and the GPU did not "
        "report itself idle): tp2 1,940 MHz, dcp2 1,550 MHz, of at most 1,980 MHz."
        " The power cap held the clock down in 0 of 2 (tp2), 2 of 2 (dcp2) busy samples."
        " A hardware slowdown held the clock down in 1 of 2 (tp2), 0 of 2 (dcp2) busy samples."
        " A software thermal slowdown held the clock down in 0 of 2 (tp2), 1 of 2 (dcp2) busy samples."
        " The arms' clocks differ by 25.2 %: a difference in speed may be one of clocks."
    ]


@pytest.mark.parametrize(("mhz", "warned"), [(1962, False), (1958, True)])
def test_clocks_that_differ_by_over_a_percent_are_warned_of(mhz: float, warned: bool, tmp_path: Path) -> None:
    cells = {("tp2", 1.0): [sampled(0.2, 1980, 0)], ("dcp2", 1.0): [sampled(0.2, mhz, 0)]}
    (told,) = clocks_told(run_of(tmp_path / "run", cells))
    assert f"tp2 1,980 MHz, dcp2 {mhz:,} MHz. No busy sample tells of a slowdown." in told
    assert ("may be one of clocks" in told) is warned


@pytest.mark.parametrize("gpus", [[], [sampled(0.2, None, "[N/A]")]])
def test_without_clocks_there_is_no_note(gpus: list[GpuSample], tmp_path: Path) -> None:
    store = run_of(tmp_path / "run", {("tp2", 1.0): gpus, ("dcp2", 1.0): gpus}, sessions=SESSIONS)
    assert clocks_told(store) == []


def test_runs_that_are_compared_are_warned_of_likewise(tmp_path: Path) -> None:
    """The highest clock is that of both hosts' GPUs."""
    lower = [{"gpus": [{"clocks.max.sm": "1755 MHz"}]}]
    slow = run_of(tmp_path / "slow", {("tp2", 1.0): SLOWED}, sessions=lower)
    free = run_of(tmp_path / "free", {("tp2", 1.0): FREE}, sessions=SESSIONS)
    (told,) = [note for note in build_summary(*compared(slow, free, "tp2"))["notes"] if "SM clock" in note]
    assert "slow:tp2 1,550 MHz, free:tp2 1,940 MHz, of at most 1,980 MHz." in told
    assert told.endswith("a difference in speed may be one of clocks.")
