# SPDX-License-Identifier: Apache-2.0
"""How far a run is: one line for people, events for programs."""

import json
import sys
import time
from dataclasses import asdict
from typing import Any, TextIO

from harness.course import Plan, planned_rates, walk_seconds
from harness.load import Progress
from harness.steps import Lines, put
from harness.sweep import FIRST_TAIL_S, Position


class JsonEvents:
    """One JSON object a line, `event` first: plan, progress (once a second), cell (each that ended), done."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> "JsonEvents":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, position: Position, progress: Progress) -> None:
        event = "cell" if progress.ended else "progress"
        self.tell(event, **asdict(position.key), index=position.index, of=position.total, **asdict(progress))

    def tell(self, event: str, **facts: Any) -> None:
        put(self._stream, json.dumps({"event": event, "unix_s": time.time(), **facts}) + "\n")


class ProgressLine:
    """Rewrites one line a second on a terminal; elsewhere prints one every 5 s and at each cell's end."""

    def __init__(self, stream: TextIO) -> None:
        self._lines = Lines(stream)

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.end()

    def __call__(self, position: Position, progress: Progress) -> None:
        self._lines.state(progress_line(position, progress), last=progress.ended)


def display(stream: TextIO, *, json: bool) -> JsonEvents | ProgressLine:
    """Events on stdout, or lines on `stream`."""
    return JsonEvents(sys.stdout) if json else ProgressLine(stream)


def plan_facts(plan: Plan, arms: int, span: float) -> dict[str, Any]:
    """What a sweep will do and how long its walk takes in seconds; `may_not_fit`: rates that the budget may not
    hold."""
    fitting = planned_rates(plan, arms, span, FIRST_TAIL_S)
    return {
        "cells": arms * plan.repeats * len(plan.rates),
        "rates_qps": list(plan.rates),
        "repeats": plan.repeats,
        "walk_s": walk_seconds(plan, arms, span, FIRST_TAIL_S),
        "bisect_qps": plan.grid_qps,
        "budget_s": plan.budget_s,
        "may_not_fit_qps": [rate for rate in plan.rates if rate not in fitting],
    }


def plan_text(plan: Plan, arms: int, span: float) -> str:
    """The same in one line."""
    facts = plan_facts(plan, arms, span)
    words = (
        f"plan: {facts['cells']} cells, about {facts['walk_s'] / 60:.1f} min"
        f" (each the trace's span at its rate and {FIRST_TAIL_S:g} s)"
    )
    if plan.grid_qps:
        words += f", then boundaries bisected down to {plan.grid_qps:g} QPS"
    if plan.budget_s is not None:
        words += f"; budget {plan.budget_s / 60:.3g} min"
        if left_out := facts["may_not_fit_qps"]:
            words += f", which {', '.join(f'{rate:g}' for rate in left_out)} QPS may not fit into"
    return words


def tell_plan(plan: Plan, arms: int, span: float, stream: TextIO, *, json: bool) -> None:
    """For people always, for programs with `json`."""
    put(stream, plan_text(plan, arms, span) + "\n")
    if json:
        JsonEvents(sys.stdout).tell("plan", **plan_facts(plan, arms, span))


def progress_line(position: Position, progress: Progress) -> str:
    """`cell 3/8 tp2 @ 0.9 QPS  sent 12 running 4 done 8/24  P50 0.45 s  2:10 left`, failures where there are any."""
    key = position.key
    failed = f"  failed {progress.failed}" if progress.failed else ""
    p50 = "" if progress.ttft_p50_s is None else f"  P50 {progress.ttft_p50_s:.3g} s"
    minutes, seconds = divmod(round(position.left_s + progress.schedule_left_s), 60)
    return (
        f"cell {position.index}/{position.total} {key.arm} @ {key.offered_qps:g} QPS  "
        f"sent {progress.sent} running {progress.running} done {progress.done}/{progress.total}{failed}"
        f"{p50}  {minutes}:{seconds:02d} left"
    )
