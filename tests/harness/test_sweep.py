# SPDX-License-Identifier: Apache-2.0
import asyncio
import io
import json
from pathlib import Path

import pytest
from aiohttp import web
from builders import manifest, small_trace
from fake_server import FakeServer, Script

from harness import sweep
from harness.client import Target
from harness.engines.endpoint import describe_server
from harness.errors import UserError
from harness.load import Progress
from harness.progress import JsonEvents, ProgressLine
from harness.report import build_summary
from harness.store import CellKey, RunStore
from harness.sweep import TRIES, Plan, Position, cell_order, measure
from harness.validity import engine_changes, lasting_environment

TRACE = small_trace(requests=3)
pytestmark = pytest.mark.usefixtures("client_is_trusted")


def test_order_alternates_the_arms() -> None:
    order = cell_order(Plan((0.5, 1.0), repeats=2), ["a", "b"])
    assert [(key.offered_qps, key.repeat, key.arm) for key in order] == [
        (0.5, 0, "a"),
        (0.5, 0, "b"),
        (0.5, 1, "b"),
        (0.5, 1, "a"),
        (1.0, 0, "b"),
        (1.0, 0, "a"),
        (1.0, 1, "a"),
        (1.0, 1, "b"),
    ]


async def test_every_cell_has_its_own_salt_and_warm_up_is_not_of_the_trace(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)
    async with FakeServer() as server:
        target = Target("a", server.url, "fake")
        assert await measure(
            store, [target], TRACE, Plan((50.0, 100.0), repeats=2), engines={"a": {"pid": 1}}
        )
    warm_up, *timed = server.bodies
    prompts = [list(request.prompt) for request in TRACE.requests]
    assert warm_up["prompt"] not in prompts
    assert len(warm_up["prompt"]) == max(map(len, prompts))
    assert [body["prompt"] for body in timed] == prompts * 4
    salts = [body["cache_salt"] for body in server.bodies]
    assert len(set(salts)) == 5
    cells = list(store.cells())
    assert [str(cell.key) for cell in cells] == ["a_q50_r0", "a_q50_r1", "a_q100_r0", "a_q100_r1"]
    assert {cell.facts["cache_salt"] for cell in cells} == set(salts[1:])
    assert {cell.facts["trace_sha256"] for cell in cells} == {TRACE.sha256}
    assert all(cell.facts["engine"] == {"pid": 1} for cell in cells)


async def test_servers_of_others_are_asked_what_they_are_before_each_cell(tmp_path: Path) -> None:
    """A restart shows in the process's start time: then its cells belong to two launches."""
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)

    async def describe(_: Target, known: object) -> dict[str, object]:
        launch = 1 + len(list(store.cells()))
        server.metrics = f"process_start_time_seconds {launch}\n"
        return {"digest": f"sha256:{launch}"}

    async with FakeServer() as server:
        target = Target("a", server.url, "fake")
        await measure(store, [target], TRACE, Plan((50.0,), repeats=2), describe=describe)
    cells = list(store.cells())
    assert [cell.facts["engine"] for cell in cells] == [{"digest": "sha256:1"}, {"digest": "sha256:2"}]
    assert [cell.facts["launch"] for cell in cells] == [None, None]
    (arm,) = build_summary(store.manifest, cells)["arms"]
    assert arm["launches"] == 2
    assert [cell["launch"] for cell in arm["cells"]] == ["1.0", "2.0"]
    assert "engine changed: digest differ" in arm["cells"][1]["invalid_reasons"][0]


async def test_a_cell_of_another_engine_does_not_pass(tmp_path: Path) -> None:
    """The course judges as the report does: it searches below the first rate that was measured of the other one."""
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",), shared_cores=True), TRACE)

    async def describe(_: Target, known: object) -> dict[str, object]:
        return {"digest": "after" if list(store.cells()) else "before"}

    async with FakeServer() as server:
        plan = Plan((50.0, 100.0), grid_qps=25.0)
        await measure(store, [Target("a", server.url, "fake")], TRACE, plan, describe=describe)
    assert [cell.key.offered_qps for cell in store.cells()] == [50.0, 75.0, 100.0]


async def test_an_unanswered_question_is_no_other_engine(tmp_path: Path) -> None:
    """One /metrics is refused before the first cell; two when the sweep is resumed."""

    class Server(FakeServer):
        asked = 0
        refused: tuple[int, ...] = (4,)

        async def _metrics(self, request: web.Request) -> web.Response:
            self.asked += 1
            return web.Response(status=503) if self.asked in self.refused else await super()._metrics(request)

    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",), shared_cores=True), TRACE)
    async with Server(metrics='vllm:cache_config_info{block_size="16"} 1.0\n') as server:
        target = Target("a", server.url, "fake")
        for rates in ((50.0, 100.0), (50.0, 100.0, 120.0)):
            engines = {"a": await describe_server(target)}
            assert await measure(
                store, [target], TRACE, Plan(rates), engines=engines, describe=describe_server
            )
            server.asked, server.refused = 0, (1, 2)
    cells = list(store.cells())
    assert len(cells) == 3 and len({cell.facts["identity"] for cell in cells}) == 1


async def test_a_server_started_anew_between_two_cells_is_warmed_up_again(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)

    async def describe(_: Target, known: object) -> dict[str, object]:
        server.metrics = f"process_start_time_seconds {100 + (len(server.bodies) > 1)}\n"
        return {}

    async with FakeServer(metrics="process_start_time_seconds 100\n") as server:
        plan = Plan((50.0,), repeats=3)  # asked before the second cell, it says 101, as before the third
        await measure(store, [Target("a", server.url, "fake")], TRACE, plan, describe=describe)
    prompts = [list(request.prompt) for request in TRACE.requests]
    assert [body["prompt"] in prompts for body in server.bodies] == [False, *[True] * 6, False, *[True] * 3]


async def test_metrics_behind_an_api_key(tmp_path: Path) -> None:
    class Guarded(FakeServer):
        async def _metrics(self, request: web.Request) -> web.Response:
            allowed = request.headers.get("Authorization") == "Bearer secret"
            return await super()._metrics(request) if allowed else web.Response(status=401)

    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)
    async with Guarded(metrics="vllm:num_requests_running 0\n") as server:
        await measure(store, [Target("a", server.url, "fake", api_key="secret")], TRACE, Plan((50.0,)))
    (arm,) = build_summary(store.manifest, list(store.cells()))["arms"]
    assert arm["cells"][0]["unchecked"] == [] and arm["cells"][0]["metrics"]["requests_before"] == 0


async def test_a_cell_that_begins_in_a_busy_engine_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "IDLE_WAIT_S", 0.1)
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)
    busy = "vllm:num_requests_running 5\nvllm:num_requests_waiting 40\n"
    async with FakeServer(metrics=busy) as server:
        await measure(store, [Target("a", server.url, "fake")], TRACE, Plan((50.0,)))
    (arm,) = build_summary(store.manifest, list(store.cells()))["arms"]
    assert "45 requests were in the engine before the cell began" in arm["cells"][0]["invalid_reasons"]


async def test_a_refusing_server_ends_the_sweep_and_its_cell_is_kept(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)
    async with FakeServer(lambda index, _: Script(status=404, body="gone") if index else Script()) as server:
        with pytest.raises(UserError, match=r"arm a .* HTTP 404: gone"):
            await measure(store, [Target("a", server.url, "fake")], TRACE, Plan((50.0, 100.0)))
    assert [cell.facts["aborted"] for cell in store.cells()] == [True]


async def test_a_refused_warm_up_measures_nothing(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)
    async with FakeServer(Script(status=400, body="unknown field cache_salt")) as server:
        with pytest.raises(UserError, match="unknown field cache_salt"):
            await measure(store, [Target("a", server.url, "fake")], TRACE, Plan((50.0,)))
    assert list(store.cells()) == []


async def test_stop_during_warm_up(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)
    stop = asyncio.Event()

    def hang(_index: int, _body: object) -> Script:
        stop.set()
        return Script(hang_after=0)

    async with FakeServer(hang) as server:
        assert not await measure(store, [Target("a", server.url, "fake")], TRACE, Plan((50.0,)), stop=stop)
    assert list(store.cells()) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_line() -> None:
    position = Position(CellKey("tp2", 0.9, 0), 3, 8)
    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        with ProgressLine(stream) as show:
            show(position, Progress(12, 4, 8, 0, 24))
            show(position, Progress(13, 4, 9, 1, 24))  # within five seconds: only a terminal shows it
    line = "cell 3/8 tp2 @ 0.9 QPS  sent 12 running 4 done 8/24  0:00 left"
    assert plain.getvalue() == line + "\n"
    assert terminal.getvalue().startswith(f"\r\x1b[K{line}\r\x1b[K")
    assert terminal.getvalue().endswith("done 9/24  failed 1  0:00 left\n")


async def test_two_runs_share_no_salt(tmp_path: Path) -> None:
    """Else the second run against one server would find the first one's prefixes in its cache."""
    async with FakeServer() as server:
        for name in ("one", "two"):
            store = RunStore.create(tmp_path / name, manifest(TRACE, ("a",)), TRACE)
            await measure(store, [Target("a", server.url, "fake")], TRACE, Plan((50.0,)))
    salts = [body["cache_salt"] for body in server.bodies]
    assert len(set(salts)) == 4  # warm-up and cell, twice


async def test_a_sweep_goes_on_and_never_mixes_engines(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)
    engine = {"a": {"digest": "sha256:1", "flags": ["--tp", "2"], "log": "one.log"}}
    async with FakeServer() as server:
        target = Target("a", server.url, "fake")
        await measure(store, [target], TRACE, Plan((50.0,)), engines=engine)
        first = store.cell(CellKey("a", 50.0, 0)).facts
        again = {"a": {**engine["a"], "log": "two.log"}}  # where the log lies makes it no other engine
        await measure(store, [target], TRACE, Plan((50.0, 100.0)), engines=again)
        assert store.cell(CellKey("a", 50.0, 0)).facts == first
        assert [str(cell.key) for cell in store.cells()] == ["a_q50_r0", "a_q100_r0"]
        for changed in (
            {"digest": "sha256:2"},
            {"flags": ["--tp", "4"]},
            {"packages": {"plugin": "other code"}},
            {"environment": {"KIMI_K3_PREFILL_KV": "stock"}},
        ):
            with pytest.raises(UserError, match="cells are never mixed"):
                await measure(
                    store,
                    [target],
                    TRACE,
                    Plan((200.0,)),
                    engines={"a": {**engine["a"], **changed}},
                )


def test_an_environment_is_told_without_folders() -> None:
    """A timing switch makes it another engine, wherever its times are written."""
    here = {"KIMI_K3_PROOF_DIR": "one/proof", "KIMI_K3_PREFILL_KV": "peer"}
    timed = here | {"KIMI_K3_TIME_PREFILL_CONTEXT": "/tmp/one"}
    assert lasting_environment(here) == {"KIMI_K3_PREFILL_KV": "peer"}
    assert lasting_environment(here) == lasting_environment(here | {"KIMI_K3_PROOF_DIR": "two/proof"})
    assert lasting_environment(timed) == lasting_environment(timed | {"KIMI_K3_TIME_PREFILL_CONTEXT": "/two"})
    assert lasting_environment(timed) != lasting_environment(here)


def test_other_code_of_the_harness_is_another_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sweep.identity({}, "trace")
    monkeypatch.setattr(sweep, "code_sha256", lambda: "other")
    assert sweep.identity({}, "trace") != before


@pytest.mark.parametrize("port", [["--port", "{}"], ["--port={}"]])
async def test_a_sweep_goes_on_at_another_port(tmp_path: Path, port: list[str]) -> None:
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)
    async with FakeServer() as server:
        for number, plan in ((8000, Plan((50.0,))), (8001, Plan((50.0, 100.0)))):
            words = [
                "serve",
                *(word.format(number) for word in port),
                "--proof-dir",
                f"/p/{number}",
                "--tp",
                "2",
            ]
            engine = {"a": {"argv": words, "flags": words}}
            assert await measure(store, [Target("a", server.url, "fake")], TRACE, plan, engines=engine)
    cells = list(store.cells())
    assert len(cells) == 2 and len({cell.facts["identity"] for cell in cells}) == 1
    assert engine_changes([cell.facts["engine"] for cell in cells]) == [None, None]


async def test_a_spoiled_cell_is_measured_again_by_each_resumption(tmp_path: Path) -> None:
    """At both rates the client was late; at 100 the engine did not keep up either, which would not change."""
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",), shared_cores=True), TRACE)
    first, second = CellKey("a", 50.0, 0), CellKey("a", 100.0, 0)

    def verdicts() -> list[bool]:
        (arm,) = build_summary(store.manifest, list(store.cells()))["arms"]
        return [cell["valid"] for cell in arm["cells"][:2]]

    def kept_aside() -> list[str]:
        return sorted(path.name for path in (store.path / "set_aside").glob("*.json"))

    async with FakeServer(lambda index, _: Script(hang_after=0 if index == 6 else -1)) as server:
        target, plan = Target("a", server.url, "fake"), Plan((50.0, 100.0), drain_timeout_s=1.0)
        assert await measure(store, [target], TRACE, plan)
        spoil(store, first)
        spoil(store, second)
        assert await measure(store, [target], TRACE, plan)  # nobody resumed
        assert await measure(store, [target], TRACE, Plan((200.0,)), resumed=True)  # neither rate
        with pytest.raises(UserError, match="cells are never mixed"):
            await measure(store, [target], TRACE, plan, engines={"a": {"digest": "another"}}, resumed=True)
        assert verdicts() == [False, False] and kept_aside() == []
        assert await measure(store, [target], TRACE, plan, resumed=True)
        assert verdicts() == [True, False] and kept_aside() == ["a_q50_r0-1.json"]
        for _ in range(TRIES):
            spoil(store, first)
            assert await measure(store, [target], TRACE, plan, resumed=True)
    assert verdicts() == [False, False]
    assert kept_aside() == [f"a_q50_r0-{number}.json" for number in range(1, TRIES + 1)]
    (note,) = build_summary(store.manifest, list(store.cells()))["notes"]
    assert note.startswith("3 cells were set aside (set_aside/) and measured again: a late client")


def spoil(store: RunStore, key: CellKey) -> None:
    """As if the client's loop had stood still for a quarter of an hour."""
    path = store.path / "cells" / f"{key}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"loop_lag_ms": {"p99": 1e6}}))


async def test_an_aborted_cell_is_measured_again(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)
    stop = asyncio.Event()

    def hang(index: int, _body: object) -> Script:
        if index == 2:
            stop.set()
        return Script()

    async with FakeServer(hang) as server:
        target = Target("a", server.url, "fake")
        assert not await measure(store, [target], TRACE, Plan((5.0,)), stop=stop)
        assert store.cell(CellKey("a", 5.0, 0)).facts["aborted"]
        assert await measure(store, [target], TRACE, Plan((5.0,)))
    assert not store.cell(CellKey("a", 5.0, 0)).facts["aborted"]


async def test_a_budget_knows_the_tails_of_earlier_sessions(tmp_path: Path) -> None:
    """The first guess of a tail, 10 s, would not fit into 5 s; the measured one does."""
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)
    async with FakeServer() as server:
        target = Target("a", server.url, "fake")
        assert not await measure(store, [target], TRACE, Plan((50.0,), budget_s=5.0))
        assert await measure(store, [target], TRACE, Plan((50.0,)))
        assert await measure(store, [target], TRACE, Plan((50.0, 100.0), budget_s=5.0))


async def test_a_budget_starts_no_cell_that_would_not_end(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", manifest(TRACE, ("a",)), TRACE)
    async with FakeServer() as server:
        plan = Plan((50.0, 0.001), budget_s=60.0)
        assert not await measure(store, [Target("a", server.url, "fake")], TRACE, plan)
    assert [str(cell.key) for cell in store.cells()] == ["a_q50_r0"]


def test_events_for_programs() -> None:
    stream = io.StringIO()
    with JsonEvents(stream) as show:
        show(Position(CellKey("tp2", 0.9, 0), 3, 8), Progress(12, 4, 8, 0, 24, 0.5, 3.0))
        show(Position(CellKey("tp2", 0.9, 0), 3, 8), Progress(24, 0, 24, 0, 24, 0.5, ended=True))
        show.tell("done", cells=8)
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["progress", "cell", "done"]
    assert (events[0]["arm"], events[0]["sent"], events[0]["ttft_p50_s"]) == ("tp2", 12, 0.5)
