# SPDX-License-Identifier: Apache-2.0
"""Connections that servers close, refuse, encrypt or answer on in odd ways, with real sockets."""

import asyncio
import json
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from builders import small_trace, spec

from harness import client
from harness.client import CompletionAnswer, RequestRecord, Target
from harness.connection import Connector
from harness.load import run_cell
from harness.outbox import Outbox

TRACE = small_trace(requests=1)
TOKENS = b"".join(
    b'data: {"choices":[{"index":0,"text":"x"}],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n'
    % (len(TRACE.requests[0].prompt), count)
    for count in range(1, 5)
)
STREAM = TOKENS + b"data: [DONE]\n\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
pytestmark = pytest.mark.usefixtures("connects_at_once")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler, **arguments: Any) -> AsyncIterator[str]:
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(reader, writer)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, **arguments)
    yield f"http{'s' if arguments else ''}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    for task in tasks:
        task.cancel()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[16:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length: "))
    return await reader.readexactly(length)


async def send_one(url: str, target: dict[str, Any] | None = None, **limits: Any) -> RequestRecord:
    run = await run_cell(Target("arm", url, "fake", **(target or {})), TRACE, spec(**limits))
    return run.records[0]


def answers(*pieces: bytes) -> Handler:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)

    return handle


@pytest.mark.parametrize(
    "pieces",
    [
        (CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(STREAM), STREAM),),
        (HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(STREAM), STREAM),),
        (HEAD + b"\r\n" + STREAM,),  # lasts until the connection ends
        tuple(bytes((byte,)) for byte in CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(STREAM), STREAM)),
        (CHUNKED, *(b"1\r\n%c\r\n" % byte for byte in STREAM), b"0\r\n\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + b"\r\n" + STREAM),
        (b"HTTP/1.0 200 OK\r\n\r\n" + STREAM,),
    ],
    ids=["chunked", "length", "until-end", "byte-by-byte", "tiny-chunks", "100-continue", "http-1.0"],
)
async def test_any_framing_and_size(pieces: tuple[bytes, ...]) -> None:
    async with serving(answers(*pieces)) as url:
        record = await send_one(url)
    assert (record.status, record.error, record.token_counts) == ("ok", None, [1, 2, 3, 4])


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (HEAD + b"Content-Length: 9999\r\n\r\n" + STREAM[:-14], "the server closed the connection"),
        (CHUNKED + b"zz\r\n", "not an HTTP answer"),
        (b"SMTP ready\r\n\r\n", "not an HTTP answer"),
        (HEAD + b"Content-Encoding: gzip\r\n\r\n", "the answer is encoded as gzip, unasked"),
    ],
)
async def test_broken_answers(answer: bytes, error: str) -> None:
    async with serving(answers(answer)) as url:
        record = await send_one(url)
    assert record.status == "stream_error"
    assert record.error is not None and error in record.error


async def test_idle_connections_that_the_server_closes_are_replaced() -> None:
    """The server closes the first two at once; the third is there before the request is due."""
    opened = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        if opened > 2:
            await answers(HEAD + b"\r\n" + STREAM)(reader, writer)

    async with serving(handle) as url:
        record = await send_one(url)
    assert (record.status, record.reconnects, opened) == ("ok", 0, 3)


async def test_a_request_that_crossed_with_a_close_is_sent_again_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "IDLE_CLOSE_S", 30.0)  # as soon as this machine can
    requests = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        requests += 1
        await read_request(reader)
        if requests > 1:
            writer.write(HEAD + b"\r\n" + STREAM)
            await writer.drain()

    async with serving(handle) as url:
        record = await send_one(url)
    assert (record.status, record.reconnects, requests) == ("ok", 1, 2)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_nothing_is_sent_on_a_connection_that_has_ended(run: Callable[[Any], CompletionAnswer]) -> None:
    """It ends between its opening and the sending, as behind a proxy whose server has just died."""

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def opened_and_sent() -> CompletionAnswer:
        answer = CompletionAnswer()
        async with serving(hang_up) as url:
            connector = Connector(url, time.monotonic, timeout_s=10.0)
            await connector.resolve()
            connection = await connector.open()
            await connection.lost
            with Outbox() as outbox:
                connection.send(outbox.add(b"POST / HTTP/1.1\r\n\r\n", b""), answer)
        return answer

    answer = run(opened_and_sent())
    assert (answer.status, answer.error) == ("stream_error", "the server closed the connection")
    assert answer.sent_s is None


async def test_a_server_that_drops_requests_is_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await read_request(reader)

    with monkeypatch.context() as patch:
        patch.setattr(client, "IDLE_CLOSE_S", 30.0)  # as soon as this machine can
        async with serving(handle) as url:
            record = await send_one(url)
    assert (record.status, record.reconnects) == ("stream_error", 1)

    async def later(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await asyncio.sleep(0.4)

    async with serving(later) as url:
        record = await send_one(url)
    assert (record.status, record.reconnects) == ("stream_error", 0)


async def test_time_outs_are_separate() -> None:
    async def slow(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await asyncio.sleep(60)

    async def begins(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"\r\n" + STREAM[:80])
        await asyncio.sleep(60)

    async with serving(slow) as url:
        first = await send_one(url, first_token_timeout_s=0.1)
    async with serving(begins) as url:
        total = await send_one(url, first_token_timeout_s=5.0, request_timeout_s=1.5)
    assert (first.status, first.error) == ("timeout", "no token 0.1 s after it was due")
    assert (total.status, total.error) == ("timeout", "not finished 1.5 s after it was due")
    assert total.first_byte_s is not None and first.first_byte_s is None


async def test_a_connection_that_is_never_accepted_times_out() -> None:
    """A TLS client waits for the server's hello, which this one never sends."""

    async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(silent) as url:
        record = await send_one(url.replace("http:", "https:"), connect_timeout_s=0.4)
    assert (record.status, record.error) == ("connect_error", "no connection within 0.4 s")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    argv = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
        "-addext",
    ]
    argv += ["subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(argv, check=True, capture_output=True)
    return certificate, key


async def test_tls_is_checked_against_the_named_authority(certificate: tuple[Path, Path]) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    async with serving(answers(HEAD + b"\r\n" + STREAM), ssl=context) as url:
        trusted = await send_one(url, {"ca_file": certificate[0]})
        stranger = await send_one(url)
    assert (trusted.status, trusted.error) == ("ok", None)
    assert trusted.sent_s is not None
    assert stranger.status == "connect_error"
    assert stranger.error is not None and "certificate verify failed" in stranger.error


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_body_that_the_server_is_slow_to_read(run: Callable[[Any], RequestRecord]) -> None:
    """24 MB do not fit into the sockets' buffers: the rest follows when the server reads, and only then all is sent."""
    text = "".join(f"{index:08d}" for index in range(3_000_000))
    trace = replace(TRACE, requests=(replace(TRACE.requests[0], prompt=(), text=text),))
    bodies = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)
        bodies.append(await read_request(reader))
        writer.write(HEAD + b"\r\n" + STREAM)

    async def both() -> RequestRecord:
        async with serving(handle) as url:
            return (await run_cell(Target("arm", url, "fake"), trace, spec())).records[0]

    record = run(both())
    assert (record.status, record.error) == ("ok", None)
    assert json.loads(bodies[0])["prompt"] == text
    assert record.sent_s is not None and record.first_byte_s is not None
    assert 0.2 < record.sent_s < record.first_byte_s  # its connection stands 0.25 s before it is due


def test_the_same_under_uvloop(certificate: tuple[Path, Path]) -> None:
    """The command line runs on uvloop, whose transports are other classes."""

    async def both() -> tuple[RequestRecord, RequestRecord]:
        async with serving(answers(HEAD + b"\r\n" + STREAM)) as url:
            plain = await send_one(url)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*certificate)
        async with serving(answers(HEAD + b"\r\n" + STREAM), ssl=context) as url:
            return plain, await send_one(url, {"ca_file": certificate[0]})

    for record in uvloop.run(both()):
        assert (record.status, record.error, record.token_counts) == ("ok", None, [1, 2, 3, 4])
