# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3's own layer, sharded against replicated, built in a subprocess (`projection_layers.py`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORLDS = (1, 2, 4, 8, 16)


def run(*arguments: str, **environment: str) -> tuple[list[str], str]:
    script = Path(__file__).with_name("projection_layers.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    return done.stdout.split(), done.stderr[-6000:]


@pytest.fixture(scope="module")
def ranks() -> tuple[list[str], str]:
    return run("ranks", *map(str, WORLDS))


@pytest.mark.parametrize("weights", ["integers", "seeded"])
@pytest.mark.parametrize("gate", ["gated", "ungated"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_sharded_equals_replicated(
    ranks: tuple[list[str], str], world_size: int, gate: str, weights: str
) -> None:
    """The latent columns of every rank and its own gate, one to 600 rows, through one GEMM and through two."""
    assert f"{world_size}-{gate}-{weights}" in ranks[0], ranks[1]
    if world_size == 1:
        assert f"1-{gate}-{weights}-stock-class" in ranks[0], ranks[1]


@pytest.mark.parametrize("case", ["widths-that-do-not-divide", "low-latency-shapes", "quantisation"])
def test_single_cases(ranks: tuple[list[str], str], case: str) -> None:
    assert case in ranks[0], ranks[1]


@pytest.fixture(scope="module")
def processes() -> tuple[list[str], str]:
    return run("processes", TRITON_INTERPRET="1")


@pytest.mark.parametrize("case", ["processes", "forced-way-refused", "ranks-disagree"])
def test_two_processes_with_vllms_coordinators(processes: tuple[list[str], str], case: str) -> None:
    assert processes[0].count(case) == 2, processes[1]
