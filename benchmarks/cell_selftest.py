# SPDX-License-Identifier: Apache-2.0
"""Do the 95 % intervals of one cell cover the truth, though requests wait in one queue?

    python benchmarks/cell_selftest.py [--cells 1000] [--out results/selftest/cells.json]

The queue is that of statistics_selftest.py. The truth at a load is the percentile, or the share over a limit, of the
requests of further simulated cells. "Taken as independent" are the intervals of n independent requests; "as printed"
those of harness/saturation.py, which counts fewer where requests wait for one another. Exit code 1 unless at most 8 %
of the cells print an interval without the truth, at each load and length.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from statistics_selftest import Case, Floats, as_records, keep, simulate_cell

from harness.saturation import independent_requests
from harness.stats import Interval, percentile_interval, share_interval

LOADS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9)
REQUESTS = (24, 60, 180)
TRUTH_CELLS = 2000
MAX_WRONG = 0.08
FEW, SOME = 0.02, 0.10
"""Shares of requests over a limit."""

Make = Callable[[Floats, float], Interval | None]


@dataclass(frozen=True)
class Coverage:
    """Shares of cells: `independent` covers the truth where n requests count as n; `printed` have an interval as
    printed, `covered` of those hold the truth (null: none printed), `wrong` of all cells print one that does not."""

    what: str
    requests: int
    load: float
    independent: float | None
    printed: float
    covered: float | None
    wrong: float


def coverages(requests: int, load: float, cells: int) -> list[Coverage]:
    case = Case("cell", False, load, factor=1.0, overhead_s=0.0, cohorts=requests, cohort_size=1)

    def simulated(kind: int, count: int) -> list[tuple[Floats, Floats]]:
        return [simulate_cell(case, np.random.default_rng([kind, seed])) for seed in range(count)]

    every = np.concatenate([ttft_s for _, ttft_s in simulated(5, TRUTH_CELLS)])
    measured = [
        (ttft_s, independent_requests(as_records(due_s, ttft_s))) for due_s, ttft_s in simulated(4, cells)
    ]

    def coverage(what: str, truth: float, make: Make) -> Coverage:
        alone = [interval for ttft_s, _ in measured if (interval := make(ttft_s, requests))]
        found = [interval for ttft_s, count in measured if (interval := make(ttft_s, count))]
        held = sum(truth in interval for interval in found)
        return Coverage(
            what=what,
            requests=requests,
            load=load,
            independent=sum(truth in interval for interval in alone) / len(alone) if alone else None,
            printed=len(found) / cells,
            covered=held / len(found) if found else None,
            wrong=(len(found) - held) / cells,
        )

    def percentile(percent: int) -> Coverage:
        truth = float(np.quantile(every, percent / 100))
        return coverage(
            f"P{percent}", truth, lambda ttft_s, count: percentile_interval(ttft_s.tolist(), percent, count)
        )

    def share(of: float) -> Coverage:
        limit_s = np.quantile(every, 1 - of)
        return coverage(
            f"{of:.0%} over the limit",
            of,
            lambda ttft_s, count: share_interval(int((ttft_s > limit_s).sum()), requests, count),
        )

    return [percentile(50), percentile(90), share(SOME), share(FEW)]


def table(found: list[Coverage]) -> str:
    """Each entry: covered if taken as independent; as printed: how many are, and how many of those cover."""
    lines = ["| interval | requests a cell | " + " | ".join(f"load {load:g}" for load in LOADS) + " |"]
    lines.append("| --- " * (2 + len(LOADS)) + "|")
    for what in dict.fromkeys(each.what for each in found):
        for requests in REQUESTS:
            row = [each for each in found if (each.what, each.requests) == (what, requests)]
            if any(each.independent is not None for each in row):
                lines.append(f"| {what} | {requests} | " + " | ".join(map(_entry, row)) + " |")
    return "\n".join(lines)


def _entry(found: Coverage) -> str:
    alone = "-" if found.independent is None else f"{found.independent:.0%}"
    if found.covered is None or found.printed < 0.005:
        return f"{alone}; none"
    return f"{alone}; {found.covered:.0%} of {found.printed:.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Coverage of a cell's intervals.")
    parser.add_argument(
        "--cells", type=int, default=1000, help="simulated cells a load and length (default 1000)"
    )
    parser.add_argument("--out", type=Path, help="JSON; the table is written beside it as .md")
    arguments = parser.parse_args()
    found = [
        each for n in REQUESTS for load in LOADS for each in coverages(n, load, arguments.cells)
    ]  # fmt: skip
    text = table(found)
    print(text)
    if arguments.out:
        record = {
            "command": f"python benchmarks/cell_selftest.py --cells {arguments.cells}",
            "required": {"printed_and_wrong_at_most": MAX_WRONG},
            "found": [asdict(each) for each in found],
        }
        keep(arguments.out, record, text)
    return 0 if all(each.wrong <= MAX_WRONG for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
