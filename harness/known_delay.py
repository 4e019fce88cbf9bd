# SPDX-License-Identifier: Apache-2.0
"""A server that answers every completion after a known delay and remembers when it did what.

    python -m harness.known_delay --delay-s 0.2 --tokens 8     # prints its URL; ends when its stdin does

Its clock is CLOCK_MONOTONIC, which all processes of a machine share, so that what a client reports can be held
against what really happened. GET /stamps gives and forgets, by X-Request-Id, `head_s` (the first bytes of the
request were read), `body_s` (the last ones were) and `token_s` (just before the first token was written).
"""

import argparse
import asyncio
import gc
import sys
import time
from dataclasses import asdict, dataclass
from typing import cast

import httptools
import orjson
import uvloop

from harness.load import real_time_priority


@dataclass
class Stamps:
    """Points of one request, in seconds of CLOCK_MONOTONIC."""

    head_s: float
    body_s: float = 0.0
    token_s: float = 0.0


class KnownDelay(asyncio.Protocol):
    """One connection; requests are answered in order, bodies are counted and thrown away."""

    def __init__(self, delay_s: float, tokens: int, stamps: dict[str, Stamps]) -> None:
        self._delay_s, self._tokens, self._stamps = delay_s, tokens, stamps
        self._parser = httptools.HttpRequestParser(self)
        self._reset()

    def _reset(self) -> None:
        self._now_s = 0.0
        self._current: Stamps | None = None
        self._name, self._path, self._bytes = "", b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has a class of its own
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._now_s = time.monotonic()
        if self._current is None:
            self._current = Stamps(self._now_s)
        self._parser.feed_data(data)

    def on_url(self, path: bytes) -> None:
        self._path += path

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._name = value.decode()

    def on_body(self, data: bytes) -> None:
        self._bytes += len(data)

    def on_message_complete(self) -> None:
        assert self._current is not None
        if self._path == b"/stamps":
            body = orjson.dumps({name: asdict(stamps) for name, stamps in self._stamps.items()})
            self._stamps.clear()
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        elif self._path == b"/v1/completions":
            self._current.body_s = self._now_s
            if self._name:
                self._stamps[self._name] = self._current
            loop = asyncio.get_running_loop()
            loop.call_later(
                self._delay_s, self._answer, self._current, self._bytes, self._parser.should_keep_alive()
            )
        else:
            self._transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        self._reset()

    def _answer(self, stamps: Stamps, prompt_tokens: int, keep_alive: bool) -> None:
        """The first token alone, so that its write is what the client's first read answers to; then the rest."""
        if self._transport.is_closing():  # the client has left
            return
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        first = head + _chunk(_event(prompt_tokens, 1, self._tokens))
        stamps.token_s = time.monotonic()
        self._transport.write(first)
        rest = b"".join(_chunk(_event(prompt_tokens, n, self._tokens)) for n in range(2, self._tokens + 1))
        self._transport.write(rest + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        if not keep_alive:
            self._transport.close()


def _event(prompt_tokens: int, count: int, of: int) -> bytes:
    choice = {"index": 0, "text": "x", "finish_reason": "length" if count == of else None}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
    return b"data: " + orjson.dumps({"choices": [choice], "usage": usage}) + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(delay_s: float, tokens: int) -> None:
    loop = asyncio.get_running_loop()
    stamps: dict[str, Stamps] = {}
    server = await loop.create_server(
        lambda: KnownDelay(delay_s, tokens, stamps), "127.0.0.1", 0, backlog=1024
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.buffer.read)


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.known_delay", description=__doc__)
    parser.add_argument("--delay-s", type=float, default=0.2)
    parser.add_argument("--tokens", type=int, default=8)
    arguments = parser.parse_args()
    gc.disable()  # a collection would delay an answer after its stamp
    with real_time_priority():
        uvloop.run(serve(arguments.delay_s, arguments.tokens))


if __name__ == "__main__":
    main()
