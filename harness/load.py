# SPDX-License-Identifier: Apache-2.0
"""One cell of a sweep: a trace replayed once against one server at one offered rate, in open loop.

Each request is sent when the schedule says so, whatever became of the earlier ones, and its TTFT counts from
that time: a server that stalls cannot thin out the load or hide the wait (no coordinated omission). To keep
the send path short, bodies are encoded, names resolved and garbage collection is switched off before the cell
starts.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from harness.client import (
    CONNECT_ERROR,
    HTTP_ERROR,
    OK,
    RequestRecord,
    Target,
    encode_body,
    new_session,
    send,
)
from harness.schedule import due_times
from harness.trace import Request, Trace

__all__ = ["CellRun", "CellSpec", "Progress", "RequestRecord", "Target", "refusal", "run_cell"]

LEAD_S = 0.2  # from the end of the preparations to the first due time
SPIN_S = 0.002  # the event loop's timers are late by up to a millisecond or two: poll for the last stretch
LAG_INTERVAL_S = 0.02


@dataclass(frozen=True)
class CellSpec:
    """How to run a cell. `request_timeout_s` counts from the due time, `drain_timeout_s` from the last."""

    offered_qps: float
    repeat: int
    cache_salt: str
    drain_timeout_s: float
    request_timeout_s: float


@dataclass(frozen=True)
class CellRun:
    """What a cell gave: a record for each request of the trace, in its order, and the client's own lateness.

    `loop_lag_s` samples by how much the event loop woke up late. `aborted` cells were stopped before their
    end.
    """

    records: list[RequestRecord]
    loop_lag_s: list[float]
    started_unix_s: float
    aborted: bool


@dataclass(frozen=True)
class Progress:
    """How far a cell is: requests sent, still running, done (failures included), failed, in the trace."""

    sent: int
    running: int
    done: int
    failed: int
    total: int


async def run_cell(
    target: Target,
    trace: Trace,
    spec: CellSpec,
    *,
    progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> CellRun:
    """Replay `trace` once. `offered_qps` of infinity sends everything at once.

    Ends when every request has ended, or at the drain limit (what is left is cancelled), or early (`aborted`)
    when `stop` is set or the server refuses the first requests outright (see `refusal`).
    """
    bodies = [encode_body(target, request, spec.cache_salt) for request in trace.requests]
    due = due_times(trace, spec.offered_qps)
    stop = stop or asyncio.Event()
    refused = asyncio.Event()
    lag: list[float] = []
    sends: list[asyncio.Task[RequestRecord]] = []

    def check_first(_: object) -> None:
        if refusal([task.result() for task in sends[:3] if _returned(task)], of=len(due)):
            refused.set()

    async with new_session(target) as session:
        with _quiet_collector():
            loop = asyncio.get_running_loop()
            start = loop.time() + LEAD_S
            started_unix_s = time.time() + LEAD_S

            def clock() -> float:
                return loop.time() - start

            async def dispatch() -> None:
                """The open loop: nothing here waits for an answer before the last request is sent."""
                for request, body, due_s in zip(trace.requests, bodies, due, strict=True):
                    await _sleep_until(clock, due_s)
                    sending = asyncio.create_task(
                        send(session, target, request, body, due_s, spec.request_timeout_s, clock)
                    )
                    sending.add_done_callback(check_first)
                    sends.append(sending)
                await asyncio.wait(sends, timeout=spec.drain_timeout_s)

            dispatching = asyncio.create_task(dispatch())
            stops = [asyncio.create_task(event.wait()) for event in (stop, refused)]
            watchers = [asyncio.create_task(_sample_lag(loop.time, lag))]
            if progress:
                watchers.append(asyncio.create_task(_report_progress(progress, sends, len(due))))
            try:
                await asyncio.wait([dispatching, *stops], return_when=asyncio.FIRST_COMPLETED)
                aborted = refused.is_set() or not dispatching.done()
            finally:
                await _cancel([dispatching, *stops, *watchers])
                await _cancel(sends)
    records = [
        sends[i].result() if i < len(sends) and _returned(sends[i]) else _unsent(request, due[i])
        for i, request in enumerate(trace.requests)
    ]
    if progress:
        progress(_progress(sends, len(due)))
    return CellRun(records, lag, started_unix_s, aborted)


def refusal(records: Sequence[RequestRecord], of: int = 3) -> str | None:
    """Why the server evidently cannot serve this cell, or None.

    It cannot when each of the first three of the cell's `of` requests could not connect or was answered with
    a 4xx.
    """
    first = records[:3]
    if len(first) < min(3, of):
        return None
    for record in first:
        rejected = record.status == HTTP_ERROR and 400 <= (record.http_status or 0) < 500
        if not rejected and record.status != CONNECT_ERROR:
            return None
    return first[0].error


async def _sleep_until(clock: Callable[[], float], due_s: float) -> None:
    if (early_s := due_s - clock() - SPIN_S) > 0:
        await asyncio.sleep(early_s)
    while clock() < due_s:
        await asyncio.sleep(0)


async def _sample_lag(clock: Callable[[], float], lag: list[float]) -> None:
    while True:
        expected = clock() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        lag.append(max(0.0, clock() - expected))


async def _report_progress(
    progress: Callable[[Progress], None], sends: Sequence[asyncio.Task[RequestRecord]], total: int
) -> None:
    while True:
        progress(_progress(sends, total))
        await asyncio.sleep(1.0)


def _progress(sends: Sequence[asyncio.Task[RequestRecord]], total: int) -> Progress:
    ended = [task.result() for task in sends if _returned(task)]
    failed = sum(record.status != OK for record in ended)
    return Progress(len(sends), len(sends) - len(ended), len(ended), failed, total)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):  # a fault of the harness itself, never of a request
            raise outcome


def _returned(task: asyncio.Task[RequestRecord]) -> bool:
    return task.done() and not task.cancelled()


def _unsent(request: Request, due_s: float) -> RequestRecord:
    """The record of a request that the cell's end came before."""
    return RequestRecord(
        id=request.id,
        cohort=request.cohort,
        limit_class=request.limit_class,
        prompt_tokens=len(request.prompt),
        output_tokens=request.output_tokens,
        due_s=due_s,
        error="not sent before the cell was stopped",
    )


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """No garbage collection while a cell runs: a pass over a large trace stops the client for many ms."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
