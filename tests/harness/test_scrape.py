# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest
from aiohttp import web
from fake_server import FakeServer

from harness import scrape
from harness.client import Target
from harness.scrape import Sample, Scraper, Series, parse_metrics, sample_of, wait_until_idle
from harness.store import summarise_samples

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"b\\", {c}"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0 1700000000000
vllm:num_requests_waiting{engine="0"} 5
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 3.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:num_preemptions_total{engine="0"} 1.0
vllm:prefix_cache_hits_total{engine="0"} 0.0
vllm:prefix_cache_hits_created{engine="0"} 1.7e+09
process_start_time_seconds 1.7e+09
bad line
vllm:num_requests_running{engine="2"} not_a_number
lonely_nan NaN
"""


def test_parse() -> None:
    series = parse_metrics(PAGE)
    assert Series("vllm:num_requests_running", {"engine": "0", "model_name": 'a \\"b\\", {c}'}, 3.0) in series
    assert Series("process_start_time_seconds", {}, 1.7e9) in series
    assert len(series) == 12
    assert [s.name for s in parse_metrics(PAGE, frozenset({"process_start_time_seconds"}))] == [
        "process_start_time_seconds"
    ]


def test_sample_sums_ranks_and_takes_the_fullest_cache() -> None:
    assert sample_of(PAGE, 10.0) == Sample(
        unix_s=10.0,
        running=7.0,
        waiting=5.0,
        waiting_capacity=2.0,
        kv_usage=0.75,
        preemptions_total=1.0,
        prefix_hits_total=0.0,
        process_start_unix_s=1.7e9,
    )
    assert sample_of("", 10.0) == Sample(10.0)


def test_summary_of_samples() -> None:
    samples = [
        Sample(
            0.0, running=1, kv_usage=0.2, prefix_hits_total=5, preemptions_total=1, process_start_unix_s=9
        ),
        Sample(
            1.0,
            running=4,
            waiting_capacity=3,
            kv_usage=0.9,
            prefix_hits_total=5,
            preemptions_total=3,
            process_start_unix_s=9,
        ),
        Sample(
            2.0,
            running=0,
            waiting_capacity=0,
            kv_usage=0.1,
            prefix_hits_total=7,
            preemptions_total=3,
            process_start_unix_s=9,
        ),
    ]
    summary = summarise_samples(samples)
    assert summary == {
        "available": True,
        "requests_before": None,
        "prefix_hits_delta": 2,
        "preemptions_delta": 2,
        "kv_usage_max": 0.9,
        "waiting_max": None,
        "waiting_capacity_max": 3,
        "waiting_capacity_mean": 1.5,
        "running_max": 4,
        "engine_restarted": False,
        "answered_at_end": True,
        "process_start_unix_s": 9,
    }
    assert summarise_samples(samples, ended_unix_s=2.5) == summary | {"answered_at_end": False}
    assert summarise_samples(samples, began_unix_s=0.5)["requests_before"] == samples[0].requests
    assert summarise_samples(samples[1:], began_unix_s=0.5)["requests_before"] is None  # seen too late
    assert summarise_samples([]) == dict.fromkeys(summary) | {
        "available": False,
        "engine_restarted": False,
        "answered_at_end": True,
    }


def test_a_restart_shows_in_the_start_time_or_in_a_counter_that_fell() -> None:
    start = [Sample(0.0, process_start_unix_s=9), Sample(1.0, process_start_unix_s=20)]
    counter = [Sample(0.0, prefix_hits_total=9), Sample(1.0, prefix_hits_total=0)]
    assert summarise_samples(start)["engine_restarted"]
    assert summarise_samples(counter)["engine_restarted"]


async def test_scraper_samples_at_entry_and_exit() -> None:
    async with FakeServer(metrics=PAGE) as server:
        async with Scraper(Target("a", server.url, "m")) as scraper:
            server.metrics = PAGE.replace(
                'prefix_cache_hits_total{engine="0"} 0.0', "prefix_cache_hits_total 8"
            )
        assert [sample.prefix_hits_total for sample in scraper.samples] == [0.0, 8.0]


async def test_a_last_look_that_fails_is_repeated() -> None:
    class Server(FakeServer):
        asked = 0

        async def _metrics(self, request: web.Request) -> web.Response:
            self.asked += 1
            return web.Response(status=503) if self.asked == 2 else await super()._metrics(request)

    async with Server(metrics=PAGE) as server, Scraper(Target("a", server.url, "m")) as scraper:
        pass
    assert len(scraper.samples) == 2 and server.asked == 3


async def test_waits_until_the_engine_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = "vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"
    async with FakeServer(metrics=busy) as server:
        target = Target("a", server.url, "m")
        waiting = asyncio.create_task(wait_until_idle(target, asyncio.Event()))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        server.metrics = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
        await asyncio.wait_for(waiting, 5)

        server.metrics = busy
        await asyncio.wait_for(wait_until_idle(target, asyncio.Event(), limit_s=0.1), 5)
        stop = asyncio.Event()
        monkeypatch.setattr(scrape, "INTERVAL_S", 30.0)  # what follows waits for no look at the server
        waiting = asyncio.create_task(wait_until_idle(target, stop))
        await asyncio.sleep(0.2)
        stop.set()
        await asyncio.wait_for(waiting, 10)

        server.metrics = None
        await asyncio.wait_for(wait_until_idle(target, asyncio.Event()), 10)


async def test_a_server_without_metrics_gives_no_samples() -> None:
    async with FakeServer() as server, Scraper(Target("a", server.url, "m")) as scraper:
        pass
    assert scraper.samples == []
    async with Scraper(Target("a", server.url, "m")) as scraper:  # by now it is gone
        pass
    assert scraper.samples == []
