# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from harness.sla import CellVerdict, Limits, first_miss, highest_passing, misses


def cells(*rows: tuple[float, bool, int]) -> list[CellVerdict]:
    return [CellVerdict(*row) for row in rows]


def test_a_failed_request_misses_every_limit() -> None:
    assert misses([0.5, 1.0, 1.5, math.inf], 1.0) == 2
    assert misses([math.inf], 1e9) == 1


def test_the_limit_itself_is_no_miss() -> None:
    assert misses([15.0], 15.0) == 0


@pytest.mark.parametrize(
    ("rows", "passing", "missing"),
    [
        ([], None, None),
        ([(0.5, True, 0), (1.0, True, 0)], 1.0, None),
        ([(0.5, True, 0), (1.0, True, 1), (1.5, True, 0)], 0.5, 1.0),
        ([(0.5, True, 2)], None, 0.5),
        ([(0.5, False, 0), (1.0, True, 0)], None, None),
        ([(0.5, True, 0), (1.0, False, 3), (1.5, True, 2)], 0.5, 1.5),
        ([(1.5, True, 1), (0.5, True, 0), (1.0, True, 0)], 1.0, 1.5),
        ([(0.5, True, 0), (0.5, True, 1), (1.0, True, 0)], None, 0.5),
        ([(0.5, True, 0), (0.5, False, 0)], None, None),
    ],
)
def test_rates(rows: list[tuple[float, bool, int]], passing: float | None, missing: float | None) -> None:
    assert highest_passing(cells(*rows)) == passing
    assert first_miss(cells(*rows)) == missing


def test_limits_keep_the_source_names() -> None:
    assert Limits.of(1.2, 2.0, "rule").applied == {"15": 1.2, "25": 2.0}


@pytest.mark.parametrize("pair", [(0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_impossible_limits_are_refused(pair: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Limits.of(*pair, rule="rule")
