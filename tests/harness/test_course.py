# SPDX-License-Identifier: Apache-2.0
"""Which cell comes next: pure decisions over simulated servers of known capacity."""

from collections.abc import Mapping

import pytest

from harness.course import Outcome, Plan, bisected, planned_rates, remaining, walk_seconds
from harness.store import CellKey

GOOD = Outcome(unstable=False, valid=True, misses={"15": 0, "25": 0})


def played(plan: Plan, holds_15: Mapping[str, float], capacity: Mapping[str, float]) -> list[CellKey]:
    """The whole course against arms that miss 15 s above `holds_15` and are unstable above `capacity`."""
    outcomes: dict[CellKey, Outcome] = {}
    while keys := remaining(plan, list(holds_15), outcomes):
        key = keys[0]
        assert key not in outcomes
        unstable = key.offered_qps > capacity[key.arm]
        missed = int(key.offered_qps > holds_15[key.arm])
        outcomes[key] = Outcome(unstable, not unstable, {"15": missed, "25": int(unstable)})
    return list(outcomes)


def test_an_arm_stops_above_two_unstable_rates() -> None:
    order = played(Plan((1.0, 2.0, 3.0, 4.0, 5.0)), {"a": 9, "b": 9}, {"a": 1.5, "b": 9})
    assert [key.offered_qps for key in order if key.arm == "a"] == [1, 2, 3]
    assert [key.offered_qps for key in order if key.arm == "b"] == [1, 2, 3, 4, 5]


def test_the_boundary_is_bisected_on_one_grid_for_all_arms() -> None:
    order = played(Plan((1.0, 1.5, 2.0), grid_qps=0.025), {"a": 1.16, "b": 1.71}, {"a": 9, "b": 9})
    rates = {arm: sorted(key.offered_qps for key in order if key.arm == arm) for arm in "ab"}
    assert rates["a"] == rates["b"]
    assert all(abs(rate / 0.025 - round(rate / 0.025)) < 1e-9 for rate in rates["a"])
    for holds in (1.16, 1.71):
        below = max(rate for rate in rates["a"] if rate <= holds)
        above = min(rate for rate in rates["a"] if rate > holds)
        assert above - below == pytest.approx(0.025)
    assert len(rates["a"]) <= 3 + 2 * 5


def test_nothing_is_searched_where_nothing_passed_or_nothing_missed() -> None:
    a = {CellKey("a", 1.0, 0): Outcome(False, True, {"15": 1, "25": 0})}
    assert bisected(["a"], a, 0.025) is None


def test_a_spoiled_cell_neither_passes_nor_bounds() -> None:
    missed, spoiled = Outcome(False, True, {"15": 1}), Outcome(False, False, {"15": 1}, spoiled=True)

    def cells(**by_rate: Outcome) -> dict[CellKey, Outcome]:
        return {CellKey("a", int(name[1:]) / 10, 0): outcome for name, outcome in by_rate.items()}

    assert bisected(["a"], cells(q3=GOOD, q6=spoiled, q9=GOOD), 0.025) is None
    assert bisected(["a"], cells(q3=GOOD, q6=spoiled, q9=GOOD, q12=missed), 0.025) == 1.05
    assert (
        bisected(["a"], cells(q3=GOOD, q6=spoiled, q9=missed), 0.025) is None
    )  # until 0.6 is measured again
    assert bisected(["a"], cells(q3=GOOD, q6=spoiled, q8=missed), 0.025) == 0.55


@pytest.mark.parametrize("killed_after", range(12))
def test_a_killed_course_goes_on_where_it_was(killed_after: int) -> None:
    """Only the cells are known afterwards; the rest comes as it would have."""
    plan = Plan((1.0, 2.0), repeats=2, grid_qps=0.25)
    whole = played(plan, {"a": 1.3, "b": 9}, {"a": 9, "b": 9})
    outcomes = {
        key: Outcome(False, True, {"15": int(key.arm == "a" and key.offered_qps > 1.3), "25": 0})
        for key in whole[:killed_after]
    }
    rest = []
    while keys := remaining(plan, ["a", "b"], outcomes):
        key = keys[0]
        outcomes[key] = Outcome(False, True, {"15": int(key.arm == "a" and key.offered_qps > 1.3), "25": 0})
        rest.append(key)
    assert whole[:killed_after] + rest == whole


def test_a_later_launch_has_repeats_of_its_own() -> None:
    keys = remaining(Plan((1.0,), repeats=2, first_repeat=2), ["a"], {CellKey("a", 1.0, 0): GOOD})
    assert [key.repeat for key in keys] == [2, 3]


def test_a_budget_keeps_the_lowest_rates() -> None:
    plan = Plan((0.5, 1.0, 2.0), budget_s=500.0)
    assert walk_seconds(plan, arms=2, span=60.0, tail_s=10.0) == 2 * (130 + 70 + 40)
    assert planned_rates(plan, 2, 60.0, 10.0) == (0.5, 1.0, 2.0)
    assert planned_rates(Plan((0.5, 1.0, 2.0), budget_s=410.0), 2, 60.0, 10.0) == (0.5, 1.0)
