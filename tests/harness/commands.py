# SPDX-License-Identifier: Apache-2.0
"""Command lines of resident runs against the fake engine, and what they leave behind."""

import json
import sys
from pathlib import Path
from typing import Any

from harness.store import RunStore

FAKE = Path(__file__).with_name("fake_engine.py")
SMALL = (
    "--requests 4 --cohort-size 2 --output-tokens 8 --parity-lengths 40,127 --scale 0.01 --absolute-rates"
    " --sla 15,25 --rates 6,12"
)


def arguments(out: Path, *more: str) -> list[str]:
    places = ["--out", str(out), "--cache", str(out.parent / "cache")]
    return ["bench", *SMALL.split(), "--engine-command", f"{sys.executable} {FAKE}", *places, *more]


def on_gpus(out: Path, *more: str, ranks: int = 2) -> list[str]:
    arms = f"tp{ranks},dcp{ranks},dcp{ranks}-stock"
    return arguments(out, "--gpu", "--profile", f"slice-h200-{ranks}", "--arms", arms, *more)


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def measured(out: Path) -> list[tuple[str, float, int, int]]:
    """(arm, rate, repeat, launch) of each cell, in the order of measurement."""
    cells = sorted(RunStore.open(out).cells(), key=lambda cell: cell.facts["started_unix_s"])
    return [(c.key.arm, c.key.offered_qps, c.key.repeat, c.facts["launch"]) for c in cells]
