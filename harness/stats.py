# SPDX-License-Identifier: Apache-2.0
"""Order statistics that do not claim more than the sample holds. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key")


def order_statistic(values: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile: the smallest value with at least `percent` % of the sample at or below it.

    A value of the sample itself, never between two, so that infinities (failures) need no special rule.
    """
    rank = max(1, -(-len(values) * percent // 100))
    return sorted(values)[rank - 1]


def percentile(values: Sequence[float], percent: int) -> float | None:
    """`order_statistic`, or None where the sample cannot support it or it falls on a failure (infinity).

    Above the median at least two values must lie beyond: n * (1 - p) >= 2, so P90 needs 20 values and P99
    needs 200.
    """
    if not values or (percent > 50 and len(values) * (100 - percent) < 200):
        return None
    value = order_statistic(values, percent)
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class PairedDelta:
    """Differences over `n` pairs; the median is None where it falls on a pair with a failure."""

    n: int
    median_s: float | None


def paired_delta(first: Mapping[Key, float], other: Mapping[Key, float]) -> PairedDelta:
    """Median over requests of other - first, in seconds; failures are infinite.

    A request that failed in one arm only counts as an infinite difference against that arm; one that failed
    in both arms says nothing and is left out.
    """
    pairs = [(first[key], other[key]) for key in first.keys() & other.keys()]
    deltas = sorted(b - a for a, b in pairs if math.isfinite(a) or math.isfinite(b))
    if not deltas:
        return PairedDelta(0, None)
    low, high = deltas[(len(deltas) - 1) // 2], deltas[len(deltas) // 2]
    median = (low + high) / 2 if math.isfinite(low) and math.isfinite(high) else None
    return PairedDelta(len(deltas), median)


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Least-squares slope of y over x; None where x does not vary."""
    if not x:
        return None
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    if not spread:
        return None
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
