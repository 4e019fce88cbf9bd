# SPDX-License-Identifier: Apache-2.0
"""One cell, sent by several processes, where one event loop cannot keep the schedule.

    parent  spawns workers, each with every n-th request of the trace
    worker  encodes its requests, says "ready"
    parent  names one start on CLOCK_MONOTONIC, which all processes of a machine share
    worker  runs its part of the cell as run_cell does, tells its progress, returns its CellRun

A worker whose pipe closes stops at once: none outlives the harness, however that ends. Signals that end a run reach
the whole process group; workers are deaf to them, for when to stop is the parent's to say.
"""

import asyncio
import contextlib
import dataclasses
import functools
import math
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from statistics import median

import uvloop

from harness.errors import UserError
from harness.load import CellRun, CellSpec, Progress, Target, run_cell, soonest_start_s
from harness.signals import ending
from harness.trace import Trace

LOOP_BYTES_PER_S = 40e6
"""What one loop was seen to send on time: 80 requests of 480 KB a second (docs/calibration.md)."""
LOOP_QPS = 200.0


def processes_for(offered_qps: float, body_bytes: float, cpus: int) -> int:
    """Client processes for a rate (requests a second) and a mean body; never more than half the cores."""
    needed = max(offered_qps * body_bytes / LOOP_BYTES_PER_S, offered_qps / LOOP_QPS)
    return max(1, min(math.ceil(needed) if math.isfinite(needed) else 1, cpus // 2))


async def run_cell_in(
    processes: int,
    target: Target,
    trace: Trace,
    spec: CellSpec,
    *,
    progress: Callable[[Progress], None] | None = None,
    stop: asyncio.Event | None = None,
) -> CellRun:
    """As `run_cell`, by so many processes. UserError where one of them dies."""
    processes = min(processes, len(trace.requests))
    if processes < 2:
        return await run_cell(target, trace, spec, progress=progress, stop=stop)
    spawning = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    workers = []
    states: dict[int, Progress] = {}
    try:
        for index in range(processes):
            ours, theirs = spawning.Pipe()
            part = dataclasses.replace(trace, header={}, requests=trace.requests[index::processes])
            worker = spawning.Process(target=_work, args=(theirs, target, part, spec), daemon=True)
            _start_deaf(worker)
            theirs.close()
            pipes.append(ours)
            workers.append(worker)
        for pipe in pipes:
            await _receive(pipe)
        start = soonest_start_s()
        for pipe in pipes:
            pipe.send(start)

        async def follow(index: int) -> CellRun:
            while not isinstance(told := await _receive(pipes[index]), CellRun):
                assert isinstance(told, Progress)
                states[index] = told
                if progress and len(states) == processes:
                    progress(_sum(list(states.values())))
            return told

        async def follow_all() -> list[CellRun]:
            return list(await asyncio.gather(*(follow(index) for index in range(processes))))

        following = asyncio.create_task(follow_all())
        stopping = asyncio.create_task((stop or asyncio.Event()).wait())
        try:
            await asyncio.wait({following, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done():
                for pipe in pipes:
                    with contextlib.suppress(BrokenPipeError):  # one whose part is done is gone already
                        pipe.send("stop")
            runs = await following
        finally:
            stopping.cancel()
    finally:
        for pipe in pipes:
            pipe.close()
        for worker in workers:
            worker.join(5.0)
            worker.kill()
    return merged(runs, trace)


def _start_deaf(worker: BaseProcess) -> None:
    """It inherits that signals which end a run are blocked, from its first moment on."""
    resource_tracker.ensure_running()  # which unblocks them as it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending())
    try:
        worker.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def merged(runs: Sequence[CellRun], trace: Trace) -> CellRun:
    """One cell of its parts, in the trace's order."""
    by_id = {record.id: record for run in runs for record in run.records}
    return CellRun(
        records=[by_id[request.id] for request in trace.requests],
        loop_lag_s=[lag for run in runs for lag in run.loop_lag_s],
        started_unix_s=runs[0].started_unix_s,
        aborted=any(run.aborted for run in runs),
        cpu_s=sum(run.cpu_s for run in runs),
        real_time=all(run.real_time for run in runs),
        started_monotonic_s=runs[0].started_monotonic_s,
        encode_s=sum(run.encode_s for run in runs),
        system_s=sum(run.system_s for run in runs),
    )


def _sum(states: Sequence[Progress]) -> Progress:
    p50s = [state.ttft_p50_s for state in states if state.ttft_p50_s is not None]
    return Progress(
        sent=sum(state.sent for state in states),
        running=sum(state.running for state in states),
        done=sum(state.done for state in states),
        failed=sum(state.failed for state in states),
        total=sum(state.total for state in states),
        ttft_p50_s=median(p50s) if p50s else None,  # of equal parts of one cell: near enough for a display
        schedule_left_s=max(state.schedule_left_s for state in states),
    )


async def _receive(pipe: Connection) -> object:
    """The next message of a worker; a thread waits for it, the loop does not."""
    try:
        return await asyncio.to_thread(pipe.recv)
    except (EOFError, OSError):
        raise UserError("a process of the client died; see its output above and try again") from None


def _work(pipe: Connection, target: Target, part: Trace, spec: CellSpec) -> None:
    with contextlib.suppress(BrokenPipeError, EOFError):  # the parent is gone, and so is our purpose
        pipe.send(uvloop.run(_play(pipe, target, part, spec)))


async def _play(pipe: Connection, target: Target, part: Trace, spec: CellSpec) -> CellRun:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_pipe() -> None:
        """The parent said "stop", or ended."""
        loop.remove_reader(pipe.fileno())
        stop.set()

    async def agree() -> float:
        pipe.send("ready")
        start: float = pipe.recv()
        loop.add_reader(pipe.fileno(), on_pipe)
        return start

    tell = functools.partial(_tell, pipe)
    run = await run_cell(target, part, spec, progress=tell, stop=stop, agree_on_start=agree)
    loop.remove_reader(pipe.fileno())
    return run


def _tell(pipe: Connection, progress: Progress) -> None:
    with contextlib.suppress(OSError):  # the parent's end stops us by itself
        pipe.send(progress)
