# SPDX-License-Identifier: Apache-2.0
"""Long prompts of a resident run: what is asked, timed and said of them."""

import asyncio
import importlib
import json
import sys
import time
from pathlib import Path
from statistics import median

import pytest
from aiohttp import web
from commands import arguments
from fake_server import FakeServer, Script

from harness.cli import main
from harness.engines.process import free_port
from harness.errors import UserError
from harness.load import Target
from harness.long_context import Answer, Question, paired_text, question, session, stream, while_all_decode
from harness.resident_long import idle_text
from harness.trace import load_trace


def test_the_longest_prompt_warms_every_arm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    async def answer(client: object, question: Question) -> Answer:
        asked.append((question.target.name, question.prompt_tokens))
        return Answer(0.0, (1.0, 2.0))

    monkeypatch.setattr("harness.long_context.stream", answer)
    out = tmp_path / "run"
    assert main(arguments(out, "--resident", "--budget", "0.002")) == 0
    longest = max(request.prompt_tokens for request in load_trace(out / "trace.jsonl.gz").requests)
    assert sorted(asked) == [("dcp2", longest), ("tp2", longest)]


def test_paired_text_needs_six_pairs_for_an_interval() -> None:
    times = {"a": {"ttft_s": [1.0, 2.0, 3.0]}, "b": {"ttft_s": [0.9, 1.8, 2.9]}}
    assert paired_text("a", "b", times) == "b - a -0.1000 s (n = 3, no interval)"
    times = {"a": {"ttft_s": [1.0] * 6}, "b": {"ttft_s": [1.1, 1.2, 1.3, 1.4, 1.5, 1.6]}}
    assert paired_text("a", "b", times) == (
        "b - a +0.3500 s (95 % +0.1000 to +0.6000 over prompts, of these launches alone)"
    )


async def test_servers_that_run_already_are_asked_in_turns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """benchmarks/long_context.py, which starts no engines."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    benchmark = importlib.import_module("long_context")
    kept = tmp_path / "times.json"
    small = f"--tokens 60 --contexts 2 --chunk-tokens 60 --repeats 6 --json {kept}".split()
    async with FakeServer() as fast, FakeServer(Script(delay_s=0.4)) as slow, FakeServer() as third:
        servers = {"tp2": fast, "dcp2": slow, "dcp2-stock": third}
        arms = [word for name, server in servers.items() for word in ("--arm", f"{name}={server.url}")]
        monkeypatch.setattr(sys, "argv", ["long_context.py", *arms, *small])
        await asyncio.to_thread(benchmark.main)
        lengths = [len(body["prompt"]) for body in slow.bodies]
        came = sorted(
            (at_s, name) for name, server in servers.items() for at_s in server.arrivals_unix_s[1:7]
        )
    assert lengths == [10, *[60] * 8]  # the one that compiles, six alone, two at once
    times = json.loads(kept.read_text())
    assert [name for _, name in came] == [*servers, *reversed(servers)] * 3
    assert min(times["lone"]["dcp2"]["ttft_s"]) > 0.4 > median(times["lone"]["tp2"]["ttft_s"])
    assert len(times["together"]["arms"]["dcp2"]["ttft_s"]) == 2
    printed = capsys.readouterr().out
    pairs = [line.split(" (")[0].rsplit(maxsplit=2)[0] for line in printed.splitlines()[-3:]]
    assert pairs == ["dcp2 - tp2", "dcp2-stock - tp2", "dcp2-stock - dcp2"]
    monkeypatch.setattr(sys, "argv", ["long_context.py", "--read", str(kept)])
    benchmark.main()
    assert capsys.readouterr().out == printed
    kept.write_text(json.dumps({"together": times["together"]}))
    benchmark.main()
    assert capsys.readouterr().out.startswith("tp2: 2 contexts at once, ")
    kept.write_text("{}")
    with pytest.raises(SystemExit, match="holds neither lone prompts nor contexts at once"):
        benchmark.main()


def test_idle_engines_beside_get_no_verdict_from_three_prompts() -> None:
    beside = {"ttft_s": [1.02, 1.0, 1.1], "tpot_ms": [5.0, 5.0, 5.0]}
    without = {"ttft_s": [1.0, 0.9, 1.2], "tpot_ms": [4.0, 5.0, 6.0]}
    assert idle_text("tp2", ["dcp2"], beside, without) == (
        "Idle engines beside (dcp2) changed tp2's P50 TTFT of lone prompts by +2.00% and its time between tokens by"
        " +0.00% (n = 3, no interval)."
    )


def test_time_between_tokens_while_all_contexts_decode() -> None:
    """By hand: both decode from 10 to 12; the first one's slow steps before, and the second's fast ones after, are
    not counted."""
    first = Answer(0.0, (1.0, 4.0, 7.0, 10.0, 11.0, 12.0))
    second = Answer(0.0, (10.0, 11.0, 12.0, 12.1, 12.2))
    assert while_all_decode([first, second]) == {"tpot_ms": 1000.0, "gaps": 4}
    assert second.ttft_s == 10.0 and first.gaps_s() == [3.0, 3.0, 3.0, 1.0, 1.0]
    late = Answer(0.0, (13.0, 14.0))
    assert while_all_decode([first, late]) == {"tpot_ms": None, "gaps": 0}


async def test_no_time_goes_into_encoding_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock starts behind it."""

    async def answers(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        assert asked["max_tokens"] in (4, 5) and asked["ignore_eos"] and len(asked["prompt"]) == 9
        response = web.StreamResponse()
        await response.prepare(request)
        for count in (1, 3, 4, 4):  # two tokens in one chunk; the last chunk only sums up
            await response.write(b'data: {"usage": {"completion_tokens": %d}}\n\n' % count)
        return response

    encoded_s = []

    def encode(body: object) -> bytes:
        text = json.dumps(body).encode()
        encoded_s.append(time.monotonic())
        return text

    monkeypatch.setattr("harness.long_context.orjson.dumps", encode)
    app = web.Application()
    app.router.add_post("/v1/completions", answers)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        target = Target("tp2", f"http://127.0.0.1:{port}", "m")
        async with session() as client:
            answer = await stream(client, question(target, [7] * 9, 4))
            assert len(answer.token_s) == 4 and answer.sent_s >= encoded_s[-1]
            assert answer.token_s[1] == answer.token_s[2]
            with pytest.raises(UserError, match="arm tp2: 4 tokens instead of 5"):
                await stream(client, question(target, [7] * 9, 5))
    finally:
        await runner.cleanup()
