# SPDX-License-Identifier: Apache-2.0
"""One request against a real server: what becomes of it, and which points of its timeline are reached."""

import socket
from dataclasses import replace
from typing import Any

import pytest
from builders import small_trace, spec
from fake_server import FakeServer, Script

from harness.client import RequestRecord, Target, encode_body
from harness.load import run_cell

pytestmark = pytest.mark.usefixtures("connects_at_once")
TRACE = small_trace(requests=1)
REQUEST = TRACE.requests[0]


async def send_one(script: Script, *, extensions: bool = True, **limits: Any) -> RequestRecord:
    async with FakeServer(script) as server:
        target = Target("arm", server.url, "fake", extensions=extensions)
        return (await run_cell(target, TRACE, spec(**limits))).records[0]


def reached(record: RequestRecord) -> list[str]:
    """The points of the timeline that were reached; asserts that they are in order."""
    names = ["connected_s", "due_s", "dispatched_s", "sent_s", "first_byte_s", "first_token_s", "done_s"]
    times = [(name, getattr(record, name)) for name in names if getattr(record, name) is not None]
    assert [time for _, time in times] == sorted(time for _, time in times)
    return [name.removesuffix("_s") for name, _ in times]


ALL = ["connected", "due", "dispatched", "sent", "first_byte", "first_token", "done"]


async def test_a_whole_timeline() -> None:
    record = await send_one(Script(gap_s=0.005))
    assert (record.status, record.error, record.http_status) == ("ok", None, 200)
    assert reached(record) == ALL
    assert record.token_counts == [1, 2, 3, 4]
    assert record.token_s == sorted(record.token_s)
    assert record.first_token_s == record.token_s[0]
    assert (record.completion_tokens, record.finish_reason) == (4, "length")
    assert record.server_prompt_tokens == record.prompt_tokens == len(REQUEST.prompt)
    assert not record.connection_reused


@pytest.mark.parametrize(
    "server", [Script(role_chunk=True), Script(role_chunk=True, continuous_usage=False, text="x")]
)
async def test_a_role_chunk_is_no_token(server: Script) -> None:
    """The role chunk comes, and then either nothing more or the tokens."""
    silent = await send_one(replace(server, hang_after=0), request_timeout_s=1.0)
    assert reached(silent) == ["connected", "due", "dispatched", "sent", "first_byte", "done"]
    assert (silent.status, silent.completion_tokens, silent.server_prompt_tokens) == (
        "timeout",
        0,
        len(REQUEST.prompt) if server.continuous_usage else None,
    )
    assert (await send_one(server)).token_counts == [1, 2, 3, 4]


async def test_a_usage_only_chunk_is_no_token() -> None:
    record = await send_one(Script(continuous_usage=False))  # chunks of empty text, the total at the end
    assert record.completion_tokens == 4
    assert record.token_s == []
    assert record.first_token_s is None


async def test_an_error_inside_the_stream() -> None:
    record = await send_one(Script(error_after=2))
    assert (record.status, record.error) == ("stream_error", "engine died")
    assert record.token_counts == [1, 2]
    assert reached(record) == ALL


@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_connection_cut_mid_stream(tokens: int) -> None:
    record = await send_one(Script(cut_after=tokens, delay_s=0.02, gap_s=0.02))
    assert record.status == "stream_error"
    assert record.error
    assert record.token_counts == [1, 2][:tokens]
    assert record.done_s is not None


async def test_a_stream_that_ends_without_done() -> None:
    record = await send_one(Script(done=False))
    assert (record.status, record.error) == ("incomplete", "the stream ended without [DONE]")


async def test_fewer_tokens_than_asked_for() -> None:
    record = await send_one(Script(missing_tokens=1))
    assert (record.status, record.error) == ("incomplete", "3 of 4 completion tokens arrived")
    plain = await send_one(
        Script(missing_tokens=1), extensions=False
    )  # such a server may stop where it likes
    assert plain.status == "ok"


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_an_http_error_keeps_the_body(status: int) -> None:
    record = await send_one(Script(status=status, body='{"error": "prompt\n too long"}' + "x" * 500))
    assert (record.status, record.http_status) == ("http_error", status)
    assert record.error is not None
    assert record.error.startswith(f'HTTP {status}: {{"error": "prompt too long"}}x')
    assert len(record.error) == 200
    assert reached(record) == ["connected", "due", "dispatched", "sent", "first_byte", "done"]


async def test_connection_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        target = Target("arm", f"http://127.0.0.1:{taken.getsockname()[1]}", "fake")
        record = (await run_cell(target, TRACE, spec())).records[0]
    assert record.status == "connect_error"
    assert reached(record) == ["due", "dispatched", "done"]


@pytest.mark.parametrize(("script", "tokens"), [(Script(delay_s=60), 0), (Script(hang_after=2), 2)])
async def test_a_timeout_keeps_what_came(script: Script, tokens: int) -> None:
    record = await send_one(script, request_timeout_s=1.0)
    assert (record.status, len(record.token_s)) == ("timeout", tokens)
    assert record.error == "not finished 1 s after it was due"


@pytest.mark.parametrize(
    "event", ["nonsense", "[]", "17", '{"choices": [17]}', '{"usage": {"completion_tokens": "x"}}']
)
async def test_what_is_no_completion_is_a_stream_error(event: str) -> None:
    record = await send_one(Script(first_event=event))
    assert record.status == "stream_error"
    assert record.error is not None and event in record.error


async def test_what_the_server_is_sent() -> None:
    async with FakeServer() as server:
        await run_cell(Target("arm", server.url, "fake", api_key="secret"), TRACE, spec(cache_salt="s1"))
        await run_cell(Target("arm", server.url, "fake", extensions=False), TRACE, spec())
    full, plain = server.bodies
    assert full == {
        "model": "fake",
        "prompt": list(REQUEST.prompt),
        "max_tokens": 4,
        "min_tokens": 4,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "cache_salt": "s1",
    }
    assert full.keys() - plain.keys() == {"min_tokens", "ignore_eos", "cache_salt"}
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "Authorization" not in server.headers[1]
    assert server.headers[0]["Content-Type"] == "application/json"


def test_the_key_is_in_no_representation() -> None:
    target = Target("arm", "http://h", "m", api_key="secret")
    assert "secret" not in repr(target)
    assert b"secret" not in encode_body(target, REQUEST, "salt")
