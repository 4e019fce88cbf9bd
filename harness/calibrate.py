# SPDX-License-Identifier: Apache-2.0
"""`python -m harness calibrate`: how wrong is the client itself?

It measures a server that answers after a known delay and notes, on the clock that both share, when it really
wrote the first token (known_delay.py). For each request

    error = reported TTFT - true TTFT,    true TTFT = first token's write at the server - due time

which is the time from that write to the client's reading of it: the network stack, the wake-up, and whatever
else the client was doing. Three more figures say whether the schedule was kept and at what price: the
coefficient of variation of the gaps between arrivals at the server (0 at a constant rate, ideally), the slip
P99, and the client's CPU time a request, connection and encoding of the body apart from each other.
"""

import argparse
import asyncio
import contextlib
import json
import math
import secrets
import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from harness.errors import UserError
from harness.files import write_json
from harness.load import CellRun, CellSpec, Target, run_cell
from harness.options import parse_rates, positive
from harness.stats import quantile
from harness.trace import Request, Trace

DELAY_S = 0.2
TOKENS = 8  # of each answer
TIMEOUT_S = 30.0
LEAST_REQUESTS = 40  # for a P95 with two values beyond it
BYTES_PER_TOKEN = 7  # six digits and a comma
BRIEF_QPS = (5.0, 20.0)
"""Between these the rate of the brief measurement lies: a client that has slept longer is later."""


@dataclass(frozen=True)
class Accuracy:
    """What one client did at one rate (requests a second) with one size of request body.

    `error_ms` holds p50, p95 and max of reported minus true TTFT. `encode_ms` and `cpu_ms` are CPU time a
    request: building the body before the cell, and everything from the first connection to the last answer, of
    which `system_ms` in the kernel.
    """

    offered_qps: float
    body_bytes: int
    n: int
    error_ms: dict[str, float]
    gap_cv: float
    slip_p99_ms: float
    cpu_ms: float
    encode_ms: float
    real_time: bool
    system_ms: float = 0.0


@dataclass(frozen=True)
class KnownDelayServer:
    """A running known_delay.py."""

    url: str

    async def stamps(self) -> dict[str, dict[str, float]]:
        """Gives and forgets head_s, body_s and token_s of each request, by its X-Request-Id."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/stamps") as response:
            found: dict[str, dict[str, float]] = json.loads(await response.read())
            return found


@contextlib.asynccontextmanager
async def known_delay_server() -> AsyncIterator[KnownDelayServer]:
    """Starts one in a process of its own, which ends with this context or with us, and not by Ctrl-C."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "harness.known_delay", "--delay-s", str(DELAY_S), "--tokens", str(TOKENS)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin and process.stdout
    try:
        yield KnownDelayServer((await process.stdout.readline()).decode().strip())
    finally:
        process.stdin.close()
        await process.wait()


def uniform_trace(n: int, body_bytes: int) -> Trace:
    """`n` requests at constant gaps whose bodies have about this many bytes; all ask for the same."""
    prompt = tuple(100_000 + index % 60_000 for index in range(max(1, body_bytes // BYTES_PER_TOKEN)))
    requests = tuple(Request(f"r{i:04d}", 0, "default", float(i), TOKENS, prompt) for i in range(n))
    return Trace(header={}, scale=1.0, sha256="", requests=requests)


async def measure_point(server: KnownDelayServer, offered_qps: float, body_bytes: int, n: int) -> Accuracy:
    """Raises UserError where a request failed, which an idle machine does not let happen."""
    run, stamps, salt = await run_point(server, offered_qps, body_bytes, n)
    return accuracy_of(run, stamps, salt, offered_qps, body_bytes)


async def run_point(
    server: KnownDelayServer, offered_qps: float, body_bytes: int, n: int
) -> tuple[CellRun, dict[str, dict[str, float]], str]:
    """The cell, the server's stamps, and the salt that its request ids begin with; raises as `measure_point`."""
    trace = uniform_trace(n, body_bytes)
    salt = f"calibrate-{secrets.token_hex(4)}"
    target = Target("known-delay", server.url, "known-delay")
    run = await run_cell(target, trace, CellSpec(offered_qps, 0, salt, TIMEOUT_S, TIMEOUT_S))
    failed = [record for record in run.records if record.status != "ok"]
    if failed:
        raise UserError(
            f"calibration: {len(failed)} of {n} requests failed ({failed[0].status}: {failed[0].error});"
            " free the machine's cores and try again"
        )
    return run, await server.stamps(), salt


def accuracy_of(
    run: CellRun,
    stamps: Mapping[str, Mapping[str, float]],
    salt: str,
    offered_qps: float,
    body_bytes: int,
) -> Accuracy:
    """Pure: a cell's records held against the server's stamps."""
    seen = [stamps[f"{salt}-{record.id}"] for record in run.records]
    slips_ms = [1e3 * ((r.dispatched_s or math.inf) - r.due_s) for r in run.records]
    return Accuracy(
        offered_qps=offered_qps,
        body_bytes=body_bytes,
        n=len(run.records),
        error_ms=error_summary(errors_ms_of(run, stamps, salt)),
        gap_cv=gap_cv(gaps_of([stamp["head_s"] for stamp in seen])),
        slip_p99_ms=quantile(slips_ms, 99),
        cpu_ms=1e3 * run.cpu_s / len(run.records),
        encode_ms=1e3 * run.encode_s / len(run.records),
        real_time=run.real_time,
        system_ms=1e3 * run.system_s / len(run.records),
    )


def errors_ms_of(run: CellRun, stamps: Mapping[str, Mapping[str, float]], salt: str) -> list[float]:
    """Reported minus true TTFT of each request, in ms. Pure."""
    return [
        1e3 * ((r.first_token_s or math.inf) + run.started_monotonic_s - stamps[f"{salt}-{r.id}"]["token_s"])
        for r in run.records
    ]


def error_summary(errors_ms: Sequence[float]) -> dict[str, float]:
    return {
        "p50": quantile(errors_ms, 50),
        "p95": quantile(errors_ms, 95),
        "max": max(errors_ms),
    }


def gaps_of(arrivals_s: Sequence[float]) -> list[float]:
    """Seconds between one arrival and the next."""
    return [b - a for a, b in pairwise(sorted(arrivals_s))]


def gap_cv(gaps_s: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation over mean."""
    return statistics.pstdev(gaps_s) / statistics.fmean(gaps_s)


async def brief(trace: Trace, lowest_qps: float) -> dict[str, Any]:
    """A few seconds before a sweep, with bodies as long as the trace's longest, at about its lowest rate."""
    slowest, fastest = BRIEF_QPS
    longest = max(request.prompt_tokens for request in trace.requests)
    async with known_delay_server() as server:
        point = await measure_point(
            server, min(fastest, max(slowest, lowest_qps)), BYTES_PER_TOKEN * longest, LEAST_REQUESTS
        )
    return asdict(point)


def keep(manifest: dict[str, Any], point: Mapping[str, Any]) -> None:
    """Into the manifest what `brief` found before the cells of one command: the worst is the run's."""
    known = manifest.get("client_calibration")
    points = manifest.setdefault("client_calibrations", [known] if known else [])
    points.append(dict(point))
    manifest["client_calibration"] = worst(points)


def worst(points: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(points, key=lambda each: float(each["error_ms"]["p95"]))


def error_bar(point: Mapping[str, Any]) -> str:
    """One sentence for people; `point` as in the manifest's `client_calibration`."""
    error = point["error_ms"]
    return (
        "The client's own error, measured against a server of known delay before the cells, with idle engines:"
        f" P50 {error['p50']:.2f} ms,"
        f" P95 {error['p95']:.2f} ms, at most {error['max']:.2f} ms over {point['n']} requests of"
        f" {point['body_bytes'] / 1e3:.0f} KB at {point['offered_qps']:g} QPS."
    )


HEAD = "  rate  body KB    n   error ms p50    p95    max   gap CV  slip p99 ms  CPU ms/request  + encoding"


def line(point: Accuracy) -> str:
    error = point.error_ms
    return (
        f"{point.offered_qps:6g} {point.body_bytes / 1e3:8.0f} {point.n:4d} {error['p50']:14.2f}"
        f" {error['p95']:6.2f} {error['max']:6.2f} {point.gap_cv:8.4f} {point.slip_p99_ms:12.2f}"
        f" {point.cpu_ms:15.2f} {point.encode_ms:11.2f}"
    )


async def measure_points(rates: Sequence[float], sizes: Sequence[int], seconds: float) -> list[Accuracy]:
    """Every rate with every size, printed as they come."""
    points = []
    async with known_delay_server() as server:
        await measure_point(server, BRIEF_QPS[1], 1000, 10)  # first calls of everything
        print(HEAD, flush=True)
        for size in sizes:
            for rate in rates:
                points.append(
                    await measure_point(server, rate, size, max(LEAST_REQUESTS, round(rate * seconds)))
                )
                print(line(points[-1]), flush=True)
    return points


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    calibrate = commands.add_parser(
        "calibrate", help="the client's own error and CPU time, against a server of known delay"
    )
    calibrate.add_argument("--rates", default="5,40,80", metavar="Q,Q", help="requests a second (5,40,80)")
    calibrate.add_argument("--body-kb", default="480,800", metavar="K,K", help="request bodies (480,800)")
    calibrate.add_argument("--seconds", type=positive, default=5.0, metavar="S", help="a point, about (5)")
    calibrate.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    calibrate.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    sizes = [round(1000 * size) for size in parse_rates(arguments.body_kb)]
    points = uvloop.run(measure_points(parse_rates(arguments.rates), sizes, arguments.seconds))
    priority = "with" if points[0].real_time else "without"
    print(f"known delay {DELAY_S * 1e3:.0f} ms, {TOKENS} tokens an answer, {priority} real-time priority")
    if arguments.json:
        write_json(arguments.json, {"delay_s": DELAY_S, "points": [asdict(point) for point in points]})
