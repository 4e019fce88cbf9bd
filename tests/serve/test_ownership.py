# SPDX-License-Identifier: Apache-2.0
"""The ownership contract on vLLM's real layers, built in a subprocess (`ownership_layers.py`): ranks over gloo."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = [
    "shared-owner",
    "shared-managed",
    "kimi-owner",
    "kimi-managed",
    "builder-flag",
    "builder-neither",
    "sparse-builder-neither",
    "owner-refuses-replicated-queries",
    "stock-text-without-owner",
]


ALONE = ["owner-alone", "owner-refuses-pcp"]


@pytest.fixture(scope="module")
def passed() -> tuple[list[str], str]:
    script = Path(__file__).with_name("ownership_layers.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    return done.stdout.split(), done.stderr[-6000:]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_agrees(passed: tuple[list[str], str], case: str) -> None:
    stdout, stderr = passed
    assert stdout.count(case) == 2, stderr


@pytest.mark.parametrize("case", ALONE)
def test_a_rank_without_dcp(passed: tuple[list[str], str], case: str) -> None:
    stdout, stderr = passed
    assert stdout.count(case) == 1, stderr
