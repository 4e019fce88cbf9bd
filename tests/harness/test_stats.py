# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from harness.paired import Launch, paired_estimate
from harness.stats import (
    Interval,
    percentile,
    percentile_interval,
    quantile,
    share_interval,
    slope,
)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.integers(1, 100))
def test_quantile_is_the_median_and_numpys_averaged_inverted_cdf(values: list[float], percent: int) -> None:
    """numpy's may step over a rank where n * p / 100 is whole in exact arithmetic only: those are below."""
    assert quantile(values, 50) == pytest.approx(np.median(values))
    assert quantile(values, 50) == -quantile([-value for value in values], 50)
    if len(values) * percent % 100:
        expected = np.quantile(values, percent / 100, method="averaged_inverted_cdf")
        assert quantile(values, percent) == pytest.approx(expected)


def test_quantile_between_two_values() -> None:
    values = [float(value) for value in range(1, 21)]
    assert (quantile(values, 90), quantile(values, 95), quantile(values, 91)) == (18.5, 19.5, 19.0)
    assert quantile(values, 100) == 20.0
    assert quantile([3.0, 1.0], 50) == 2.0
    assert quantile([3.0, math.inf], 50) == math.inf


def test_one_median_for_cells_and_for_pairs() -> None:
    """An even number of requests: what a cell calls P50 is what a comparison calls median."""
    ttft = [0.1, 0.2, 0.4, 0.8]
    first: Launch = {(0, f"r{index}"): 1.0 for index in range(4)}
    other: Launch = {(0, f"r{index}"): 1.0 + value for index, value in enumerate(ttft)}
    estimate = paired_estimate([first], [other], {f"r{index}": 0 for index in range(4)})
    assert estimate.median_s == pytest.approx(percentile(ttft, 50)) == pytest.approx(0.3)


@pytest.mark.parametrize(("percent", "enough"), [(50, 1), (90, 20), (95, 40), (99, 200)])
def test_minimum_sample(percent: int, enough: int) -> None:
    assert percentile([1.0] * enough, percent) == 1.0
    assert percentile([1.0] * (enough - 1), percent) is None


def test_a_percentile_on_a_failure_is_no_number() -> None:
    values = [1.0] * 18 + [math.inf] * 2
    assert percentile(values, 50) == 1.0
    assert percentile(values, 90) is None  # between the last that was served and a failure
    assert percentile([1.0] * 19 + [math.inf], 90) == 1.0


def test_failures_are_not_dropped() -> None:
    """Dropping the failure would leave a median of 1."""
    assert percentile([1.0, 2.0, math.inf], 50) == 2.0
    assert percentile([1.0, math.inf, math.inf], 50) is None


def test_slope() -> None:
    assert slope([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]) == pytest.approx(2.0)
    assert slope([], []) is None
    assert slope([1.0, 1.0], [0.0, 5.0]) is None


@pytest.mark.parametrize(("percent", "enough"), [(50, 6), (90, 36), (99, 368)])
def test_percentile_intervals_need_a_sample(percent: int, enough: int) -> None:
    assert percentile_interval(range(enough), percent) is not None
    assert percentile_interval(range(enough - 1), percent) is None


@pytest.mark.parametrize("n", [6, 24, 60, 100])
def test_the_ranks_of_a_median_cover_at_least_95_percent(n: int) -> None:
    """P(rank low <= count below the median < rank high) by the binomial distribution itself."""
    found = percentile_interval(range(1, n + 1), 50)
    assert found is not None
    covered = sum(math.comb(n, k) for k in range(int(found.low), int(found.high))) / 2**n
    assert 0.95 <= covered < 0.995 or n == 6


def test_an_interval_that_reaches_a_failure_is_open() -> None:
    found = percentile_interval([*range(30), *[math.inf] * 10], 50)
    assert found is not None and found.low == 13 and found.high == 26
    found = percentile_interval([*range(22), *[math.inf] * 18], 50)
    assert found is not None and found.high == math.inf


def test_shares() -> None:
    """No miss in 60 requests bounds the share at 1 - 0.025^(1/60)."""
    none = share_interval(0, 60)
    assert (none.low, none.high) == (0.0, pytest.approx(1 - 0.025 ** (1 / 60)))
    assert 0.5 in share_interval(12, 24)


def test_requests_that_count_as_fewer_widen_an_interval() -> None:
    """60 requests that tell no more than 12: the ranks are a fifth and four fifths of the way, not those of 60."""
    values = [float(rank) for rank in range(1, 61)]
    alone, alike = percentile_interval(values, 50), percentile_interval(values, 50, independent=12.9)
    assert alone is not None and alike is not None
    assert (alone.low, alone.high) == (22, 39) and (alike.low, alike.high) == (15, 50)
    assert percentile_interval(values, 50, independent=5.9) is None
    assert percentile_interval(values, 50, independent=60) == alone
    none = share_interval(0, 60, independent=12)
    assert (none.low, none.high) == (0.0, pytest.approx(1 - 0.025 ** (1 / 12)))
    assert share_interval(3, 60, independent=0.4) == Interval(0.0, 1.0)


@given(st.integers(1, 400), st.sampled_from([50, 90, 99]))
def test_ranks_of_an_interval_agree_with_scipys_binomial(n: int, percent: int) -> None:
    low, high = binom.ppf(0.025, n, percent / 100), binom.isf(0.025, n, percent / 100) + 1
    interval = percentile_interval([float(rank) for rank in range(1, n + 1)], percent)
    if low < 1 or high > n:
        assert interval is None
    else:
        assert interval is not None and (interval.low, interval.high) == (low, high)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_share_interval_agrees_with_scipys_exact_one(case: tuple[int, int]) -> None:
    expected = binomtest(*case).proportion_ci(0.95, method="exact")
    interval = share_interval(*case)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-9)
