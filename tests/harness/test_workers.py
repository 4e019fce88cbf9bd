# SPDX-License-Identifier: Apache-2.0
"""A cell that several processes send is one cell."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import small_trace, spec
from fake_server import FakeServer, Script

from harness.client import Target
from harness.load import Progress
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
