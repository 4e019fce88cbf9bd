# SPDX-License-Identifier: Apache-2.0
"""How often does harness/validity.py call a cell unstable, at loads below and above saturation?

    python benchmarks/stability_selftest.py [--cells 400] [--out results/selftest/stability.json]

The queue is that of statistics_selftest.py; every request decodes for 2 s after its first token. Exit code 1
unless at most 2 % of the cells of 60 requests at 85 % load are called unstable.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from statistics_selftest import Case, as_records, keep, simulate_cell

from harness.validity import GROWTH_Z, backlog_growth

LOADS = (0.7, 0.85, 0.95, 1.05, 1.2, 1.5)
REQUESTS = (24, 60, 180)
DECODE_S = 2.0
MAX_FALSE = 0.02


def called_unstable(load: float, requests: int, seed: int) -> bool:
    case = Case("cell", False, load, factor=1.0, overhead_s=0.0, cohorts=requests, cohort_size=1)
    due_s, ttft_s = simulate_cell(case, np.random.default_rng([3, seed]))
    growth = backlog_growth(as_records(due_s, ttft_s, DECODE_S))
    return growth is not None and growth.proven


def main() -> int:
    parser = argparse.ArgumentParser(description="How often a cell is called unstable.")
    parser.add_argument(
        "--cells", type=int, default=400, help="simulated cells a load and length (default 400)"
    )
    parser.add_argument("--out", type=Path, help="JSON; the table is written beside it as .md")
    arguments = parser.parse_args()
    shares = {
        n: {
            load: sum(called_unstable(load, n, i) for i in range(arguments.cells)) / arguments.cells
            for load in LOADS
        }
        for n in REQUESTS
    }
    lines = ["| requests a cell | " + " | ".join(f"load {load:g}" for load in LOADS) + " |"]
    lines.append("| --- " * (1 + len(LOADS)) + "|")
    lines += [
        f"| {n} | " + " | ".join(f"{share:.1%}" for share in row.values()) + " |" for n, row in shares.items()
    ]
    print("\n".join(lines))
    if arguments.out:
        record = {"cells": arguments.cells, "z": GROWTH_Z, "called_unstable": shares}
        keep(arguments.out, record, "\n".join(lines))
    return 0 if shares[60][0.85] <= MAX_FALSE else 1


if __name__ == "__main__":
    sys.exit(main())
