# SPDX-License-Identifier: Apache-2.0
"""The open loop against a real server."""

import asyncio
import gc
import math
from itertools import pairwise

import pytest
from builders import record, small_trace, spec
from fake_server import FakeServer, Script

from harness.client import Target
from harness.load import AHEAD_S, OPEN_S, Progress, _events, refusal, run_cell


def target(server: FakeServer) -> Target:
    return Target("arm", server.url, "fake")


async def test_the_server_sees_each_request_within_its_recorded_timeline() -> None:
    trace = small_trace(requests=30, arrivals="poisson")
    async with FakeServer() as server:
        run = await run_cell(target(server), trace, spec(40.0))
    assert [r.id for r in run.records] == [request.id for request in trace.requests]
    assert [r.due_s for r in run.records] == [request.arrival / 40.0 for request in trace.requests]
    assert all(r.status == "ok" for r in run.records)
    by_prompt = dict(zip((request.prompt for request in trace.requests), run.records, strict=True))
    assert len(by_prompt) == 30
    for body, arrived_unix_s in zip(server.bodies, server.arrivals_unix_s, strict=True):
        seen = by_prompt[tuple(body["prompt"])]
        arrived_s = arrived_unix_s - run.started_unix_s
        assert seen.dispatched_s is not None and seen.first_byte_s is not None
        assert seen.due_s <= seen.dispatched_s
        assert seen.dispatched_s - 0.002 <= arrived_s <= seen.first_byte_s + 0.002  # two clocks


async def test_requests_arrive_in_the_order_of_the_trace() -> None:
    trace = small_trace(requests=20)
    async with FakeServer() as server:
        await run_cell(target(server), trace, spec(25.0))
    assert [tuple(body["prompt"]) for body in server.bodies] == [request.prompt for request in trace.requests]


@pytest.mark.parametrize("rate", [100.0, math.inf])
async def test_a_stalled_server_does_not_delay_later_requests(rate: float) -> None:
    """No request is answered before the last one has arrived: a closed loop would wait for ever."""
    trace = small_trace(requests=100)
    gate = asyncio.Event()

    def answer(index: int, _: object) -> Script:
        if index == 99:
            gate.set()
        return Script(gate=gate)

    async with FakeServer(answer) as server:
        run = await run_cell(target(server), trace, spec(rate))
    assert all(r.status == "ok" for r in run.records)
    assert max(r.dispatched_s or 0 for r in run.records) < min(r.first_token_s or 0 for r in run.records)


async def test_each_request_has_a_connection_of_its_own() -> None:
    async with FakeServer() as server:
        run = await run_cell(target(server), small_trace(), spec())
    assert not any(r.connection_reused for r in run.records)
    assert all(h.get("Connection") == "close" for h in server.headers)


@pytest.mark.parametrize(
    "due", [[0.0, 0.2, 0.4, 0.6], [0.0, 0.1, 5.0, 5.3, 5.4], [0.0] * 4, [0.0, 0.25, 1.5]]
)
def test_connections_are_opened_in_time_and_while_the_client_is_awake(due: list[float]) -> None:
    events = _events(due)
    assert [index for _, index, opens in events if not opens] == list(range(len(due)))
    for at_s, index, opens in events:
        assert due[index] - OPEN_S <= at_s <= due[index] - AHEAD_S + 1e-9 if opens else at_s == due[index]
        window = [d for d in due if due[index] - OPEN_S <= d <= due[index] - AHEAD_S]
        assert not opens or at_s in window or not window  # no wake of its own


async def test_what_is_left_at_the_drain_limit_is_cancelled() -> None:
    async with FakeServer(lambda index, _: Script(hang_after=2) if index == 5 else Script()) as server:
        run = await run_cell(target(server), small_trace(), spec(drain_timeout_s=1.5))
    assert not run.aborted
    assert [r.status for r in run.records] == ["ok"] * 5 + ["cancelled"]
    assert run.records[5].token_counts == [1, 2]


async def test_stop_keeps_what_was_measured() -> None:
    stop = asyncio.Event()

    def stop_after_two(progress: Progress) -> None:
        if progress.done == 2:
            stop.set()

    async with FakeServer(lambda index, _: Script(hang_after=1) if index >= 2 else Script()) as server:
        trace = small_trace(requests=1000)
        run = await run_cell(target(server), trace, spec(20.0), stop=stop, progress=stop_after_two)
    assert run.aborted
    assert len(run.records) == 1000
    assert [r.status for r in run.records] == ["ok"] * 2 + ["cancelled"] * 998
    assert run.records[2].done_s is not None
    assert run.records[999].dispatched_s is None


async def test_a_redirection_says_where_to() -> None:
    moved = Script(status=307, headers={"Location": "https://other:443/v1"})
    async with FakeServer(moved) as server:
        run = await run_cell(target(server), small_trace(requests=100), spec(20.0))
    assert run.aborted
    assert refusal(run.records) == "HTTP 307: redirected to https://other:443/v1"


async def test_a_cell_that_the_server_refuses_is_stopped() -> None:
    async with FakeServer(Script(status=400, body="no such model")) as server:
        run = await run_cell(target(server), small_trace(requests=1000), spec(20.0))
        assert len(server.arrivals_unix_s) < 100
    assert run.aborted
    assert refusal(run.records) == "HTTP 400: no such model"


async def test_server_errors_do_not_stop_a_cell() -> None:
    async with FakeServer(Script(status=503)) as server:
        run = await run_cell(target(server), small_trace(), spec())
    assert not run.aborted
    assert {r.status for r in run.records} == {"http_error"}


def test_refusal_takes_three() -> None:
    bad = record(status="http_error", http_status=404, error="HTTP 404: x")
    lost = record(status="connect_error", error="refused")
    assert refusal([bad, bad, bad]) == "HTTP 404: x"
    assert refusal([lost, bad, lost, record()]) == "refused"
    assert refusal([bad, record(), bad]) is None
    assert refusal([bad, bad]) is None
    assert refusal([bad], of=1) == "HTTP 404: x"
    assert refusal([]) is None


async def test_progress_ends_with_everything_done() -> None:
    seen: list[Progress] = []
    async with FakeServer(lambda index, _: Script(status=500) if index == 0 else Script()) as server:
        await run_cell(target(server), small_trace(), spec(), progress=seen.append)
    last = seen[-1]
    assert last == Progress(6, 0, 6, 1, 6, last.ttft_p50_s, 0.0)
    assert last.ttft_p50_s is not None and last.ttft_p50_s > 0
    assert all(a.sent <= b.sent for a, b in pairwise(seen))


async def test_the_collector_is_off_during_a_cell_and_on_afterwards() -> None:
    during: list[bool] = []
    async with FakeServer(lambda *_: during.append(gc.isenabled()) or Script()) as server:  # type: ignore[func-returns-value]
        await run_cell(target(server), small_trace(), spec())
    assert during == [False] * 6
    assert gc.isenabled()


async def test_loop_lag_is_sampled() -> None:
    async with FakeServer(Script(delay_s=0.2)) as server:
        run = await run_cell(target(server), small_trace(), spec())
    assert run.loop_lag_s
    assert all(lag >= 0 for lag in run.loop_lag_s)
