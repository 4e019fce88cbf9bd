# SPDX-License-Identifier: Apache-2.0
"""One cell of a sweep: a trace replayed once against one server at one offered rate, in open loop.

Each request is sent when the schedule says so, whatever became of the earlier ones, and its TTFT counts from
that time: a server that stalls cannot thin out the load or hide the wait (no coordinated omission). To keep
the send path short, bodies are encoded, names resolved and garbage collection is switched off before the cell
starts.
"""

import asyncio
import bisect
import gc
import math
import os
import resource
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from harness.alarm import Alarm
from harness.client import (
    CONNECT_ERROR,
    HTTP_ERROR,
    OK,
    RequestRecord,
    Target,
    Timeouts,
    encode_message,
    send,
)
from harness.connection import Connector, Standby
from harness.outbox import Outbox
from harness.schedule import due_times
from harness.trace import Request, Trace

__all__ = ["CellRun", "CellSpec", "Progress", "RequestRecord", "Target", "refusal", "run_cell"]

NORMAL_PRIORITY = "HARNESS_NORMAL_PRIORITY"
LEAD_S = 0.05  # from the end of the preparations to the first connection
AHEAD_S = 0.25  # a request's connection is opened at least this long before it is due
OPEN_S = 1.0  # and no longer than this, where the client is awake to send another request anyway
LAG_INTERVAL_S = 0.5  # each wake costs the client CPU time of its own
PROGRESS_S = 1.0  # between two looks at how far a cell is


@dataclass(frozen=True)
class CellSpec:
    """How to run a cell. `drain_timeout_s` counts from the last due time, the others as in `Timeouts`."""

    offered_qps: float
    repeat: int
    cache_salt: str
    drain_timeout_s: float
    request_timeout_s: float
    first_token_timeout_s: float = Timeouts.first_token_s
    connect_timeout_s: float = Timeouts.connect_s

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(self.connect_timeout_s, self.first_token_timeout_s, self.request_timeout_s)


@dataclass(frozen=True)
class CellRun:
    """What a cell gave: a record for each request of the trace, in its order, and the client's own lateness.

    `loop_lag_s` samples by how much the event loop woke up late. CPU time of the client: `encode_s` for
    building the requests before the cell, `cpu_s` from the first connection to the last answer, of which
    `system_s` in the kernel. `real_time`: it had real-time priority. `aborted` cells were stopped before their
    end.
    """

    records: list[RequestRecord]
    loop_lag_s: list[float]
    started_unix_s: float
    aborted: bool
    cpu_s: float = 0.0
    real_time: bool = False
    started_monotonic_s: float = 0.0
    encode_s: float = 0.0
    system_s: float = 0.0


@dataclass(frozen=True)
class Progress:
    """How far a cell is: requests sent, still running, done (failures included), failed, in the trace.

    `ttft_p50_s` is that of the requests answered so far; `schedule_left_s` the time until the last one is due.
    `ended`: the cell has, and is kept.
    """

    sent: int
    running: int
    done: int
    failed: int
    total: int
    ttft_p50_s: float | None = None
    schedule_left_s: float = 0.0
    ended: bool = False


async def run_cell(
    target: Target,
    trace: Trace,
    spec: CellSpec,
    *,
    progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
    agree_on_start: Callable[[], Awaitable[float]] | None = None,
) -> CellRun:
    """Replay `trace` once. `offered_qps` of infinity sends everything at once.

    The cell's start, in time.monotonic() seconds, is a moment after everything is prepared, or what
    `agree_on_start` says then (workers.py: several processes share one cell).
    Ends when every request has ended, or at the drain limit (what is left is cancelled), or early (`aborted`)
    when `stop` is set or the server refuses the first requests outright (see `refusal`).
    """
    encode_s, outbox = -time.process_time(), Outbox()
    messages = [outbox.add(*encode_message(target, request, spec.cache_salt)) for request in trace.requests]
    encode_s += time.process_time()
    due = due_times(trace, spec.offered_qps)
    stop = stop or asyncio.Event()
    refused = asyncio.Event()
    lag: list[float] = []
    sends: list[asyncio.Task[RequestRecord]] = []
    standbys: list[Standby] = []

    def check_first(_: object) -> None:
        if refusal([task.result() for task in sends[:3] if _returned(task)], of=len(due)):
            refused.set()

    with outbox, _quiet_collector(), real_time_priority() as real_time:
        start = math.inf

        def clock() -> float:
            return time.monotonic() - start

        connector = Connector(
            target.base_url, clock, timeout_s=spec.connect_timeout_s, ca_file=target.ca_file
        )
        await connector.resolve()
        start = await agree_on_start() if agree_on_start else soonest_start_s()
        started_unix_s = time.time() + start - time.monotonic()
        cpu_s, system_s = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_stime

        async def dispatch() -> None:
            """The open loop: nothing here waits for an answer before the last request is sent."""
            with Alarm() as alarm:
                for at_s, index, opens in _events(due):
                    await alarm.until(start + at_s, poll=not opens)
                    if opens:
                        standbys.append(Standby(connector))
                        continue
                    sending = asyncio.create_task(
                        send(
                            connector,
                            standbys[index],
                            target,
                            trace.requests[index],
                            messages[index],
                            due[index],
                            spec.timeouts,
                            clock,
                        )
                    )
                    sending.add_done_callback(check_first)
                    sends.append(sending)
            await asyncio.wait(sends, timeout=spec.drain_timeout_s)

        dispatching = asyncio.create_task(dispatch())
        stops = [asyncio.create_task(event.wait()) for event in (stop, refused)]
        watchers = [asyncio.create_task(_sample_lag(time.monotonic, lag))]
        if progress:
            watchers.append(asyncio.create_task(_report_progress(progress, sends, due, clock)))
        try:
            await asyncio.wait([dispatching, *stops], return_when=asyncio.FIRST_COMPLETED)
            aborted = refused.is_set() or not dispatching.done()
        finally:
            await _cancel([dispatching, *stops, *watchers])
            await _cancel(sends)
            for standby in standbys[len(sends) :]:
                standby.close()
        cpu_s = time.process_time() - cpu_s
        system_s = resource.getrusage(resource.RUSAGE_SELF).ru_stime - system_s
    records = [
        sends[i].result() if i < len(sends) and _returned(sends[i]) else _unsent(request, due[i])
        for i, request in enumerate(trace.requests)
    ]
    if progress:
        progress(_progress(sends, due, clock()))
    return CellRun(records, lag, started_unix_s, aborted, cpu_s, real_time, start, encode_s, system_s)


def soonest_start_s() -> float:
    """The time.monotonic() at which a cell that is prepared now can start."""
    return time.monotonic() + LEAD_S + AHEAD_S


def refusal(records: Sequence[RequestRecord], of: int = 3) -> str | None:
    """Why the server evidently cannot serve this cell, or None.

    It cannot when each of the first three of the cell's `of` requests could not connect or was answered with
    a redirection or a 4xx.
    """
    first = records[:3]
    if len(first) < min(3, of):
        return None
    for record in first:
        rejected = record.status == HTTP_ERROR and 300 <= (record.http_status or 0) < 500
        if not rejected and record.status != CONNECT_ERROR:
            return None
    return first[0].error


def _events(due: Sequence[float]) -> list[tuple[float, int, bool]]:
    """(when, request, whether its connection is opened or it is sent), in order of time.

    A connection is opened right after the last request that goes out between OPEN_S and AHEAD_S before its own
    is due, or AHEAD_S before where none does: to wake the client for it alone costs more CPU time than to open
    it. Where both fall together the request that is due goes first.
    """
    opening = []
    for index, due_s in enumerate(due):
        before = bisect.bisect_right(due, due_s - AHEAD_S) - 1
        together = before >= 0 and due[before] >= due_s - OPEN_S
        opening.append((due[before] if together else due_s - AHEAD_S, index, True))
    sending = [(due_s, index, False) for index, due_s in enumerate(due)]
    return sorted(opening + sending, key=lambda event: (event[0], event[2], event[1]))


async def _sample_lag(clock: Callable[[], float], lag: list[float]) -> None:
    while True:
        expected = clock() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        lag.append(max(0.0, clock() - expected))


async def _report_progress(
    progress: Callable[[Progress], None],
    sends: Sequence[asyncio.Task[RequestRecord]],
    due: Sequence[float],
    clock: Callable[[], float],
) -> None:
    while True:
        progress(_progress(sends, due, clock()))
        await asyncio.sleep(PROGRESS_S)


def _progress(sends: Sequence[asyncio.Task[RequestRecord]], due: Sequence[float], now: float) -> Progress:
    done = [task.result() for task in sends if _returned(task)]
    return _state(done, len(sends), len(due), schedule_left_s=max(0.0, due[-1] - now))


def progress_at_end(run: CellRun) -> Progress:
    """The last state of a cell, cut short or not."""
    sent = [record for record in run.records if record.dispatched_s is not None]
    return _state(sent, len(sent), len(run.records), ended=True)


def _state(done: Sequence[RequestRecord], sent: int, total: int, **more: Any) -> Progress:
    answered = [r.first_token_s - r.due_s for r in done if r.status == OK and r.first_token_s is not None]
    return Progress(
        sent=sent,
        running=sent - len(done),
        done=len(done),
        failed=sum(record.status != OK for record in done),
        total=total,
        ttft_p50_s=median(answered) if answered else None,
        **more,
    )


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
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        due_s=due_s,
        error="not sent before the cell was stopped",
    )


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """No garbage collection while a cell runs: a pass over a large trace stops the client for many ms."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def real_time_priority() -> Iterator[bool]:
    """Real-time priority for this thread where the system allows it; says whether it does.

    The sender needs a millisecond or two of CPU time a request, but needs them on time, also while an engine
    computes on the same cores. Without the permission (CAP_SYS_NICE), or with HARNESS_NORMAL_PRIORITY set in
    the environment, it runs like any other program.
    """
    if os.environ.get(NORMAL_PRIORITY):
        yield False
        return
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
