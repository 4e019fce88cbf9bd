# SPDX-License-Identifier: Apache-2.0
"""How far two arms differ, request by request, and how sure that is. Pure; times in seconds.

The statistic. At one offered rate arm A was launched a times and arm B b times, and every launch served the
same n requests, once or more often. M[i, k] is the median over requests and passes of TTFT in launch k of B minus TTFT
in launch i of A. The estimate is the mean of M over all a * b combinations.

Its uncertainty has two parts that have nothing to do with each other:

- Which requests were asked. Requests that follow one another wait in the same queue, so they do not count as
  one observation each: whole cohorts, in runs of up to 4 neighbours, are drawn with replacement (circular block
  bootstrap), each with its requests in every launch, and the variance of the mean of M over the draws is this
  part.
- Which launches were met. An engine that is started again is a little faster or slower for as long as it
  lives. The variance of M's row means, less what the drawn cohorts alone make rows vary, divided by a, plus the
  same for columns, is this part: launches as crossed random effects (Searle, Casella and McCulloch, Variance
  Components, ch. 4; Owen, The pigeonhole bootstrap, 2007).

The interval is estimate -+ t * sqrt(sum), with Satterthwaite's (1946) degrees of freedom: few launches make it
wide, as they should. Near saturation a trace holds too few busy spells to tell how large a difference is
(saturation.py): then there is none. `benchmarks/statistics_selftest.py` shows what the interval covers.

Too few cohorts for that leave each pair of one launch each, of which order statistics over requests speak: of
these launches alone, so that they resolve nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import bdtr, stdtrit

from harness.saturation import independent_of, memory_requests
from harness.stats import CONFIDENCE, Interval, percentile_interval, quantile

Floats = npt.NDArray[np.float64]
Launch = Mapping[tuple[int, str], float]
"""TTFT of one launch of an arm at one rate, by (pass over the trace within this launch, request id)."""

MIN_COHORTS = 30
MIN_MEMORIES = 20
"""As often as this a trace must be as long as the queue remembers."""
LONGEST_RUN = 4
REPLICATES = 1000
SEED = 20_261_129
"""Of the drawn cohorts: the same records give the same interval."""


@dataclass(frozen=True)
class LaunchPair:
    """One launch of each arm, by their places: the median over requests, its interval of these two alone."""

    first: int
    other: int
    n: int
    median_s: float
    interval: Interval


@dataclass(frozen=True)
class PairedEstimate:
    """Other arm minus first arm; negative: the other one is faster.

    `median_s` is None where it falls on a failure. `interval` is None with the `reason` in words.
    `knows_launches` is False where an arm was launched once: then the interval is of these launches only.
    `launch_pairs` are told where cohorts are too few for an interval.
    """

    n: int
    cohorts: int
    launches: tuple[int, int]
    median_s: float | None
    interval: Interval | None
    reason: str | None
    knows_launches: bool
    launch_pairs: Sequence[LaunchPair] = ()


def paired_estimate(
    first: Sequence[Launch],
    other: Sequence[Launch],
    cohort_of: Mapping[str, int],
    replicates: int = REPLICATES,
    waiting: float = 0.0,
) -> PairedEstimate:
    """The median paired difference of TTFT with its interval.

    `cohort_of` gives each request's cohort. A request that failed (infinite TTFT) in one arm only counts as
    an infinite difference; one that failed in both is left out. Cohorts are counted over all passes, but
    whether the trace is long enough for its queue (`waiting`: the busier arm's share of requests that came while
    another one waited, `saturation.waiting_share`) by its own requests: another pass meets the same busy spells.
    Nor are there more cohorts than independent requests: small ones that overlap count as fewer.
    """
    launches = (len(first), len(other))
    table = [[_deltas(a, b) for b in other] for a in first]
    n = min((len(deltas) for row in table for deltas in row), default=0)
    if not n:
        return PairedEstimate(0, 0, launches, None, None, "no request was served in both arms", False)
    passes = min(sum(len({key[0] for key in launch}) for launch in arm) for arm in (first, other))
    trace_cohorts = sorted({cohort_of[name] for row in table for deltas in row for _, name in deltas})
    cohorts = len(trace_cohorts) * passes
    known = min(launches) > 1

    columns = [[_Sorted.of(deltas, cohort_of, trace_cohorts) for deltas in row] for row in table]
    once = np.ones((1, len(trace_cohorts)))
    medians = np.array([[cell.median(once)[0] for cell in row] for row in columns])
    estimate = float(medians.mean()) if np.isfinite(medians).all() else None

    def answer(
        interval: Interval | None, reason: str | None, pairs: Sequence[LaunchPair] = ()
    ) -> PairedEstimate:
        return PairedEstimate(n, cohorts, launches, estimate, interval, reason, known, pairs)

    if estimate is None:
        return answer(None, "the median falls on a failed request")
    distinct = min(len({name for _, name in deltas}) for row in table for deltas in row)
    long_enough = distinct >= MIN_MEMORIES * (memory := memory_requests(waiting))
    independent = independent_of(distinct, waiting)
    alone = _launch_pairs(table, independent) if long_enough else ()
    if cohorts < MIN_COHORTS:
        few = f"n too small: {cohorts} cohorts over all repeats, an interval needs {MIN_COHORTS}"
        return answer(None, few, alone)
    if not long_enough:
        return answer(
            None,
            f"near saturation: {waiting:.0%} of the requests came while another one waited for its first token;"
            f" so busy a queue remembers {memory:.0f} requests, and an interval needs a trace {MIN_MEMORIES} times"
            f" as long, not of {distinct}",
        )
    if (count := independent * passes) < MIN_COHORTS:
        few = (
            f"n too small: waiting for one another, {cohorts} cohorts count as {count:.1f}, an interval needs"
        )
        return answer(None, f"{few} {MIN_COHORTS}", alone)
    if len(trace_cohorts) < 2:
        return answer(None, "the trace has one cohort: nothing to draw from")
    draws = _draw_cohorts(len(trace_cohorts), replicates)
    drawn = np.array([[cell.median(draws) for cell in row] for row in columns])  # a, b, replicates
    if not np.isfinite(drawn).all():
        return answer(None, "too many failures beside the median")
    return answer(_interval(estimate, medians, drawn, len(trace_cohorts)), None)


def _launch_pairs(
    table: Sequence[Sequence[Mapping[tuple[int, str], float]]], independent: float
) -> list[LaunchPair]:
    """Those with requests enough for an interval of a median; a request sent again is no further request."""
    found = []
    for first, row in enumerate(table):
        for other, deltas in enumerate(row):
            values = list(deltas.values())
            if interval := percentile_interval(values, 50, independent):
                found.append(LaunchPair(first, other, len(values), quantile(values, 50), interval))
    return found


def run_length(cohorts: int) -> int:
    """Neighbouring cohorts that are drawn together: a queue's memory outlives a cohort. At least 8 runs."""
    return max(1, min(LONGEST_RUN, cohorts // 8))


def _draw_cohorts(cohorts: int, replicates: int) -> Floats:
    """How often each cohort is drawn (replicates, cohorts), in runs that follow one another."""
    generator = np.random.Generator(np.random.PCG64(SEED))
    run = run_length(cohorts)
    starts = generator.integers(0, cohorts, size=(replicates, -(-cohorts // run)))
    drawn = (starts[:, :, None] + np.arange(run)).reshape(replicates, -1)[:, :cohorts] % cohorts
    counts = np.zeros((replicates, cohorts))
    np.add.at(counts, (np.arange(replicates)[:, None], drawn), 1)
    return counts


def _interval(estimate: float, medians: Floats, drawn: Floats, cohorts: int) -> Interval:
    requests = float(drawn.mean(axis=(0, 1)).var(ddof=1))
    sides = [_launch_variance(medians.mean(axis=1 - axis), drawn.mean(axis=1 - axis)) for axis in (0, 1)]
    variance = requests + max(0.0, sum(extra for extra, _, _ in sides))
    if variance == 0:
        return Interval(estimate, estimate)
    parts = [(requests, cohorts / run_length(cohorts) - 1)]
    parts += [(observed, float(freedom)) for _, observed, freedom in sides if freedom]
    spread = sum(part**2 / freedom for part, freedom in parts)
    # Estimated parts are subtracted above, which can leave less freedom than the part with the least has.
    freedom = max(variance**2 / spread, min(freedom for _, freedom in parts))
    half = float(stdtrit(freedom, (1 + CONFIDENCE) / 2)) * math.sqrt(variance)
    return Interval(estimate - half, estimate + half)


def _launch_variance(means: Floats, drawn: Floats) -> tuple[float, float, int]:
    """Of an arm's part of the estimate: variance that its launches add, all that is observed, and freedom.

    `means` (launches): each launch's estimate; `drawn` (launches, replicates): the same over drawn cohorts.
    """
    count = len(means)
    if count < 2:
        return 0.0, 0.0, 0
    covariance = np.cov(drawn)
    common = (covariance.sum() - np.trace(covariance)) / (count * (count - 1))
    by_requests = float(np.trace(covariance) / count - common)
    observed = float(means.var(ddof=1))
    return (observed - by_requests) / count, observed / count, count - 1


@dataclass(frozen=True)
class _Sorted:
    """Differences in order, with the place of each one's cohort: medians of many draws at the price of one sort."""

    values: Floats
    cohort: npt.NDArray[np.intp]

    @classmethod
    def of(
        cls, deltas: Mapping[tuple[int, str], float], cohort_of: Mapping[str, int], cohorts: Sequence[int]
    ) -> "_Sorted":
        place = {cohort: index for index, cohort in enumerate(cohorts)}
        ordered = sorted((delta, place[cohort_of[name]]) for (_, name), delta in deltas.items())
        values, places = zip(*ordered, strict=True)
        return cls(np.array(values), np.array(places, dtype=np.intp))

    def median(self, draws: Floats) -> Floats:
        """The median of each draw; `draws` (replicates, cohorts) says how often each cohort was drawn."""
        reached = np.cumsum(draws[:, self.cohort], axis=1)
        half = reached[:, -1:] / 2
        low, high = (reached >= half).argmax(axis=1), (reached > half).argmax(axis=1)
        with np.errstate(invalid="ignore"):  # a median between two opposite failures is no number
            return np.asarray((self.values[low] + self.values[high]) / 2)


def _deltas(first: Launch, other: Launch) -> dict[tuple[int, str], float]:
    """Pass by pass; the passes of a launch that has fewer come round again until all have met equally many."""
    passes = [sorted({turn for turn, _ in launch}) for launch in (first, other)]
    if not all(passes):
        return {}
    found = {}
    for turn in range(math.lcm(*map(len, passes))):
        ours, theirs = (own[turn % len(own)] for own in passes)
        for name in (name for own_turn, name in first if own_turn == ours):
            before, after = first[ours, name], other.get((theirs, name))
            if after is not None and (math.isfinite(before) or math.isfinite(after)):
                found[turn, name] = after - before
    return found


# Between launches of one arm


def launch_differences(launches: Sequence[Launch]) -> list[float]:
    """Median paired difference of each later launch of one arm to each earlier one (A2 - A1), in seconds."""
    found = []
    for index, later in enumerate(launches):
        for earlier in launches[:index]:
            if deltas := _deltas(earlier, later):
                found.append(float(np.median(list(deltas.values()))))
    return [value for value in found if math.isfinite(value)]


def resolved(estimate: PairedEstimate, noise_floor_s: float | None) -> bool:
    """Whether the arms differ beyond doubt: the interval knows launches, excludes zero, and the estimate is
    larger than any difference seen between launches of one arm."""
    if estimate.interval is None or estimate.median_s is None or noise_floor_s is None:
        return False
    return estimate.knows_launches and 0.0 not in estimate.interval and abs(estimate.median_s) > noise_floor_s


# Misses


@dataclass(frozen=True)
class McNemar:
    """Requests that missed a limit more often in one arm, and how likely so uneven a split is by chance."""

    more_first: int
    more_other: int
    p: float


def mcnemar(first: Mapping[str, int], other: Mapping[str, int]) -> McNemar:
    """Exact McNemar test, two-sided, on requests of both arms; the values say in how many repeats each one missed.

    A request counts once, for the arm in which it missed more often: asked again it meets the same neighbours, so
    its repeats are no further requests. Takes requests as independent and knows nothing of launches: how often that
    gives a small p by chance shows benchmarks/mcnemar_selftest.py.
    """
    keys = first.keys() & other.keys()
    more_first = sum(first[key] > other[key] for key in keys)
    more_other = sum(other[key] > first[key] for key in keys)
    discordant = more_first + more_other
    # Of n fair coins, at most the smaller count on one side, or on the other.
    p = min(1.0, 2 * float(bdtr(min(more_first, more_other), discordant, 0.5))) if discordant else 1.0
    return McNemar(more_first, more_other, p)


# Highest passing rates


@dataclass(frozen=True)
class Boundary:
    """Where an arm stopped passing in one repeat: between the highest passing rate (0 where none passed) and
    the lowest rate above it that it was shown not to pass (infinite where there is none)."""

    passed_qps: float
    failed_qps: float


MIN_BOUNDARIES = 3


def boundary_difference(first: Sequence[Boundary], other: Sequence[Boundary]) -> Interval | None:
    """The difference of the rates at which two arms stop passing, other - first, in requests a second.

    Item i of both is repeat i. A repeat tells each boundary only to the step of its grid, so the lower end
    comes from the smallest differences that the grid allows, the upper end from the largest: a t interval of
    each over repeats. None for fewer than 3 repeats.
    """
    pairs = list(zip(first, other, strict=True))
    if len(pairs) < MIN_BOUNDARIES:
        return None
    smallest = np.array([b.passed_qps - a.failed_qps for a, b in pairs])
    largest = np.array([b.failed_qps - a.passed_qps for a, b in pairs])
    return Interval(-_upper_end(-smallest), _upper_end(largest))


def _upper_end(values: Floats) -> float:
    if not np.isfinite(values).all():
        return math.inf
    quantile = float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2))
    return float(values.mean() + quantile * values.std(ddof=1) / math.sqrt(len(values)))
