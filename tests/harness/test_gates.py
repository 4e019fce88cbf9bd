# SPDX-License-Identifier: Apache-2.0
"""Each gate tripped for real: a scripted server misbehaves in one way, a cell is measured, the verdict names it."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from builders import manifest, small_trace, spec
from fake_server import FakeServer, Script

from harness.client import RequestRecord
from harness.errors import UserError
from harness.load import Target, run_cell
from harness.report.summary import build_summary
from harness.store import CellKey, RunStore
from harness.sweep import Plan, measure
from harness.trace import Trace
from harness.validity import slip_s
from harness.workloads import make_shared_prefix

RATE = 60.0
TRACE = small_trace(requests=40, output_tokens=2)
pytestmark = pytest.mark.usefixtures("client_is_trusted")


@dataclass
class MeteredServer(FakeServer):
    """A scripted server with /metrics that change with the number of requests received."""

    counters: Callable[[int], dict[str, float]] = lambda _: {}

    async def _metrics(self, _: web.Request) -> web.Response:
        values = {
            "vllm:num_requests_running": 0.0,
            "vllm:prefix_cache_hits_total": 0.0,
            "vllm:num_preemptions_total": 0.0,
            "process_start_time_seconds": 100.0,
        } | self.counters(len(self.arrivals_unix_s))
        return web.Response(text="".join(f"{name} {value}\n" for name, value in values.items()))


@dataclass(frozen=True)
class Measured:
    """One cell as the report judges it, and its records."""

    cell: dict[str, Any]
    records: list[RequestRecord]

    @property
    def reasons(self) -> str:
        return "; ".join(self.cell["invalid_reasons"])


async def measured(folder: Path, server: FakeServer, *arguments: Any, **changes: Any) -> Measured:
    """Measured again where the machine stood still: what is overdue is sent at once, as if the backlog grew."""
    for number in range(5):
        anew = replace(server, port=0, arrivals_unix_s=[], bodies=[], headers=[])
        found = await measured_once(folder / str(number), anew, *arguments, **changes)
        if max(slip_s(found.records)) < 0.05:
            break
    return found


async def measured_once(
    folder: Path, server: FakeServer, trace: Trace = TRACE, drain_s: float = 10.0, **changes: Any
) -> Measured:
    """The server answers the warm-up first: it is request 0, the trace's are 1 to n."""
    store = RunStore.create(folder / "run", manifest(trace, ("a",), shared_cores=True, **changes), trace)
    async with server:
        plan = Plan((RATE,), request_timeout_s=10.0, drain_timeout_s=drain_s)
        await measure(store, [Target("a", server.url, "fake")], trace, plan)
    (cell,) = store.cells()
    summary = build_summary(store.manifest, [cell])
    return Measured(summary["arms"][0]["cells"][0], cell.records)


async def test_a_server_without_a_flaw_counts(tmp_path: Path) -> None:
    """The control: with the same load and the same metrics nothing is found."""
    found = await measured(tmp_path, MeteredServer(), no_preemption=True)
    assert found.reasons == "" and found.cell["valid"] and found.cell["failed"] == 0
    assert found.cell["miss"] == {"15": 0.0, "25": 0.0}


async def test_a_server_that_slows_is_unstable_and_gets_no_percentile(tmp_path: Path) -> None:
    """It serves one request at a time, at a third of the offered rate."""
    turn = asyncio.Lock()

    class OneByOne(MeteredServer):
        async def _completions(self, request: web.Request) -> web.StreamResponse:
            async with turn:
                await asyncio.sleep(3 / RATE)
                return await super()._completions(request)

    found = await measured(tmp_path, OneByOne())
    assert "unstable: the backlog grows by 0." in found.reasons and found.cell["unstable"]
    assert found.cell["failed"] == 0 and found.cell["backlog_slope_rps"] > RATE / 4
    assert found.cell["ttft_s"] == {"p50": None, "p90": None, "p99": None}


async def test_a_server_that_stalls_leaves_censored_requests(tmp_path: Path) -> None:
    """From request 8 on it sends nothing: 33 of 40 wait until the drain limit."""
    found = await measured(
        tmp_path, FakeServer(lambda index, _: Script(hang_after=0 if index >= 8 else -1)), drain_s=0.5
    )
    assert "unstable: 33 of 40 requests unfinished at the drain limit" in found.reasons
    assert (found.cell["censored"], found.cell["failed"]) == (33, 33)
    assert found.cell["miss"]["25"] == 33 / 40  # never dropped
    assert found.cell["ttft_at_least_s"]["p50"] > 0.5


async def test_a_restart_is_seen_in_the_start_time(tmp_path: Path) -> None:
    server = MeteredServer(counters=lambda n: {"process_start_time_seconds": 100.0 if n < 20 else 200.0})
    assert (await measured(tmp_path, server)).reasons == "engine restarted during the cell"


async def test_an_engine_that_dies_in_the_cell_and_stays_away(tmp_path: Path) -> None:
    """A proxy answers in its place from the middle of the cell on: what failed says nothing about this load."""

    class Mortal(MeteredServer):
        async def _metrics(self, request: web.Request) -> web.Response:
            dead = len(self.arrivals_unix_s) > 20
            return web.Response(status=502) if dead else await super()._metrics(request)

    found = await measured(tmp_path, Mortal(lambda index, _: Script(status=200 if index <= 20 else 502)))
    assert found.reasons == "the engine had stopped answering /metrics when the cell ended"
    assert found.cell["failed"] == 20


async def test_prefix_hits(tmp_path: Path) -> None:
    server = MeteredServer(counters=lambda n: {"vllm:prefix_cache_hits_total": 16.0 * (n > 20)})
    assert (await measured(tmp_path, server)).reasons == "prefix cache hits rose by 16 tokens"


async def test_prefix_hits_belong_to_a_shared_prefix_workload(tmp_path: Path) -> None:
    trace = make_shared_prefix(
        requests=40, shared_tokens=19, own_tokens=1, output_tokens=2, prefixes=1, cohort_size=5,
        arrivals="constant", seed=1, vocab_size=100,
    )  # fmt: skip
    server = MeteredServer(counters=lambda n: {"vllm:prefix_cache_hits_total": 16.0 * (n > 20)})
    found = await measured(tmp_path, server, trace)
    assert found.reasons == "" and found.cell["metrics"]["prefix_hits_delta"] == 16


async def test_miscounted_prompts(tmp_path: Path) -> None:
    server = FakeServer(lambda index, _: Script(extra_prompt_tokens=int(index == 5)))
    found = await measured(tmp_path, server)
    assert "server counted other prompt tokens in 1 requests (r0004:" in found.reasons


@pytest.mark.parametrize("declared", [True, False])
async def test_preemptions_matter_only_where_none_were_declared(tmp_path: Path, declared: bool) -> None:
    server = MeteredServer(counters=lambda n: {"vllm:num_preemptions_total": 3.0 * (n > 20)})
    found = await measured(tmp_path, server, no_preemption=declared)
    assert found.cell["metrics"]["preemptions_delta"] == 3  # reported in any case
    assert found.reasons == ("3 preemptions in a run declared --no-preemption" if declared else "")


async def test_dropped_connections_are_misses(tmp_path: Path) -> None:
    """Every fourth answer is cut after its first token: a TTFT was seen, and is not counted."""
    server = FakeServer(lambda index, _: Script(cut_after=1 if index % 4 == 0 else -1, gap_s=0.01))
    found = await measured(tmp_path, server)
    assert found.reasons == "" and found.cell["failed"] == 10
    assert found.cell["miss"] == {"15": 0.25, "25": 0.25}
    assert {r.status for r in found.records if r.status != "ok"} == {"stream_error"}
    assert all(r.first_token_s is not None for r in found.records)


async def test_garbage_is_a_failure(tmp_path: Path) -> None:
    server = FakeServer(lambda index, _: Script(first_event="<html>" if index == 9 else ""))
    found = await measured(tmp_path, server)
    (broken,) = [r for r in found.records if r.status != "ok"]
    assert broken.status == "stream_error" and found.cell["miss"]["15"] == 1 / 40


async def test_a_role_only_chunk_is_no_first_token(tmp_path: Path) -> None:
    """The role comes at once, the token 0.3 s later."""
    found = await measured(tmp_path, FakeServer(Script(role_chunk=True, delay_s=0.3)))
    assert found.cell["ttft_s"]["p50"] >= 0.3


async def test_a_late_client_is_found_by_its_own_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something stops the client's event loop for 200 ms in the middle of the cell."""
    monkeypatch.undo()  # here it is not trusted
    server = FakeServer(lambda index, _: (time.sleep(0.2) if index == 20 else None) or Script())
    found = await measured_once(tmp_path, server)  # the server shares the client's loop
    assert "client slip p99" in found.reasons


async def test_an_engine_with_other_flags_is_not_the_same_arm(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",), shared_cores=True), TRACE)
    async with FakeServer() as server:
        target = Target("a", server.url, "fake")
        for rate, flags in ((RATE, ["--x", "1"]), (2 * RATE, ["--x", "2"])):
            run = await run_cell(target, TRACE, spec(rate))
            engine = {"argv": ["serve", "--port", str(rate), *flags], "log": f"{rate}"}
            key = CellKey("a", rate, 0)
            store.write_cell(key, run, trace_sha256=TRACE.sha256, cache_salt="s", engine=engine)
    cells = build_summary(store.manifest, list(store.cells()))["arms"][0]["cells"]
    assert [cell["invalid_reasons"] for cell in cells] == [
        [],
        ["engine changed: argv differ from the arm's first cell"],
    ]


@pytest.mark.parametrize("name", ["parquet", "json"])
async def test_a_full_disk_ends_the_run_in_one_line_and_loses_nothing(tmp_path: Path, name: str) -> None:
    """The kernel answers every write to /dev/full with ENOSPC."""
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)
    second = CellKey("a", 2 * RATE, 0)
    (tmp_path / "run" / "cells" / f"{second}.{name}.{os.getpid()}.tmp").symlink_to("/dev/full")
    async with FakeServer() as server:
        with pytest.raises(UserError, match=r"cannot write .*a_q120_r0.*No space left.*free some"):
            await measure(store, [Target("a", server.url, "fake")], TRACE, Plan((RATE, 2 * RATE)))
    (kept,) = RunStore.open(tmp_path / "run").cells()
    assert kept.key == replace(second, offered_qps=RATE) and len(kept.records) == 40
