# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest
from scipy.stats import t as student

from harness.client import RequestRecord
from harness.paired import (
    Boundary,
    Launch,
    _interval,
    _upper_end,
    boundary_difference,
    launch_differences,
    mcnemar,
    paired_estimate,
    resolved,
    run_length,
)
from harness.saturation import independent_requests, memory_requests, waiting_share
from harness.stats import Interval

COHORTS, SIZE = 32, 4
NAMES = [f"r{index:04d}" for index in range(COHORTS * SIZE)]
COHORT_OF = {name: index // SIZE for index, name in enumerate(NAMES)}


def launch(values: np.ndarray) -> Launch:
    return {(0, name): float(value) for name, value in zip(NAMES, values, strict=True)}


def arm(seed: int, shifts: list[float], noise: float = 0.1) -> list[Launch]:
    """A launch a shift: the same requests, noise of a cohort and of a request."""
    generator = np.random.default_rng(seed)
    cohort = np.repeat(generator.normal(0, noise, COHORTS), SIZE)
    return [launch(1 + shift + cohort + generator.normal(0, noise, len(NAMES))) for shift in shifts]


def test_the_estimate_is_the_mean_over_all_launch_combinations() -> None:
    first, other = arm(1, [0.0, 0.02]), arm(2, [0.1, 0.13, 0.11])
    medians = [np.median([b[key] - a[key] for key in a]) for a in first for b in other]
    found = paired_estimate(first, other, COHORT_OF)
    assert found.median_s == pytest.approx(np.mean(medians))
    assert (found.n, found.cohorts, found.launches) == (128, 64, (2, 3))
    assert found.interval is not None and found.median_s in found.interval


def test_launches_that_scatter_widen_the_interval() -> None:
    calm = paired_estimate(arm(1, [0.0] * 4), arm(2, [0.5] * 4), COHORT_OF)
    wild = paired_estimate(arm(1, [-0.3, 0.3, -0.2, 0.2]), arm(2, [0.2, 0.8, 0.7, 0.3]), COHORT_OF)
    assert calm.interval is not None and wild.interval is not None
    assert wild.interval.high - wild.interval.low > 3 * (calm.interval.high - calm.interval.low)


def test_two_launches_leave_few_degrees_of_freedom() -> None:
    """Launch means 0.1 apart in both arms: standard error 0.071, one degree of freedom a side, t about 4.3."""
    found = paired_estimate(arm(1, [0.0, 0.1], 1e-6), arm(2, [0.5, 0.6], 1e-6), COHORT_OF)
    assert found.interval is not None
    assert found.interval.high - found.interval.low == pytest.approx(2 * 4.303 * math.sqrt(0.005), rel=0.01)


def test_neighbours_that_are_alike_count_once() -> None:
    """Noise that a cohort shares makes the interval wider than the same noise drawn for each request."""
    generator = np.random.default_rng(3)
    shared = np.repeat(generator.normal(0, 1, COHORTS), SIZE)
    flat = generator.permutation(shared)
    zero = [launch(np.zeros(len(NAMES)))] * 2
    widths = []
    for values in (shared, flat):
        found = paired_estimate(zero, [launch(values)] * 2, COHORT_OF)
        assert found.interval is not None
        widths.append(found.interval.high - found.interval.low)
    assert widths[0] > 1.4 * widths[1]


def test_fewer_than_thirty_cohorts_print_no_interval() -> None:
    few = {name: index // 5 for index, name in enumerate(NAMES)}  # 26 cohorts
    one = paired_estimate(arm(1, [0.0])[:1], arm(2, [0.1])[:1], few)
    assert one.interval is None and "26 cohorts" in (one.reason or "") and one.median_s is not None
    assert (
        paired_estimate(arm(1, [0.0, 0.0]), arm(2, [0.1, 0.1]), few).interval is not None
    )  # 52 over repeats


def test_passes_over_the_trace_within_one_launch_count_as_repeats() -> None:
    few = {name: index // 8 for index, name in enumerate(NAMES)}  # 16 cohorts
    one, other = arm(1, [0.0]), arm(2, [0.1])
    twice = [
        {(turn, name): value for turn in (0, 1) for (_, name), value in a[0].items()} for a in (one, other)
    ]
    found = paired_estimate(twice[:1], twice[1:], few)
    assert found.cohorts == 32 and found.interval is not None and not found.knows_launches


def test_launches_that_served_the_trace_unequally_often_leave_no_pass_out() -> None:
    few = {name: index // 8 for index, name in enumerate(NAMES)}  # 16 cohorts

    def served(*times_s: float) -> Launch:
        """One launch; a pass for each time."""
        return {(turn, name): time_s for turn, time_s in enumerate(times_s) for name in NAMES}

    # The median of two halves that differ lies between them.
    found = paired_estimate([served(1.0), served(1.2)], [served(1.5, 1.9)], few)
    assert (found.n, found.cohorts, found.launches) == (256, 32, (2, 1))
    assert found.median_s == pytest.approx((0.5 + 0.9 + 0.3 + 0.7) / 4)
    assert found.interval is not None and not found.knows_launches
    turned = paired_estimate([served(1.5, 1.9)], [served(1.0), served(1.2)], few)
    assert turned.median_s == pytest.approx(-found.median_s)
    # Two passes against three: each pass meets each of the other launch once.
    uneven = paired_estimate([served(1.0, 3.0)], [served(0.0, 10.0, 20.0)], few)
    assert (uneven.n, uneven.cohorts) == (6 * len(NAMES), 32)
    assert uneven.median_s == pytest.approx((7.0 + 9.0) / 2)  # of -3, -1, 7, 9, 17, 19
    assert launch_differences([served(1.0), served(1.0, 1.4)]) == [pytest.approx(0.2)]
    assert paired_estimate([served(1.0)], [{}], few).n == 0


def test_failures_count_as_infinite_and_are_never_dropped() -> None:
    broken = np.where(np.arange(len(NAMES)) % 5 == 0, math.inf, 1.5)
    found = paired_estimate(arm(1, [0.0, 0.0]), [launch(broken)] * 2, COHORT_OF)
    clean = paired_estimate(arm(1, [0.0, 0.0]), [launch(np.full(len(NAMES), 1.5))] * 2, COHORT_OF)
    assert found.median_s is not None and clean.median_s is not None and found.median_s > clean.median_s
    dead = paired_estimate(arm(1, [0.0]), [launch(np.full(len(NAMES), math.inf))], COHORT_OF)
    assert (dead.median_s, dead.reason) == (None, "the median falls on a failed request")
    both = paired_estimate(
        [launch(np.full(len(NAMES), math.inf))] * 1, [dict.fromkeys([(0, "r0000")], math.inf)], COHORT_OF
    )
    assert both.n == 0 and both.interval is None


def test_the_same_records_give_the_same_interval() -> None:
    first, other = arm(1, [0.0, 0.1]), arm(2, [0.2, 0.2])
    assert paired_estimate(first, other, COHORT_OF) == paired_estimate(first, other, COHORT_OF)


def test_runs_of_cohorts_shrink_with_the_trace() -> None:
    assert [run_length(cohorts) for cohorts in (2, 12, 16, 30, 36, 400)] == [1, 1, 2, 3, 4, 4]


def test_a_difference_inside_the_noise_floor_is_not_resolved() -> None:
    found = paired_estimate(arm(1, [0.0] * 3, 0.01), arm(2, [0.1] * 3, 0.01), COHORT_OF)
    assert resolved(found, 0.02) and not resolved(found, 0.2) and not resolved(found, None)
    alone = paired_estimate(arm(1, [0.0], 0.01), arm(2, [0.1], 0.01), COHORT_OF)
    assert alone.interval is not None and 0.0 not in alone.interval and not resolved(alone, 0.0)


def test_noise_between_launches() -> None:
    assert launch_differences(arm(1, [0.0, 0.1, 0.3], 1e-9)) == pytest.approx([0.1, 0.3, 0.2], abs=1e-6)
    assert launch_differences(arm(1, [0.0])) == []


def test_mcnemar_against_the_binomial() -> None:
    """Eight requests miss in one arm only, all in the other one: p = 2 / 2^8."""
    first = {f"r{i}": i < 2 for i in range(12)}
    other = {f"r{i}": i < 10 for i in range(12)}
    found = mcnemar(first, other)
    assert (found.more_first, found.more_other, found.p) == (0, 8, pytest.approx(2 / 2**8))
    assert mcnemar(first, first).p == 1.0


def test_mcnemar_counts_a_request_once_however_often_it_was_sent() -> None:
    found = mcnemar({"r0": 6, "r1": 3, "r2": 0}, {"r0": 0, "r1": 3, "r2": 1})
    assert (found.more_first, found.more_other, found.p) == (1, 1, 1.0)


def test_boundaries_of_three_repeats() -> None:
    """Both arms stop at the same places each time: only the grid is uncertain."""
    first, other = [Boundary(1.0, 1.1)] * 3, [Boundary(1.5, 1.6)] * 3
    found = boundary_difference(first, other)
    assert found is not None and (found.low, found.high) == (pytest.approx(0.4), pytest.approx(0.6))
    assert boundary_difference(first[:2], other[:2]) is None
    open_ended = boundary_difference(first, [Boundary(1.5, math.inf)] * 3)
    assert open_ended is not None and (open_ended.low, open_ended.high) == (pytest.approx(0.4), math.inf)
    scattered = boundary_difference(first, [Boundary(1.4, 1.5), Boundary(1.5, 1.6), Boundary(1.6, 1.7)])
    assert scattered is not None and scattered.low == pytest.approx(
        0.4 - 4.303 * 0.1 / math.sqrt(3), abs=1e-3
    )


def test_freedom_never_falls_below_that_of_the_part_with_least() -> None:
    """Launches whose requests vary against each other: subtracting that leaves a tenth of what was observed."""
    noise = np.random.default_rng(4).normal(0, 1, 1000)
    drawn = np.array([[noise, noise], [-noise, -noise]])
    apart = math.sqrt(4.4) * noise.std(ddof=1)
    found = _interval(0.0, np.array([[0.0, 0.0], [apart, apart]]), drawn, cohorts=36)
    assert 0.5 < found.high < 5.0  # t of one degree of freedom, 12.7, times a standard error of about 0.3


def waiting_records(spans: list[tuple[float, float | None]]) -> list[RequestRecord]:
    return [
        RequestRecord(f"r{index}", 0, "default", 1, 1, due_s=due_s, first_token_s=answered_s)
        for index, (due_s, answered_s) in enumerate(spans)
    ]


def test_the_share_that_waits_and_how_long_a_queue_remembers() -> None:
    idle = waiting_records([(0.0, 0.9), (1.0, 1.9), (2.0, 2.9)])
    half = waiting_records([(0.0, 1.5), (1.0, 1.8), (2.0, 2.9)])
    unanswered = waiting_records([(2.0, 2.5), (0.0, None), (1.0, 1.1)])
    assert [waiting_share(records) for records in (idle, half, unanswered)] == [0.0, 0.5, 1.0]
    failed = replace(unanswered[1], done_s=0.5)  # it waits no more
    assert waiting_share([failed, *idle[1:]]) == 0.0
    assert waiting_share(idle[:1]) == 0.0
    assert [memory_requests(share) for share in (0.0, 0.5, 1.0)] == [0.0, 4.0, math.inf]
    assert memory_requests(0.9) == pytest.approx(180)
    assert [independent_requests(records) for records in (idle, half, unanswered)] == [3.0, 1.0, 0.0]


def test_near_saturation_there_is_no_interval() -> None:
    """128 requests: as long as 20 times the queue's memory up to a share of about 0.57."""
    first, other = arm(1, [0.0, 0.0]), arm(2, [0.1, 0.1])
    assert paired_estimate(first, other, COHORT_OF, waiting=0.5).interval is not None
    refused = paired_estimate(first, other, COHORT_OF, waiting=0.85)
    assert refused.interval is None and refused.median_s is not None and not resolved(refused, 0.0)
    assert refused.reason is not None and refused.reason.startswith("near saturation: 85% of the requests")


def test_another_pass_over_a_short_trace_meets_the_same_busy_spells() -> None:
    """24 requests at a share of 0.5 are short of 20 memories of 4 requests, however often they are sent."""

    def passes(launches: list[Launch]) -> list[Launch]:
        return [
            {(turn, name): each[0, name] for turn in range(20) for name in NAMES[:24]} for each in launches
        ]

    first, other = passes(arm(1, [0.0, 0.0])), passes(arm(2, [0.1, 0.1]))
    found = paired_estimate(first, other, COHORT_OF, waiting=0.5)
    assert found.n == 480 and found.cohorts == 240
    assert found.interval is None and found.reason is not None and found.reason.endswith("as long, not of 24")


def test_cohorts_of_one_request_that_overlap_count_as_fewer() -> None:
    """15 requests sent twice make 30 cohorts of one; where one came while another waited, 27.7 of them."""
    names = NAMES[:15]
    twice = [
        [{(turn, name): each[0, name] for turn in (0, 1) for name in names} for each in launched]
        for launched in (arm(1, [0.0]), arm(2, [0.1]))
    ]
    alone = {name: index for index, name in enumerate(names)}
    assert paired_estimate(*twice, alone).interval is not None
    found = paired_estimate(*twice, alone, waiting=1 / 14)
    assert found.interval is None and found.launch_pairs
    told = "n too small: waiting for one another, 30 cohorts count as 27.7, an interval needs 30"
    assert found.reason == told
    # Larger cohorts that do not depend on their neighbours count whole.
    assert paired_estimate(arm(1, [0.0]), arm(2, [0.1]), COHORT_OF, waiting=0.4).interval is not None


def test_too_few_cohorts_leave_what_each_pair_of_launches_says() -> None:
    first, other = ([*map(first_of, launched)] for launched in (arm(1, [0.0]), arm(2, [0.1, 0.3])))
    found = paired_estimate(first, other, COHORT_OF)
    assert found.interval is None and not resolved(found, 0.0)
    assert [(pair.first, pair.other, pair.n) for pair in found.launch_pairs] == [(0, 0, 24), (0, 1, 24)]
    for pair in found.launch_pairs:
        deltas = sorted(other[pair.other][key] - first[0][key] for key in first[0])
        assert pair.median_s == pytest.approx(np.median(deltas))
        assert (pair.interval.low, pair.interval.high) == (deltas[6], deltas[17])  # ranks 7 and 18 of 24
    queued = paired_estimate(first, other, COHORT_OF, waiting=0.25)  # as 16.6 requests: ranks 4 and 13 of 16
    assert queued.launch_pairs[0].interval.low <= found.launch_pairs[0].interval.low
    assert queued.launch_pairs[0].interval != found.launch_pairs[0].interval
    assert not paired_estimate(first, other, COHORT_OF, waiting=0.5).launch_pairs  # 24 are no 20 memories
    few = [first_of(each, 5) for each in (first[0], other[0])]
    assert not paired_estimate(few[:1], few[1:], COHORT_OF).launch_pairs
    assert not paired_estimate(arm(1, [0.0]), arm(2, [0.1]), COHORT_OF).launch_pairs  # there is an interval


def first_of(launched: Launch, count: int = 24) -> Launch:
    return {key: launched[key] for key in [*launched][:count]}


@pytest.mark.parametrize(("load", "n"), [(0.2, 24), (0.4, 60)])
def test_the_interval_of_two_launches_holds_their_true_difference(load: float, n: int) -> None:
    truth, intervals = _of_two_launches(load, n)
    held = sum(truth in interval for interval in intervals)
    assert len(intervals) > 75 and held >= 0.93 * len(intervals)


def test_hardly_any_interval_of_two_launches_is_printed_of_a_busy_queue() -> None:
    _, intervals = _of_two_launches(0.6, 60)
    assert len(intervals) < 150 / 20


def _of_two_launches(load: float, n: int) -> tuple[float, list[Interval]]:
    """The true difference, and the intervals of 150 traces of n requests of a second each or so through a queue.

    One launch an arm, the other one 5 % slower.
    """
    generator = np.random.default_rng(5)
    deltas, intervals = [], []
    for _ in range(150):
        due = np.cumsum(generator.exponential(1 / load, n))
        service = generator.uniform(0.5, 1.5, n)
        served = [_serve(due, service * factor * generator.normal(1, 0.03, n)) for factor in (1.0, 1.05)]
        waiting = max(waiting_share(waiting_records([*zip(due, due + ttft, strict=True)])) for ttft in served)
        a, b = ({(0, NAMES[i]): float(value) for i, value in enumerate(ttft)} for ttft in served)
        found = paired_estimate([a], [b], COHORT_OF, replicates=2, waiting=waiting)
        deltas.append(served[1] - served[0])
        intervals += [pair.interval for pair in found.launch_pairs]
    return float(np.median(np.concatenate(deltas))), intervals


def _serve(due: np.ndarray, service: np.ndarray) -> np.ndarray:
    ttft, free = np.zeros_like(due), 0.0
    for index, (at, takes) in enumerate(zip(due, service, strict=True)):
        free = max(free, at) + takes
        ttft[index] = free - at
    return ttft


@pytest.mark.parametrize(("more_first", "more_other"), [(0, 0), (1, 0), (5, 5), (3, 11), (40, 21)])
def test_mcnemar_agrees_with_scipys_exact_test(more_first: int, more_other: int) -> None:
    keys = [str(index) for index in range(more_first + more_other)]
    first = {key: index < more_first for index, key in enumerate(keys)}
    other = {key: not missed for key, missed in first.items()}
    n = more_first + more_other
    expected = binomtest(more_other, n).pvalue if n else 1.0
    assert mcnemar(first, other).p == pytest.approx(expected)


def test_t_quantiles_agree_with_scipys() -> None:
    values = np.array([1.0, 2.0, 4.0])
    expected = values.mean() + student.ppf(0.975, 2) * values.std(ddof=1) / math.sqrt(3)
    assert _upper_end(values) == pytest.approx(expected)
