# SPDX-License-Identifier: Apache-2.0
import math

import pytest
from builders import small_trace
from hypothesis import given
from hypothesis import strategies as st

from harness.schedule import due_times

TRACE = small_trace(arrivals="poisson")


@given(st.floats(min_value=1e-3, max_value=1e4))
def test_due_times_are_exact_at_any_rate(rate: float) -> None:
    assert due_times(TRACE, rate) == [request.arrival / rate for request in TRACE.requests]


def test_worked_example() -> None:
    assert due_times(small_trace(requests=4), 0.5) == [0.0, 2.0, 4.0, 6.0]


def test_infinite_rate_makes_everything_due_at_once() -> None:
    assert due_times(TRACE, math.inf) == [0.0] * 6


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_bad_rates_are_quoted(rate: float) -> None:
    with pytest.raises(ValueError, match=str(rate)):
        due_times(TRACE, rate)
