# SPDX-License-Identifier: Apache-2.0
"""A cell that several processes send is one cell."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from builders import small_trace, spec
from fake_server import FakeServer, Script

from harness import workers
from harness.client import Target
from harness.load import Progress
from harness.store import RunStore
from harness.trace import save_trace
from harness.workers import processes_for, run_cell_in


async def test_two_processes_keep_one_schedule() -> None:
    trace = small_trace(requests=40, arrivals="poisson")
    seen: list[Progress] = []
    async with FakeServer() as server:
        run = await run_cell_in(2, Target("a", server.url, "fake"), trace, spec(40.0), progress=seen.append)
    assert [record.id for record in run.records] == [request.id for request in trace.requests]
    assert [record.due_s for record in run.records] == [request.arrival / 40 for request in trace.requests]
    assert all(record.status == "ok" for record in run.records)
    assert len(server.bodies) == 40
    assert (seen[-1].done, seen[-1].total) == (40, 40)
    # Each request reached the server after it was due on the one clock that both processes were given.
    by_prompt = {
        tuple(body["prompt"]): at for body, at in zip(server.bodies, server.arrivals_unix_s, strict=True)
    }
    late = [by_prompt[q.prompt] - run.started_unix_s - q.arrival / 40 for q in trace.requests]
    assert min(late) > -0.002


async def test_stop_reaches_every_process() -> None:
    stop = asyncio.Event()
    async with FakeServer(Script(hang_after=1)) as server:

        def stop_when_sent(progress: Progress) -> None:
            if progress.sent == 6:
                stop.set()

        run = await run_cell_in(
            2, Target("a", server.url, "fake"), small_trace(), spec(50.0), progress=stop_when_sent, stop=stop
        )
    assert run.aborted
    assert {record.status for record in run.records} == {"cancelled"}


@pytest.mark.usefixtures("hangups_are_heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_to_the_whole_group_keeps_the_cell(tmp_path: Path, number: signal.Signals) -> None:
    """As a terminal and service managers send it, in a cell of which one process has finished its part."""
    trace = small_trace()
    save_trace(trace, tmp_path / "trace.jsonl")
    hanging = [list(request.prompt) for request in trace.requests[1::2]]
    sent = asyncio.Event()

    def answer(index: int, body: dict[str, Any]) -> Script:
        if index == len(trace.requests):  # the warm-up came before
            sent.set()
        return Script(hang_after=1) if body["prompt"] in hanging else Script()

    words = f"run --skip-calibration --client-processes 2 --rates 20 --trace {tmp_path}/trace.jsonl"
    async with FakeServer(answer) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "harness", *words.split(), "--out", str(tmp_path / "out")),
            *("--arm", f"a={server.url}"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        await sent.wait()
        await asyncio.sleep(2.0)  # what is answered at once has come, and its process has finished
        os.killpg(process.pid, number)
        _, err = await process.communicate()
    assert process.returncode == 2
    last = err.decode().splitlines()[-1]
    assert last == f"error: interrupted; 1 cells kept in {tmp_path}/out; go on with --resume"
    assert "Traceback" not in err.decode()
    (cell,) = RunStore.open(tmp_path / "out").cells()
    assert sorted(record.status for record in cell.records) == ["cancelled"] * 3 + ["ok"] * 3


async def test_a_signal_while_workers_start_leaves_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their imports take long enough to be hit."""
    started: list[int] = []
    start = workers._start_deaf

    def start_and_hit(worker: BaseProcess) -> None:
        start(worker)
        assert worker.pid
        started.append(worker.pid)
        os.kill(worker.pid, signal.SIGINT)

    monkeypatch.setattr(workers, "_start_deaf", start_and_hit)
    async with FakeServer() as server:
        run = await run_cell_in(2, Target("a", server.url, "fake"), small_trace(), spec(50.0))
    assert len(started) == 2
    assert {record.status for record in run.records} == {"ok"}


def test_no_worker_outlives_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import asyncio; from builders import small_trace, spec; from fake_server import FakeServer, Script\n"
        "from harness.client import Target; from harness.workers import run_cell_in\n"
        "async def main():\n"
        "    async with FakeServer(Script(hang_after=1)) as server:\n"
        "        await run_cell_in(2, Target('a', server.url, 'f'), small_trace(), spec(50.0,"
        " drain_timeout_s=600, request_timeout_s=600))\n"
        "if __name__ == '__main__': asyncio.run(main())\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(program)
    here = str(Path(__file__).parent)
    mark = f"WORKERS_OF={os.getpid()}-{time.time_ns()}"
    name, _, value = mark.partition("=")
    environment = {**os.environ, name: value, "PYTHONPATH": here}
    process = subprocess.Popen([sys.executable, str(script)], env=environment)

    def marked() -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    while len(marked()) < 3:
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 90  # on a crowded machine their imports alone take long
    while marked() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert marked() == []


@pytest.mark.parametrize(
    ("qps", "body", "cpus", "expected"),
    [(1, 800e3, 2, 1), (80, 480e3, 16, 1), (80, 800e3, 16, 2), (80, 800e3, 2, 1), (1000, 1e3, 16, 5)],
)
def test_how_many(qps: float, body: float, cpus: int, expected: int) -> None:
    assert processes_for(qps, body, cpus) == expected
