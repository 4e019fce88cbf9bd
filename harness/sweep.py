# SPDX-License-Identifier: Apache-2.0
"""The cells of a run, one after the other: every rate, repeat and arm, each kept as soon as it ends."""

import asyncio
import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.errors import UserError
from harness.load import CellSpec, Progress, Target, refusal, run_cell
from harness.scrape import Scraper
from harness.store import CellKey, RunStore
from harness.trace import FIRST_TOKEN_ID, Request, Trace

WARM_UP_TOKENS = 8  # completion tokens of the warm-up request
WARM_UP_SEED = 20_261_129


@dataclass(frozen=True)
class Plan:
    """Offered rates in requests a second, ascending; time limits in seconds as in `CellSpec`."""

    rates: tuple[float, ...]
    repeats: int = 1
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 120.0


@dataclass(frozen=True)
class Position:
    """The cell that runs, and its place (from 1) among those of this sweep."""

    key: CellKey
    index: int
    total: int


OnProgress = Callable[[Position, Progress], None]


def cell_order(plan: Plan, arms: Sequence[str]) -> list[CellKey]:
    """Rates upward; arms in order, and backward at every other cell, so that drift favours none of them."""
    return [
        CellKey(arm, rate, repeat)
        for index, rate in enumerate(plan.rates)
        for repeat in range(plan.repeats)
        for arm in (reversed(arms) if (index + repeat) % 2 else arms)
    ]


async def measure(
    store: RunStore,
    targets: Sequence[Target],
    trace: Trace,
    plan: Plan,
    *,
    engines: Mapping[str, Mapping[str, Any]] | None = None,
    on_progress: OnProgress | None = None,
    stop: asyncio.Event | None = None,
) -> bool:
    """Measure every cell of `plan` on all `targets`; False when `stop` ended it early.

    Each arm gets one warm-up request before its first cell. A cell that `stop` cut short is kept, marked
    aborted. `engines` holds what to record about each arm's engine with its cells, by the arm's name. Raises
    UserError when a server refuses a cell's first requests; that cell is kept too.
    """
    stop = stop or asyncio.Event()
    by_name = {target.name: target for target in targets}
    order = cell_order(plan, list(by_name))
    warm: set[str] = set()
    for index, key in enumerate(order, start=1):
        target = by_name[key.arm]
        if key.arm not in warm:
            await _warm_up(target, trace, plan, stop)
            warm.add(key.arm)
        if stop.is_set():
            return False

        # A salt of its own: a cell finds no prefix that another one, or an older run, left in the cache.
        salt = f"{key}-{secrets.token_hex(8)}"
        spec = CellSpec(key.offered_qps, key.repeat, salt, plan.drain_timeout_s, plan.request_timeout_s)
        position = Position(key, index, len(order))
        report = functools.partial(on_progress, position) if on_progress else None
        async with Scraper(target.base_url) as scraper:
            run = await run_cell(target, trace, spec, progress=report, stop=stop)
        store.write_cell(
            key,
            run,
            scraper.samples,
            trace_sha256=trace.sha256,
            cache_salt=salt,
            engine=(engines or {}).get(key.arm),
        )
        if stop.is_set():
            return False
        if cause := refusal(run.records):
            raise UserError(_refused(target, cause))
    return True


async def _warm_up(target: Target, trace: Trace, plan: Plan, stop: asyncio.Event) -> None:
    """One request of the trace's longest length but other tokens: no timed request is an engine's first."""
    longest = max(trace.requests, key=lambda request: len(request.prompt))
    vocab_size = max(max(request.prompt) for request in trace.requests) + 1
    tokens = np.random.default_rng(WARM_UP_SEED).integers(
        min(FIRST_TOKEN_ID, vocab_size - 1), vocab_size, size=len(longest.prompt)
    )
    output_tokens = min(WARM_UP_TOKENS, longest.output_tokens)
    request = Request("warm-up", 0, "default", 0.0, output_tokens, tuple(tokens.tolist()))
    alone = Trace(header={}, scale=trace.scale, sha256="", requests=(request,))
    spec = CellSpec(1.0, 0, f"warm-up-{secrets.token_hex(8)}", plan.request_timeout_s, plan.request_timeout_s)
    run = await run_cell(target, alone, spec, stop=stop)
    if not stop.is_set() and (cause := refusal(run.records, of=1)):
        raise UserError(_refused(target, cause))


def _refused(target: Target, cause: str) -> str:
    return f"arm {target.name} ({target.base_url}) refuses requests: {cause}; check the server and --model"
