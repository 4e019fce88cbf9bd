# SPDX-License-Identifier: Apache-2.0
"""How often does McNemar's test of the report call arms different that differ by chance only?

    python benchmarks/mcnemar_selftest.py [--pairs 400] [--out results/selftest/mcnemar.json]

The queue is that of statistics_selftest.py: the same service in both arms, of which each was launched once or four
times; launches differ by 1 %, requests by 3 %. The limit is one that a fifth of all requests miss. An exact test whose
requests were independent would say p < 0.05 in at most 5 % of the pairs. There is no bar to meet: this is for whoever
reads a small p.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from statistics_selftest import LAUNCH_SPREAD, Case, Floats, keep, simulate

from harness.paired import mcnemar

LOADS = (0.4, 0.6, 0.8, 0.9)
DESIGNS = ((24, 1), (60, 1), (60, 4), (360, 1), (360, 4))
"""Requests of the trace, launches an arm."""
MISSING = 0.2
SMALL = 0.05


def small_p(requests: int, launches: int, load: float, pairs: int) -> float:
    """The share of pairs with p < 0.05."""
    case = Case("pair", False, load, 1.0, 0.0, launches=launches, cohorts=requests, cohort_size=1)
    found = [simulate(case, np.random.default_rng([6, seed]))[1:] for seed in range(pairs)]
    limit_s = np.quantile(np.concatenate([ttft_s.ravel() for pair in found for ttft_s in pair]), 1 - MISSING)

    def missed(ttft_s: Floats) -> dict[str, int]:
        return {str(index): int(count) for index, count in enumerate((ttft_s > limit_s).sum(axis=0))}

    return sum(mcnemar(missed(first), missed(other)).p < SMALL for first, other in found) / pairs


def main() -> int:
    parser = argparse.ArgumentParser(description="How often McNemar's p is small by chance.")
    parser.add_argument("--pairs", type=int, default=400, help="simulated pairs a case (default 400)")
    parser.add_argument("--out", type=Path, help="JSON; the table is written beside it as .md")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = [
        {
            "requests": requests,
            "launches": launches,
            "small_p": {load: small_p(requests, launches, load, arguments.pairs) for load in LOADS},
        }
        for requests, launches in DESIGNS
    ]
    lines = ["| requests | launches an arm | " + " | ".join(f"load {load:g}" for load in LOADS) + " |"]
    lines.append("| --- " * (2 + len(LOADS)) + "|")
    lines += [
        f"| {row['requests']} | {row['launches']} | "
        + " | ".join(f"{share:.0%}" for share in row["small_p"].values())
        + " |"
        for row in found
    ]
    text = "\n".join(lines)
    print(text)
    if arguments.out:
        record = {
            "command": f"python benchmarks/mcnemar_selftest.py --pairs {arguments.pairs}",
            "launch_spread": LAUNCH_SPREAD,
            "p_below": SMALL,
            "found": found,
        }
        keep(arguments.out, record, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
