# SPDX-License-Identifier: Apache-2.0
"""Clocks and power while cells run, from a stand-in for nvidia-smi; nothing here needs a GPU."""

import asyncio
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from builders import manifest, small_trace
from fake_server import FakeServer

from harness import nvidia
from harness.files import read_parquet
from harness.load import Target
from harness.nvidia import GpuSampler
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
