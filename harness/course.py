# SPDX-License-Identifier: Apache-2.0
"""Which cell comes next, as a pure function of the plan and of what has been measured.

    walk      the rates upward, every repeat, all arms; an arm stops above two rates at which it was unstable
    bisect    between the highest rate that passes and the lowest that misses, for each limit and arm, on a
              common grid: every arm is measured at the same rates, so that differences can be paired

Arms go in order and backward in turns (A B B A ...), so that drift favours none. Nothing is remembered but the
cells themselves: a sweep that was killed goes on as if it had never stopped.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.client import Timeouts
from harness.sla import CellVerdict, highest_passing
from harness.store import CellKey

STOP_AFTER_UNSTABLE = 2


@dataclass(frozen=True)
class Plan:
    """Offered rates in requests a second, ascending; time limits in seconds as in `CellSpec`.

    `grid_qps`, where given, is the step down to which boundaries are bisected. `first_repeat` numbers the
    repeats of a later launch of the same engines. `budget_s` bounds the whole sweep. `client_processes` is
    derived from rate and bodies where it is None.
    """

    rates: tuple[float, ...]
    repeats: int = 1
    request_timeout_s: float = Timeouts.total_s
    drain_timeout_s: float = 300.0
    first_token_timeout_s: float = Timeouts.first_token_s
    connect_timeout_s: float = Timeouts.connect_s
    grid_qps: float | None = None
    first_repeat: int = 0
    budget_s: float | None = None
    client_processes: int | None = None

    @property
    def repeat_numbers(self) -> range:
        return range(self.first_repeat, self.first_repeat + self.repeats)

    @property
    def timeouts(self) -> dict[str, float]:
        """The four time limits, as a run's manifest names them."""
        return {
            "connect_s": self.connect_timeout_s,
            "first_token_s": self.first_token_timeout_s,
            "total_s": self.request_timeout_s,
            "drain_s": self.drain_timeout_s,
        }


@dataclass(frozen=True)
class Outcome:
    """What the course needs to know of a measured cell; `misses` by limit. See `validity.Verdict`."""

    unstable: bool
    valid: bool
    misses: Mapping[str, int]
    spoiled: bool = False


def cell_order(plan: Plan, arms: Sequence[str]) -> list[CellKey]:
    """The walk, if no arm stops: rates upward; arms in order, and backward at every other cell."""
    return [
        key
        for index, rate in enumerate(plan.rates)
        for repeat in plan.repeat_numbers
        for key in _group(arms, rate, repeat, backward=bool((index + repeat) % 2))
    ]


def remaining(plan: Plan, arms: Sequence[str], outcomes: Mapping[CellKey, Outcome]) -> list[CellKey]:
    """The cells to measure next, in order; none when the course is finished.

    During the walk these are all that is left of it, as far as can be said now; afterwards one bisected rate at
    a time. Ask again after each cell.
    """
    walk = [key for key in cell_order(plan, arms) if not _stopped(key, outcomes) and key not in outcomes]
    if walk or plan.grid_qps is None:
        return walk
    # A rate that one arm was measured at is finished in every arm before the next is chosen.
    for rate in (*sorted({key.offered_qps for key in outcomes}), bisected(arms, outcomes, plan.grid_qps)):
        left = [
            key
            for repeat in plan.repeat_numbers
            for key in ([] if rate is None else _group(arms, rate, repeat, backward=bool(repeat % 2)))
            if key not in outcomes and not _stopped(key, outcomes)
        ]
        if left:
            return left
    return []


def bisected(arms: Sequence[str], outcomes: Mapping[CellKey, Outcome], step: float) -> float | None:
    """The next rate on the grid (multiples of `step`) that halves the widest open boundary; None: all closed.

    A boundary lies between an arm's highest passing rate and the next rate that it was tested at, which is one
    that it did not pass. 1 passes, 1.5 misses, step 0.025: 1.25 is next. Below the lowest tested rate nothing
    is searched. A spoiled cell neither passes nor bounds; a boundary that it halves stays open until somebody
    resumes the run.
    """
    widest: tuple[float, float] | None = None
    limits = sorted({name for outcome in outcomes.values() for name in outcome.misses})
    for arm in arms:
        mine = {key: outcome for key, outcome in outcomes.items() if key.arm == arm}
        tested = sorted({key.offered_qps for key, outcome in mine.items() if not outcome.spoiled})
        for limit in limits:
            passing = highest_passing(
                [
                    CellVerdict(key.offered_qps, outcome.valid, outcome.misses.get(limit, 0))
                    for key, outcome in mine.items()
                    if not outcome.spoiled
                ]
            )
            above = [rate for rate in tested if passing is not None and rate > passing]
            if passing is None or not above:
                continue
            middle = step * round((passing + above[0]) / 2 / step)
            middle = float(f"{middle:.6g}")
            is_open = passing < middle < above[0] and middle not in {key.offered_qps for key in mine}
            if is_open and (widest is None or above[0] - passing > widest[0]):
                widest = above[0] - passing, middle
    return widest[1] if widest else None


def _stopped(key: CellKey, outcomes: Mapping[CellKey, Outcome]) -> bool:
    unstable = {
        done.offered_qps
        for done, outcome in outcomes.items()
        if done.arm == key.arm and done.offered_qps < key.offered_qps and outcome.unstable
    }
    return len(unstable) >= STOP_AFTER_UNSTABLE


def _group(arms: Sequence[str], rate: float, repeat: int, *, backward: bool) -> list[CellKey]:
    return [CellKey(arm, rate, repeat) for arm in (reversed(arms) if backward else arms)]


def walk_seconds(plan: Plan, arms: int, span: float, tail_s: float) -> float:
    """Planned duration of the walk: each cell lasts the trace's span at its rate, and a tail to drain."""
    return sum(arms * plan.repeats * (span / rate + tail_s) for rate in plan.rates)


def planned_rates(plan: Plan, arms: int, span: float, tail_s: float) -> tuple[float, ...]:
    """The rates of the walk whose cells fit into the budget, from the lowest up; all without a budget."""
    left = math.inf if plan.budget_s is None else plan.budget_s
    fitting = []
    for rate in plan.rates:
        left -= arms * plan.repeats * (span / rate + tail_s)
        if left < 0:
            break
        fitting.append(rate)
    return tuple(fitting)
