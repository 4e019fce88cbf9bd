# SPDX-License-Identifier: Apache-2.0
"""Limits on TTFT and the verdicts drawn from them. Pure.

A limit is named after the source's threshold ("15", "25"); what is applied may differ, for a scaled-down
engine. A request misses a limit when its TTFT is above it. A failed request has an infinite TTFT: it misses
every limit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

SOURCE_LIMITS_S = {"15": 15.0, "25": 25.0}


@dataclass(frozen=True)
class Limits:
    """The applied thresholds in seconds by source name, and in words where they come from."""

    applied: dict[str, float]
    rule: str

    @classmethod
    def of(cls, first_s: float, second_s: float, rule: str) -> "Limits":
        """`first_s` stands for the source's 15 s, `second_s` for its 25 s."""
        if not 0 < first_s < second_s < math.inf:
            raise ValueError(f"limits must be positive and ascending, got {first_s:g},{second_s:g}")
        return cls(dict(zip(SOURCE_LIMITS_S, (first_s, second_s), strict=True)), rule)


@dataclass(frozen=True)
class CellVerdict:
    """What one cell says about one limit: whether the cell counts, and how many of its requests missed."""

    offered_qps: float
    valid: bool
    misses: int


def misses(ttft_s: Sequence[float], limit_s: float) -> int:
    """How many requests came later than `limit_s`; pass failures as infinity."""
    return sum(ttft > limit_s for ttft in ttft_s)


def highest_passing(cells: Sequence[CellVerdict]) -> float | None:
    """The highest tested rate at and below which every cell is valid and has no miss, or None.

    All repeats of a rate must pass. Rates 0.5 and 1 pass, 1.5 misses, 2 passes: the answer is 1.
    """
    highest = None
    for rate in sorted({cell.offered_qps for cell in cells}):
        if not all(cell.valid and cell.misses == 0 for cell in cells if cell.offered_qps == rate):
            break
        highest = rate
    return highest


def first_miss(cells: Sequence[CellVerdict]) -> float | None:
    """The lowest rate that has a valid cell with a miss; None where there is none."""
    return min((cell.offered_qps for cell in cells if cell.valid and cell.misses), default=None)
