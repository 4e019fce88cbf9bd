# SPDX-License-Identifier: Apache-2.0
"""The harness's client beside vLLM's own, on one machine, against one server of known delay.

    python benchmarks/client_accuracy.py --out results/client-accuracy.json

Both send requests of the same size at the same constant rates, in turns: vLLM's request function and its
request generator from the installed package, in a process of their own, driven as `vllm bench serve` drives
them (a session without a limit on connections, kept alive; prompts as text of that many characters, which is the
cheapest body that it can send). The harness runs with the real-time priority that it asks for and, once more,
without.

error = reported TTFT - true TTFT; true TTFT = the server's write of the first token - the due time, on the same
clock. vLLM counts from the moment it sends, so that its own lateness makes its error smaller, not larger; `read`
is the part that it cannot hide: from the server's write to the client's reading.

The row "bare sockets" is the floor of a machine: a process that opens a connection for each request, sends the
same bytes at the same times with socket.sendall, and reads what comes until the end, without an event loop, HTTP
or records. What it costs is the kernel's and the interpreter's, not a client's.
"""

import argparse
import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any
from urllib.parse import urlsplit

DELAY_S = 0.2
TOKENS = 8
RATES = (5.0, 40.0, 80.0)
CLIENTS = {"bare sockets": "bare", "vLLM client": "peer"}
"""Those that run in a process of their own, and what their requests' ids begin with."""


async def peer(url: str, offered_qps: float, body_bytes: int, n: int) -> dict[str, Any]:
    """vLLM's client, driven as `vllm bench serve` does; facts for `figures`."""
    import aiohttp
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions
    from vllm.benchmarks.serve import get_request

    connector = aiohttp.TCPConnector(
        limit=0, limit_per_host=0, ttl_dns_cache=300, use_dns_cache=True, keepalive_timeout=60
    )
    timeout = aiohttp.ClientTimeout(total=6 * 60 * 60)
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

        await request("peer-warm-up")
        tasks = []
        cpu_s, start_s = time.process_time(), time.monotonic()
        index = 0
        async for _ in get_request([None] * n, offered_qps, burstiness=float("inf")):  # type: ignore[list-item]
            tasks.append(asyncio.create_task(request(f"peer-{index:04d}")))
            index += 1
        outputs = await asyncio.gather(*tasks)
        cpu_s = time.process_time() - cpu_s
    return {
        "due_s": [start_s + (index + 1) / offered_qps for index in range(n)],
        "sent_s": [output.start_time for output in outputs],
        "ttft_s": [output.ttft for output in outputs],
        "failed": [output.error for output in outputs if not output.success],
        "cpu_ms": 1e3 * cpu_s / n,
    }


def bare_sockets(url: str, offered_qps: float, body_bytes: int, n: int) -> dict[str, Any]:
    """The floor; facts for `figures`. `send_ms` is the part of `cpu_ms` that socket.sendall took."""
    from harness.client import Target, encode_message
    from harness.load import real_time_priority
    from harness.trace import Request

    parts = urlsplit(url)
    target, body = Target("bare", url, "known-delay"), "x" * body_bytes
    messages = [
        encode_message(target, Request(f"{index:04d}", 0, "default", 0.0, TOKENS, (), body), "bare")
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


def figures(prefix: str, facts: dict[str, Any], stamps: dict[str, dict[str, float]]) -> dict[str, Any]:
    """A process's facts held against the server's stamps of the requests whose ids begin with `prefix`."""
    from harness.calibrate import error_summary, gap_cv

    seen = [stamps[f"{prefix}-{index:04d}"] for index in range(len(facts["due_s"]))]
    rows = list(zip(facts["due_s"], facts["sent_s"], facts["ttft_s"], seen, strict=True))
    return {
        "error_ms": error_summary([1e3 * (ttft - (s["token_s"] - due)) for due, _, ttft, s in rows]),
        "read_ms": error_summary([1e3 * (sent + ttft - s["token_s"]) for _, sent, ttft, s in rows]),
        "gap_cv": gap_cv([s["head_s"] for s in seen]),
        **{name: facts[name] for name in ("cpu_ms", "system_ms", "send_ms") if name in facts},
    }


async def compare(rates: Sequence[float], body_bytes: int, seconds: float) -> list[dict[str, Any]]:
    from harness.calibrate import known_delay_server, measure_point
    from harness.load import NORMAL_PRIORITY

    rows = []
    async with known_delay_server() as server:
        await measure_point(server, 20.0, 1000, 10)
        for rate in rates:
            n = max(60, round(rate * seconds))
            for name in ("bare sockets", "harness", "harness, normal priority", "vLLM client"):
                if name in CLIENTS:
                    argv = [sys.executable, __file__, "--client", name, server.url]
                    argv += [str(rate), str(body_bytes), str(n)]
                    out = await asyncio.to_thread(subprocess.run, argv, capture_output=True, check=True)
                    facts = json.loads(out.stdout.splitlines()[-1])
                    if facts["failed"]:
                        raise SystemExit(
                            f"{name}: {len(facts['failed'])} requests failed: {facts['failed'][0]}"
                        )
                    row = figures(CLIENTS[name], facts, await server.stamps())
                elif name == "harness":
                    row = _ours(await measure_point(server, rate, body_bytes, n))
                else:
                    os.environ[NORMAL_PRIORITY] = "1"
                    row = _ours(await measure_point(server, rate, body_bytes, n))
                    del os.environ[NORMAL_PRIORITY]
                rows.append({"client": name, "offered_qps": rate, "body_bytes": body_bytes, "n": n, **row})
                print(_line(rows[-1]), flush=True)
    return rows


def _ours(point: Any) -> dict[str, Any]:
    # What the harness reports counts from the due time: its error is the reading, nothing else.
    return {
        "error_ms": point.error_ms,
        "read_ms": point.error_ms,
        "gap_cv": point.gap_cv,
        "cpu_ms": point.cpu_ms,
        "system_ms": point.system_ms,
        "encode_ms": point.encode_ms,
        "real_time": point.real_time,
    }


HEAD = """| client | QPS | n | error p50 ms | p95 | max | read p95 ms | gap CV | CPU ms a request | in kernel | before |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def _line(row: dict[str, Any]) -> str:
    error = row["error_ms"]
    system, encoding = (f"{row[name]:.2f}" if name in row else "-" for name in ("system_ms", "encode_ms"))
    return (
        f"| {row['client']} | {row['offered_qps']:g} | {row['n']} | {error['p50']:.2f} | {error['p95']:.2f} |"
        f" {error['max']:.2f} | {row['read_ms']['p95']:.2f} | {row['gap_cv']:.4f} | {row['cpu_ms']:.2f} |"
        f" {system} | {encoding} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--body-kb", type=float, default=480.0)
    parser.add_argument("--seconds", type=float, default=5.0, help="of load a point, about")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--client", nargs=5, metavar="X", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    import uvloop

    if arguments.client:
        name, url, *numbers = arguments.client
        rate, body_bytes, n = float(numbers[0]), int(numbers[1]), int(numbers[2])
        if name == "vLLM client":
            facts = uvloop.run(peer(url, rate, body_bytes, n))
        else:
            facts = bare_sockets(url, rate, body_bytes, n)
        print(json.dumps(facts))
        return
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"1-minute load before: {load}\n\n{HEAD}")
    rows = uvloop.run(compare(RATES, round(1000 * arguments.body_kb), arguments.seconds))
    if arguments.out:
        facts = {"load_before": float(load), "unix_s": time.time(), "delay_s": DELAY_S, "rows": rows}
        arguments.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
