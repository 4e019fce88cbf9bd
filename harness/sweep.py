# SPDX-License-Identifier: Apache-2.0
"""The cells of a run, one after the other, each kept as soon as it ends; course.py says which comes next."""

import asyncio
import functools
import hashlib
import json
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import aiohttp
import numpy as np

from harness.client import encode_body
from harness.connection import auth, tls_context
from harness.course import Outcome, Plan, cell_order, remaining
from harness.errors import UserError
from harness.load import CellSpec, Progress, Target, progress_at_end, refusal, run_cell
from harness.nvidia import GpuSampler
from harness.provenance import code_sha256
from harness.scrape import Scraper, wait_until_idle
from harness.sla import misses
from harness.store import Cell, CellKey, RunStore
from harness.trace import FIRST_TOKEN_ID, Request, Trace
from harness.validity import engine_changes, engine_identity, evidence_of, judge, ttft_s
from harness.workers import processes_for, run_cell_in

__all__ = ["Plan", "Position", "cell_order", "measure"]

WARM_UP_TOKENS = 8  # completion tokens of the warm-up request
WARM_UP_SEED = 20_261_129
FIRST_TAIL_S = 10.0  # guess of a cell's time beyond its schedule, before one was measured
RESET_TIMEOUT_S = 10.0
IDLE_WAIT_S = 60.0
TRIES = 3  # at measuring a spoiled cell again


@dataclass(frozen=True)
class Position:
    """The cell that runs, its place (from 1) among those known of, and how long those after it will take."""

    key: CellKey
    index: int
    total: int
    left_s: float = 0.0


OnProgress = Callable[[Position, Progress], None]
Describe = Callable[[Target, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""What a server is now, given what is known of it: a question that it does not answer changes nothing."""


async def measure(
    store: RunStore,
    targets: Sequence[Target],
    trace: Trace,
    plan: Plan,
    *,
    engines: Mapping[str, Mapping[str, Any]] | None = None,
    launches: Mapping[str, int] | None = None,
    describe: Describe | None = None,
    on_progress: OnProgress | None = None,
    stop: asyncio.Event | None = None,
    warmed: Collection[str] = (),
    resumed: bool = False,
) -> bool:
    """Measure what is left of `plan` on all `targets`; False when `stop` or the budget ended it early.

    Each arm gets one warm-up request before its first cell, but for those `warmed` already, and another one when its
    server was started anew between two cells. A cell that `stop` cut short is kept, marked aborted, and measured
    again by the next call. `engines` holds what to record about each arm's engine with its cells, by the arm's name,
    and `launches` which launch of it this is, from 0; where others start and end it, `describe` says before each cell
    what it is now. With `resumed` the cells that earlier sessions spoiled are measured again. A cell begins when the
    engine is idle, or a minute later: then it does not count. Raises UserError when a server refuses a cell's first
    requests (that cell is kept too), and when the store holds cells of another engine, trace or harness.
    """
    stop = stop or asyncio.Event()
    began_s = time.monotonic()
    arms = [target.name for target in targets]
    by_name = {target.name: target for target in targets}
    facts = {arm: dict((engines or {}).get(arm) or {}) for arm in arms}
    manifest = store.manifest
    outcome_of = _outcomes_of(manifest)
    outcomes: dict[CellKey, Outcome] = {}
    tails_s: list[float] = []
    asked: set[str] = set()
    again: set[CellKey] = set()
    for cell in sorted(store.cells(), key=lambda cell: cell.facts["started_unix_s"]):
        arm = cell.key.arm
        if arm not in by_name or cell.facts["aborted"]:
            continue
        if stop.is_set():
            return False
        if describe and arm not in asked:
            facts[arm] = dict(await describe(by_name[arm], cell.facts["engine"] or {}))
            asked.add(arm)
        _require_same(cell, facts[arm], trace)
        if resumed and due_again(cell, manifest):
            again.add(cell.key)
        else:
            outcomes[cell.key] = outcome_of(cell)
        tails_s.append(_tail_s(cell, trace))
    body_bytes = fmean(len(encode_body(targets[0], request, "")) for request in trace.requests)
    # By arm: when the process that was warmed up had been started, as far as it tells.
    warm: dict[str, float | None] = dict.fromkeys(warmed)
    while keys := remaining(plan, arms, outcomes):
        key = keys[0]
        target = by_name[key.arm]
        tail_s = median(tails_s) if tails_s else FIRST_TAIL_S
        cell_s = trace.span / key.offered_qps + tail_s
        if plan.budget_s is not None and time.monotonic() - began_s + cell_s > plan.budget_s:
            return False
        if key.arm not in warm:
            await _warm_up(target, trace, plan, stop)
            warm[key.arm] = None
        if stop.is_set():
            return False
        started_unix_s = await wait_until_idle(target, stop, IDLE_WAIT_S)
        if started_unix_s and warm[key.arm] not in (None, started_unix_s):
            await _warm_up(target, trace, plan, stop)  # somebody started it anew
            await wait_until_idle(target, stop, IDLE_WAIT_S)
        warm[key.arm] = started_unix_s or warm[key.arm]
        if stop.is_set():
            return False
        if describe:  # when it is idle: a busy server may miss a question
            facts[key.arm] = dict(await describe(target, facts[key.arm]))

        # A salt of its own: a cell finds no prefix that another one, or an older run, left in the cache.
        salt = f"{key}-{secrets.token_hex(8)}"
        spec = CellSpec(
            key.offered_qps,
            key.repeat,
            salt,
            plan.drain_timeout_s,
            plan.request_timeout_s,
            plan.first_token_timeout_s,
            plan.connect_timeout_s,
        )
        left_s = sum(trace.span / later.offered_qps + tail_s for later in keys[1:])
        position = Position(key, len(outcomes) + 1, len(outcomes) + len(keys), left_s)
        report = functools.partial(on_progress, position) if on_progress else None
        processes = plan.client_processes or processes_for(
            key.offered_qps, body_bytes, len(os.sched_getaffinity(0))
        )
        was_reset = await reset_prefix_cache(target)
        async with GpuSampler() as gpus, Scraper(target) as scraper:
            run = await run_cell_in(processes, target, trace, spec, progress=report, stop=stop)
        if key in again:
            store.set_aside(key)
        store.write_cell(
            key,
            run,
            scraper.samples,
            trace_sha256=trace.sha256,
            cache_salt=salt,
            engine=facts[key.arm] or None,
            launch=(launches or {}).get(key.arm),
            prefix_cache_reset=was_reset,
            identity=identity(facts[key.arm], trace.sha256),
            client_processes=processes,
            gpus=gpus.samples,
        )
        if report:
            report(progress_at_end(run))
        if stop.is_set():
            return False
        if cause := refusal(run.records):
            raise UserError(_refused(target, cause))
        cell = store.cell(key)
        outcomes[key] = outcome_of(cell)
        tails_s.append(_tail_s(cell, trace))
    return True


def due_again(cell: Cell, manifest: Mapping[str, Any]) -> bool:
    """Whether a resumption measures this cell again: it says nothing about its server (`Verdict.spoiled`).

    For somebody who resumes a run: a session that did so by itself would do it for ever on a busy machine. Each at
    most TRIES times: a restart that the load brings about comes with every measurement.
    """
    if cell.facts.get("measured_again", 0) >= TRIES:
        return False
    return judge(evidence_of(manifest, cell.facts, cell.records)).spoiled


def identity(engine: Mapping[str, Any], trace_sha256: str) -> str:
    """Names what a cell was measured with; cells that differ in it are never mixed in one run.

    Of the engine's facts those that make it another engine: its digest, flags, environment and packages, without
    what is own to a launch, such as its port; with the trace and the harness's code.
    """
    text = json.dumps([engine_identity(engine), trace_sha256, code_sha256()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _require_same(cell: Cell, engine: Mapping[str, Any], trace: Trace) -> None:
    if cell.facts.get("identity") != identity(engine, trace.sha256):
        raise UserError(
            f"cell {cell.key} was measured with another engine, other flags, another environment or other code of the"
            " harness; cells are never mixed: choose a new --out"
        )


def _outcomes_of(manifest: Mapping[str, Any]) -> Callable[[Cell], Outcome]:
    """Judges each cell as the report will; to be asked in the order of measurement."""
    limits: Mapping[str, float] = manifest["limits"]["applied"]
    engines: dict[str, list[Mapping[str, Any] | None]] = {}

    def outcome(cell: Cell) -> Outcome:
        known = engines.setdefault(cell.key.arm, [])
        known.append(cell.facts["engine"])
        verdict = judge(evidence_of(manifest, cell.facts, cell.records, engine_changes(known)[-1]))
        ttft = [ttft_s(record) for record in cell.records]
        missed = {name: misses(ttft, limit_s) for name, limit_s in limits.items()}
        return Outcome(verdict.unstable, verdict.valid, missed, verdict.spoiled)

    return outcome


def _tail_s(cell: Cell, trace: Trace) -> float:
    """What a cell took beyond its schedule, with a second to begin and end."""
    ends_s = [record.done_s for record in cell.records if record.done_s is not None]
    return max(ends_s, default=0.0) - trace.span / cell.key.offered_qps + 1.0


async def reset_prefix_cache(target: Target) -> bool:
    """Empties the server's prefix cache where it lets us (VLLM_SERVER_DEV_MODE=1); says whether it did."""
    timeout = aiohttp.ClientTimeout(total=RESET_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=auth(target.api_key)) as session,
            session.post(
                f"{target.base_url}/reset_prefix_cache", ssl=tls_context(target.ca_file)
            ) as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False


async def _warm_up(target: Target, trace: Trace, plan: Plan, stop: asyncio.Event) -> None:
    """One request of the trace's longest length but other tokens: no timed request is an engine's first."""
    longest = max(trace.requests, key=lambda request: request.prompt_tokens)
    vocab_size = max((max(request.prompt) for request in trace.requests if request.prompt), default=0) + 1
    if longest.prompt:
        tokens = np.random.default_rng(WARM_UP_SEED).integers(
            min(FIRST_TOKEN_ID, vocab_size - 1), vocab_size, size=len(longest.prompt)
        )
        prompt, text = tuple(tokens.tolist()), None
    else:
        prompt, text = (), "warm up " * (longest.prompt_tokens // 2)
    output_tokens = min(WARM_UP_TOKENS, longest.output_tokens)
    request = Request("warm-up", 0, "default", 0.0, output_tokens, prompt, text)
    if longest.messages is not None:
        request = replace(request, text=None, messages=({"role": "user", "content": text or ""},))
    alone = Trace(header={}, scale=trace.scale, sha256="", requests=(request,))
    spec = CellSpec(
        1.0,
        0,
        f"warm-up-{secrets.token_hex(8)}",
        plan.request_timeout_s,
        plan.request_timeout_s,
        plan.first_token_timeout_s,
        plan.connect_timeout_s,
    )
    run = await run_cell(target, alone, spec, stop=stop)
    if not stop.is_set() and (cause := refusal(run.records, of=1)):
        raise UserError(_refused(target, cause))


def _refused(target: Target, cause: str) -> str:
    return f"arm {target.name} ({target.base_url}) refuses requests: {cause}; check the server and --model"
