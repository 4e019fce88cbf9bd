# SPDX-License-Identifier: Apache-2.0
"""What a run says about the difference between its arms: pure functions of its valid cells."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from statistics import fmean
from typing import Any

from harness.client import RequestRecord
from harness.paired import (
    Boundary,
    Launch,
    boundary_difference,
    launch_differences,
    mcnemar,
    paired_estimate,
    resolved,
)
from harness.report.scatter import answer_s
from harness.saturation import waiting_share
from harness.sla import CellVerdict, first_failing, highest_passing, misses
from harness.stats import Interval
from harness.store import Cell, CellKey
from harness.validity import ttft_s


def launch_of(cell: Cell) -> str:
    """Which launch of its engine a cell was measured in; cells that do not say belong to one."""
    launch, started = cell.facts.get("launch"), cell.facts["metrics"].get("process_start_unix_s")
    found = started if launch is None else launch
    return "unknown" if found is None else str(found)


def launches(
    arm: str, rate: float, valid: Sequence[Cell], time_s: Callable[[RequestRecord], float] = ttft_s
) -> dict[str, Launch]:
    """A time of each launch of an arm at one rate, launches and passes in the order of measurement."""
    found: dict[str, dict[tuple[int, str], float]] = {}
    passes: dict[str, int] = {}
    cells = [cell for cell in valid if cell.key.arm == arm and cell.key.offered_qps == rate]
    for cell in sorted(cells, key=lambda cell: cell.key.repeat):
        name = launch_of(cell)
        turn = passes[name] = passes.get(name, -1) + 1
        found.setdefault(name, {}).update({(turn, r.id): time_s(r) for r in cell.records})
    return dict(found)


def noise_floors(arms: Sequence[str], valid: Sequence[Cell]) -> list[dict[str, Any]]:
    """For each arm and rate with several launches: how far launches of the same arm lie apart (A2 - A1)."""
    return [
        {"arm": arm, "offered_qps": rate, "differences_s": differences}
        for rate in _rates(valid)
        for arm in arms
        if (differences := launch_differences([*launches(arm, rate, valid).values()]))
    ]


def paired_section(
    arms: Sequence[str], valid: Sequence[Cell], limits: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Each arm against each earlier one, at each rate at which both have valid cells."""
    return [
        found
        for rate in _rates(valid)
        for first, other in combinations(arms, 2)
        if (found := _pair(first, other, rate, valid, limits))
    ]


def _pair(
    first: str, other: str, rate: float, valid: Sequence[Cell], limits: Mapping[str, float]
) -> dict[str, Any] | None:
    ttft = _difference(first, other, rate, valid, ttft_s)
    if not ttft["n"]:
        return None
    return {
        "arms": [first, other],
        "offered_qps": rate,
        "ttft_delta_p50_s": ttft.pop("delta_p50_s"),
        **ttft,
        "answer": _difference(first, other, rate, valid, answer_s),
        "mcnemar": {
            name: asdict(mcnemar(*_missed((first, other), rate, valid, limit)))
            for name, limit in limits.items()
        },
    }


def _difference(
    first: str, other: str, rate: float, valid: Sequence[Cell], time_s: Callable[[RequestRecord], float]
) -> dict[str, Any]:
    """How far a time of two arms' requests differs, and what that rests on (`paired.paired_estimate`)."""
    named = launches(first, rate, valid, time_s), launches(other, rate, valid, time_s)
    a, b = ([*arm.values()] for arm in named)
    cohort_of = {r.id: r.cohort for cell in valid for r in cell.records}
    waiting = max(_waiting(arm, rate, valid) for arm in (first, other))
    estimate = paired_estimate(a, b, cohort_of, waiting=waiting)
    within = [abs(value) for launched in (a, b) for value in launch_differences(launched)]
    floor = max(within, default=None)
    return {
        "n": estimate.n,
        "delta_p50_s": estimate.median_s,
        "interval_s": as_json(estimate.interval),
        "no_interval": estimate.reason,
        "launch_pairs": [
            {
                "launches": [[*named[0]][pair.first], [*named[1]][pair.other]],
                "n": pair.n,
                "delta_p50_s": pair.median_s,
                "interval_s": as_json(pair.interval),
            }
            for pair in estimate.launch_pairs
        ],
        "waiting_share": waiting,
        "cohorts": estimate.cohorts,
        "launches": list(estimate.launches),
        "knows_launches": estimate.knows_launches,
        "noise_floor_s": floor,
        "resolved": resolved(estimate, floor),
    }


def _waiting(arm: str, rate: float, valid: Sequence[Cell]) -> float:
    """The mean over an arm's cells at a rate of `waiting_share`."""
    cells = [cell for cell in valid if cell.key.arm == arm and cell.key.offered_qps == rate]
    return fmean(waiting_share(cell.records) for cell in cells) if cells else 0.0


def _missed(
    arms: tuple[str, str], rate: float, valid: Sequence[Cell], limit_s: float
) -> tuple[Counter[str], Counter[str]]:
    """For each arm in how many of the repeats that both have each request missed, 0 included."""
    cells = {arm: [c for c in valid if c.key.arm == arm and c.key.offered_qps == rate] for arm in arms}
    repeats = set.intersection(*({cell.key.repeat for cell in cells[arm]} for arm in arms))
    found = {arm: Counter[str]() for arm in arms}
    for arm in arms:
        for cell in cells[arm]:
            if cell.key.repeat in repeats:
                found[arm].update({record.id: int(ttft_s(record) > limit_s) for record in cell.records})
    return found[arms[0]], found[arms[1]]


def paired_ttft(
    first: str, other: str, rate: float, valid: Sequence[Cell]
) -> dict[tuple[int, str], tuple[int, float, float]]:
    """(repeat, id) -> (prompt tokens, TTFT in `first`, TTFT in `other`), of repeats valid in both arms."""
    by_arm = {
        arm: {
            (cell.key.repeat, record.id): record
            for cell in valid
            if cell.key.arm == arm and cell.key.offered_qps == rate
            for record in cell.records
        }
        for arm in (first, other)
    }
    return {
        key: (record.prompt_tokens, ttft_s(record), ttft_s(by_arm[other][key]))
        for key, record in by_arm[first].items()
        if key in by_arm[other]
    }


def boundary_section(
    arms: Sequence[str],
    cells: Sequence[Cell],
    valid: Sequence[Cell],
    limits: Mapping[str, float],
    unstable: Collection[CellKey],
) -> list[dict[str, Any]]:
    """By how much the arms' highest passing rates differ, over repeats that both arms have."""
    return [
        {
            "arms": [arms[0], other],
            "limit": name,
            "repeats": len(first),
            "interval_qps": as_json(boundary_difference(first, second)),
        }
        for name, limit in limits.items()
        for other in arms[1:]
        for first, second in [_boundaries(arms[0], other, cells, valid, limit, unstable)]
    ]


def _boundaries(
    first: str,
    other: str,
    cells: Sequence[Cell],
    valid: Sequence[Cell],
    limit_s: float,
    unstable: Collection[CellKey],
) -> tuple[list[Boundary], list[Boundary]]:
    counted = {cell.key for cell in valid}

    def boundary(arm: str, repeat: int) -> Boundary | None:
        mine = [cell for cell in cells if cell.key.arm == arm and cell.key.repeat == repeat]
        verdicts = [
            CellVerdict(
                cell.key.offered_qps,
                cell.key in counted,
                misses([ttft_s(record) for record in cell.records], limit_s),
                cell.key in unstable,
            )
            for cell in mine
        ]
        if not verdicts:
            return None
        failed = first_failing(verdicts)
        return Boundary(highest_passing(verdicts) or 0.0, math.inf if failed is None else failed)

    repeats = sorted({cell.key.repeat for cell in cells})
    pairs = [(boundary(first, repeat), boundary(other, repeat)) for repeat in repeats]
    both = [(a, b) for a, b in pairs if a and b]
    return [a for a, _ in both], [b for _, b in both]


def as_json(interval: Interval | None) -> dict[str, float | None] | None:
    """An end that the sample does not bound is null."""
    if interval is None:
        return None
    ends = (interval.low, interval.high)
    low, high = (end if math.isfinite(end) else None for end in ends)
    return {"low": low, "high": high}


def _rates(valid: Sequence[Cell]) -> Iterator[float]:
    yield from sorted({cell.key.offered_qps for cell in valid})
