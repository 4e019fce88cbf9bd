# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server that answers completions by script: tokens, delays and every kind of fault.

In a test: `async with FakeServer(Script(...)) as server:`. As a process: `python fake_server.py --delay-s
0.1` prints its URL and serves until it is killed.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Script:
    """How one completion is answered; delays in seconds."""

    gate: asyncio.Event | None = None  # nothing is sent before this is set
    delay_s: float = 0.0  # before the first token
    gap_s: float = 0.0  # between tokens
    status: int = 200
    body: str = ""  # of an answer that is not 200
    headers: dict[str, str] = field(default_factory=dict)  # likewise
    role_chunk: bool = False  # a first chunk without a token
    continuous_usage: bool = True
    final_usage: bool = True
    text: str = ""  # of every token
    extra_prompt_tokens: int = 0  # the server's count minus the truth
    missing_tokens: int = 0
    error_after: int = -1  # tokens, then an error object
    cut_after: int = -1  # tokens, then the connection is reset
    hang_after: int = -1  # tokens, then silence
    done: bool = True
    first_event: str = ""  # raw data of an event before everything else


@dataclass
class FakeServer:
    """Serves on a free port of the loopback; `script` may depend on the request's index and body."""

    script: Script | Callable[[int, dict[str, Any]], Script] = Script()
    models: tuple[str, ...] = ("fake",)
    metrics: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    arrivals_unix_s: list[float] = field(default_factory=list)  # when the head of each request was read
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def __aenter__(self) -> "FakeServer":
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics) if self.metrics else web.Response(status=404)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        self.arrivals_unix_s.append(time.time())
        self.headers.append(dict(request.headers))
        index = len(self.arrivals_unix_s) - 1
        body = await request.json()
        self.bodies.append(body)
        script = self.script if isinstance(self.script, Script) else self.script(index, body)
        if script.status != 200:
            return web.Response(status=script.status, text=script.body, headers=script.headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(script, body, request, response)
        return response

    async def _stream(
        self, script: Script, body: dict[str, Any], request: web.Request, response: web.StreamResponse
    ) -> None:
        prompt_tokens = len(body["prompt"]) + script.extra_prompt_tokens
        tokens = body["max_tokens"] - script.missing_tokens

        def usage(count: int) -> dict[str, int]:
            return {"prompt_tokens": prompt_tokens, "completion_tokens": count}

        async def event(value: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

        async def choice(text: str, count: int, finish_reason: str | None = None) -> None:
            chunk: dict[str, Any] = {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}
            if script.continuous_usage:
                chunk["usage"] = usage(count)
            await event(chunk)

        if script.gate:
            await script.gate.wait()
        if script.first_event:
            await response.write(f"data: {script.first_event}\n\n".encode())
        if script.role_chunk:
            await choice("", 0)
        await asyncio.sleep(script.delay_s)
        for count in range(1, tokens + 1):
            if count - 1 == script.error_after:
                await event({"error": {"message": "engine died", "code": 500}})
                return
            if count - 1 == script.cut_after:
                assert request.transport is not None
                request.transport.abort()
                return
            if count - 1 == script.hang_after:
                await asyncio.sleep(3600)
            await choice(script.text, count, "length" if count == tokens else None)
            if script.gap_s:
                await asyncio.sleep(script.gap_s)
        if script.final_usage:
            await event({"choices": [], "usage": usage(tokens)})
        if script.done:
            await response.write(b"data: [DONE]\n\n")


async def _serve(script: Script) -> None:
    async with FakeServer(script) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


def _main() -> None:
    parser = argparse.ArgumentParser()
    for option in fields(Script):
        if option.type in (int, float, str):
            parser.add_argument(
                f"--{option.name.replace('_', '-')}", type=option.type, default=option.default
            )
    asyncio.run(_serve(Script(**vars(parser.parse_args()))))


if __name__ == "__main__":
    _main()
