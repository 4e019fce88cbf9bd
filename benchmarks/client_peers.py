# SPDX-License-Identifier: Apache-2.0
"""The clients that the harness's own is held against, each in a process of its own (client_accuracy.py starts it).

    python benchmarks/client_peers.py "vLLM client" URL     # a point a line on stdin, its facts a line on stdout

A point is {"offered_qps", "body_bytes", "n", "prefix"}: n requests at a constant rate, whose ids are prefix-0000 and
so on. The facts: due_s, sent_s (seconds of CLOCK_MONOTONIC) and ttft_s (seconds) of each request, error texts of those
that failed, and CPU time a request in ms.
"""

import asyncio
import contextlib
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any
from urllib.parse import urlsplit

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script it finds the harness beside it

TOKENS = 8
BARE_SOCKETS = "bare sockets"
VLLM_CLIENT = "vLLM client"


async def vllm_client(url: str, offered_qps: float, body_bytes: int, n: int, prefix: str) -> dict[str, Any]:
    """vLLM's request function and generator, driven as `vllm bench serve` does, but on uvloop."""
    import aiohttp
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions
    from vllm.benchmarks.serve import get_request
    from vllm.utils.gc_utils import freeze_gc_heap

    connector = aiohttp.TCPConnector(
        limit=0, limit_per_host=0, ttl_dns_cache=300, use_dns_cache=True, keepalive_timeout=60
    )
    timeout = aiohttp.ClientTimeout(total=6 * 60 * 60)
    freeze_gc_heap()
    async with aiohttp.ClientSession(connector=connector, trust_env=True, timeout=timeout) as session:

        def request(name: str) -> Any:
            asked = RequestFuncInput(
                prompt="x" * body_bytes,
                api_url=f"{url}/v1/completions",
                prompt_len=1,
                output_len=TOKENS,
                model="known-delay",
                request_id=name,
                ignore_eos=True,
            )
            return async_request_openai_completions(asked, session)

        await request(f"{prefix}-warm-up")
        tasks = []
        cpu_s, system_s, start_s = time.process_time(), getrusage(RUSAGE_SELF).ru_stime, time.monotonic()
        index = 0
        async for _ in get_request([None] * n, offered_qps, burstiness=float("inf")):
            tasks.append(asyncio.create_task(request(f"{prefix}-{index:04d}")))
            index += 1
        outputs = await asyncio.gather(*tasks)
        cpu_s, system_s = time.process_time() - cpu_s, getrusage(RUSAGE_SELF).ru_stime - system_s
    return {
        "due_s": [start_s + (index + 1) / offered_qps for index in range(n)],
        "sent_s": [output.start_time for output in outputs],
        "ttft_s": [output.ttft for output in outputs],
        "failed": [output.error for output in outputs if not output.success],
        "cpu_ms": 1e3 * cpu_s / n,
        "system_ms": 1e3 * system_s / n,
    }


async def bare_sockets(url: str, offered_qps: float, body_bytes: int, n: int, prefix: str) -> dict[str, Any]:
    """The floor of a machine. `send_ms` is the part of `cpu_ms` that socket.sendall took.

    A plain loop (no awaits): it opens a connection for each request, sends the same bytes at the same times, and reads
    what comes until the end, without an event loop, HTTP or records.
    """
    from harness.client import Target, encode_message
    from harness.load import real_time_priority
    from harness.trace import Request

    parts = urlsplit(url)
    target, body = Target("bare", url, "known-delay"), "x" * body_bytes
    messages = [
        b"".join(encode_message(target, Request(f"{index:04d}", 0, "default", 0.0, TOKENS, (), body), prefix))
        for index in range(n)
    ]
    sent_s, first_s = [0.0] * n, [0.0] * n
    waiting: dict[socket.socket, int] = {}
    with real_time_priority():
        cpu_s, system_s, send_s = time.process_time(), getrusage(RUSAGE_SELF).ru_stime, 0.0
        start_s, index = time.monotonic() + 0.1, 0
        following = socket.create_connection((parts.hostname, parts.port))
        while index < n or waiting:
            left_s = start_s + index / offered_qps - time.monotonic()
            readable, _, _ = select.select(list(waiting), [], [], max(0.0, left_s) if index < n else None)
            for connection in readable:
                now_s, data = time.monotonic(), connection.recv(65536)
                first_s[waiting[connection]] = first_s[waiting[connection]] or now_s
                if not data:
                    del waiting[connection]
                    connection.close()
            if index < n and time.monotonic() >= start_s + index / offered_qps:
                sent_s[index] = time.monotonic()
                send_s -= time.process_time()
                following.sendall(messages[index])
                send_s += time.process_time()
                waiting[following] = index
                index += 1
                if index < n:
                    following = socket.create_connection((parts.hostname, parts.port))
        cpu_s, system_s = time.process_time() - cpu_s, getrusage(RUSAGE_SELF).ru_stime - system_s
    return {
        "due_s": [start_s + index / offered_qps for index in range(n)],
        "sent_s": sent_s,
        "ttft_s": [first - sent for first, sent in zip(first_s, sent_s, strict=True)],
        "failed": [],
        "cpu_ms": 1e3 * cpu_s / n,
        "system_ms": 1e3 * system_s / n,
        "send_ms": 1e3 * send_s / n,
    }


CLIENTS: dict[str, Callable[..., Coroutine[Any, Any, dict[str, Any]]]] = {
    BARE_SOCKETS: bare_sockets,
    VLLM_CLIENT: vllm_client,
}


class PeerFailed(Exception):
    """Its process died, or a request failed; one line."""


class PeerProcess:
    """One of CLIENTS in a process that lasts for all points: vLLM alone takes ten seconds to import."""

    def __init__(self, name: str, url: str) -> None:
        self._name, self._url = name, url
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "PeerProcess":
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, self._name, self._url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process and self._process.stdin
        self._process.stdin.close()
        await self._process.wait()

    async def measure(self, offered_qps: float, body_bytes: int, n: int, prefix: str) -> dict[str, Any]:
        """The facts of one point, or PeerFailed."""
        assert self._process and self._process.stdin and self._process.stdout
        point = {"offered_qps": offered_qps, "body_bytes": body_bytes, "n": n, "prefix": prefix}
        with contextlib.suppress(ConnectionError):  # of one that died: it has no answer either
            self._process.stdin.write(json.dumps(point).encode() + b"\n")
            await self._process.stdin.drain()
        answer = await self._process.stdout.readline()
        if not answer:
            raise PeerFailed(f"{self._name}: its process died with status {await self._process.wait()}")
        facts: dict[str, Any] = json.loads(answer)
        if facts["failed"]:
            raise PeerFailed(
                f"{self._name}: {len(facts['failed'])} of {n} requests failed: {facts['failed'][0]}"
            )
        return facts


def main() -> None:
    name, url = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no answer
    for line in sys.stdin:
        facts = uvloop.run(CLIENTS[name](url, **json.loads(line)))
        print(json.dumps(facts), file=answers, flush=True)
    os._exit(0)  # without the farewells of the libraries that vLLM loads


if __name__ == "__main__":
    main()
