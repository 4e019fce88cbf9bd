# SPDX-License-Identifier: Apache-2.0
"""Order statistics and shares that do not claim more than the sample holds. Pure.

Differences between arms are in paired.py. Distribution functions come from scipy.special: importing scipy.stats
takes longer than the rest of the harness.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, bdtrc, betaincinv

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval; an end is infinite where the sample does not bound that side."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def quantile(values: Sequence[float], percent: int) -> float:
    """The one definition of a percentile here; of 50 % it is the usual median.

    The smallest value with more than `percent` % of the sample at or below it; where a value has exactly that
    share at or below it, the mean of this and the next one (Hyndman and Fan, Sample Quantiles, 1996, type 2).
    So P50(b - a) = -P50(a - b), also of an even sample. A mean with a failure (infinite) is infinite.
    """
    ordered = sorted(values)
    rank, beyond = divmod(len(ordered) * percent, 100)
    if beyond:
        return ordered[rank]
    low, high = ordered[max(rank, 1) - 1], ordered[min(rank, len(ordered) - 1)]
    return low if low == high else (low + high) / 2


def supports(n: int, percent: int) -> bool:
    """Whether n values can tell this percentile.

    Above the median at least two values must lie beyond: n * (1 - p) >= 2, so P90 needs 20 values and P99
    needs 200.
    """
    return n > 0 and (percent <= 50 or n * (100 - percent) >= 200)


def percentile(values: Sequence[float], percent: int) -> float | None:
    """`quantile`, or None where the sample cannot support it or it falls on a failure (infinity)."""
    if not supports(len(values), percent):
        return None
    value = quantile(values, percent)
    return value if math.isfinite(value) else None


def percentile_interval(
    values: Sequence[float], percent: int, independent: float = math.inf
) -> Interval | None:
    """A distribution-free interval of a percentile: two values of the sample, chosen by their ranks alone.

    The count of values at or below the true percentile is binomial(n, p), so the ranks are its 2.5 % and
    97.5 % points (David and Nagaraja, Order Statistics, 7.1). Where neighbours are alike, n values tell no more
    than `independent` of them would (saturation.independent_requests): the ranks are those of so many, spread
    over all n. None where so many have no such ranks: a median needs 6 values, P90 needs 36, P99 needs 368.
    """
    n, p, tail = len(values), percent / 100, (1 - CONFIDENCE) / 2
    m = n if independent >= n else math.floor(independent)
    if not m:
        return None
    counts = np.arange(m + 1)
    low = int((bdtr(counts, m, p) >= tail).argmax())  # ranks, from 1
    high = int((bdtrc(counts, m, p) <= tail).argmax()) + 1
    if low < 1 or high > m:
        return None
    ordered = sorted(values)
    return Interval(ordered[low * n // m - 1], ordered[-(-high * n // m) - 1])


def share_interval(count: int, n: int, independent: float = math.inf) -> Interval:
    """Clopper and Pearson's exact interval of a share, `count` of n requests.

    Where n requests tell no more than `independent` of them would, it is that of the same share of so many (Korn
    and Graubard, Survey Methodology 24, 1998). Of fewer than one, any share.
    """
    tail = (1 - CONFIDENCE) / 2
    m = min(n, independent)
    if m < 1:
        return Interval(0.0, 1.0)
    counted = count * m / n
    low = float(betaincinv(counted, m - counted + 1, tail)) if count else 0.0
    high = float(betaincinv(counted + 1, m - counted, 1 - tail)) if count < n else 1.0
    return Interval(low, high)


def slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Least-squares slope of y over x; None where x does not vary."""
    if not x:
        return None
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    if not spread:
        return None
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
