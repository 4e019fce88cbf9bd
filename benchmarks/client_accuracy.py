# SPDX-License-Identifier: Apache-2.0
"""The harness's client beside vLLM's own, on one machine, against one server of known delay.

    python benchmarks/client_accuracy.py --out results/client/accuracy.json

Both send requests of the same size at the same constant rates: vLLM's request function and its request generator from
the installed package, in a process of their own, driven as `vllm bench serve` drives them (a session without a limit on
connections, kept alive; prompts as text of that many characters, which is the cheapest body that it can send). The
harness runs with the real-time priority that it asks for and, once more, without. The row "bare sockets" is the floor
of a machine: the same bytes at the same times with socket.sendall (client_peers.py). What it costs is the kernel's and
the interpreter's, not a client's.

error = reported TTFT - true TTFT; true TTFT = the server's write of the first token - the due time, on the same
clock. vLLM counts from the moment it sends, so that its own lateness makes its error smaller, not larger; `read`
is the part that it cannot hide: from the server's write to the client's reading.

A machine's mood lasts longer than one point. So all points are measured in turn, `--rounds` times, the clients in
another order each time, and the figures are those of all rounds' requests together; those of each round stand beside
them in the file. Needed: the packages of the harness (uvloop, httptools, orjson, aiohttp, numpy, scipy, pyarrow), and
vLLM for its client.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# As a script it finds the harness beside it, and so do the processes that it starts.
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

RATES = (5.0, 40.0, 80.0)
LEAST_REQUESTS = 50
"""A point: three rounds of it leave seven values beyond a P95."""
HARNESS = "harness"
NORMAL = "harness, normal priority"
NEEDED = ("uvloop", "httptools", "orjson", "aiohttp", "numpy", "scipy", "pyarrow")


@dataclass(frozen=True)
class Point:
    """One client at one rate in one round: a value a request, and CPU times a request in ms."""

    error_ms: list[float]
    read_ms: list[float]
    gaps_s: list[float]
    costs_ms: dict[str, float]
    real_time: bool | None = None


async def measure(
    rounds: int, rates: Sequence[float], body_bytes: int, seconds: float
) -> list[dict[str, Any]]:
    """The rows of the table; each point is printed as it comes. A peer that does not start here has no rows."""
    from client_peers import BARE_SOCKETS, VLLM_CLIENT, PeerFailed, PeerProcess

    from harness.calibrate import known_delay_server, measure_point

    points: dict[tuple[float, str], list[Point]] = {}
    async with (
        known_delay_server() as server,
        PeerProcess(BARE_SOCKETS, server.url) as bare,
        PeerProcess(VLLM_CLIENT, server.url) as peer,
    ):
        processes = {BARE_SOCKETS: bare, VLLM_CLIENT: peer}
        names = [BARE_SOCKETS, HARNESS, NORMAL, VLLM_CLIENT]
        await measure_point(server, 20.0, 1000, 10)  # first calls of everything
        for name, process in processes.items():
            try:
                await process.measure(20.0, 1000, 10, f"first-{name[:4]}")
            except PeerFailed as failure:
                print(f"left out: {failure}", flush=True)
                names.remove(name)
        await server.stamps()
        for number in range(rounds):
            for rate in rates:
                n = max(LEAST_REQUESTS, round(rate * seconds))
                for name in names:
                    if name in processes:
                        prefix = f"{name[:4]}-{number}"
                        facts = await processes[name].measure(rate, body_bytes, n, prefix)
                        point = point_of_peer(prefix, facts, await server.stamps())
                    else:
                        with normal_priority(name == NORMAL):
                            point = await point_of_ours(server, rate, body_bytes, n)
                    points.setdefault((rate, name), []).append(point)
                    print(f"round {number + 1}: {line(name, rate, pooled([point]))}", flush=True)
            names = names[1:] + names[:1]
    return [
        {
            "client": name,
            "offered_qps": rate,
            "body_bytes": body_bytes,
            **pooled(points[rate, name]),
            "rounds": [pooled([point]) for point in points[rate, name]],
        }
        for rate in rates
        for name in names_in_order(points, rate)
    ]


def names_in_order(points: dict[tuple[float, str], list[Point]], rate: float) -> list[str]:
    """The clients as the first round had them."""
    return [name for of, name in points if of == rate]


@contextlib.contextmanager
def normal_priority(wanted: bool) -> Iterator[None]:
    from harness.load import NORMAL_PRIORITY

    if wanted:
        os.environ[NORMAL_PRIORITY] = "1"
    try:
        yield
    finally:
        os.environ.pop(NORMAL_PRIORITY, None)


async def point_of_ours(server: Any, rate: float, body_bytes: int, n: int) -> Point:
    from harness.calibrate import errors_ms_of, gaps_of, run_point

    run, stamps, salt = await run_point(server, rate, body_bytes, n)
    # What the harness reports counts from the due time: its error is the reading, nothing else.
    errors_ms = errors_ms_of(run, stamps, salt)
    costs = {"cpu_ms": run.cpu_s, "system_ms": run.system_s, "encode_ms": run.encode_s}
    return Point(
        errors_ms,
        errors_ms,
        gaps_of([stamps[f"{salt}-{record.id}"]["head_s"] for record in run.records]),
        {name: 1e3 * spent_s / n for name, spent_s in costs.items()},
        run.real_time,
    )


def point_of_peer(prefix: str, facts: dict[str, Any], stamps: dict[str, dict[str, float]]) -> Point:
    """A process's facts held against the server's stamps of the requests whose ids begin with `prefix`."""
    from harness.calibrate import gaps_of

    seen = [stamps[f"{prefix}-{index:04d}"] for index in range(len(facts["due_s"]))]
    rows = list(zip(facts["due_s"], facts["sent_s"], facts["ttft_s"], seen, strict=True))
    return Point(
        [1e3 * (ttft - (stamp["token_s"] - due)) for due, _, ttft, stamp in rows],
        [1e3 * (sent + ttft - stamp["token_s"]) for _, sent, ttft, stamp in rows],
        gaps_of([stamp["head_s"] for stamp in seen]),
        {name: value for name, value in facts.items() if name.endswith("_ms")},
    )


def pooled(points: Sequence[Point]) -> dict[str, Any]:
    """Percentiles and gaps over the requests of all these points; CPU times are the mean of the points'."""
    from harness.calibrate import error_summary, gap_cv
    from harness.stats import percentile_interval

    errors_ms = [error for point in points for error in point.error_ms]
    interval = percentile_interval(errors_ms, 95)
    facts: dict[str, Any] = {
        "n": len(errors_ms),
        "error_ms": error_summary(errors_ms),
        "error_p95_interval_ms": [interval.low, interval.high] if interval else None,
        "read_ms": error_summary([read for point in points for read in point.read_ms]),
        "gap_cv": gap_cv([gap for point in points for gap in point.gaps_s]),
        **{name: statistics.fmean(point.costs_ms[name] for point in points) for name in points[0].costs_ms},
    }
    if points[0].real_time is not None:
        facts["real_time"] = all(point.real_time for point in points)
    return facts


HEAD = """| client | QPS | n | error p50 ms | p95 | max | read p95 ms | gap CV | CPU ms a request | in kernel | before |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def line(name: str, rate: float, row: dict[str, Any]) -> str:
    error = row["error_ms"]
    system, encoding = (f"{row[cost]:.2f}" if cost in row else "-" for cost in ("system_ms", "encode_ms"))
    return (
        f"| {name} | {rate:g} | {row['n']} | {error['p50']:.2f} | {error['p95']:.2f} |"
        f" {error['max']:.2f} | {row['read_ms']['p95']:.2f} | {row['gap_cv']:.4f} | {row['cpu_ms']:.2f} |"
        f" {system} | {encoding} |"
    )


def busy_and_stolen_s(cores: Sequence[int]) -> tuple[float, float]:
    """Seconds that these cores computed, and that the hypervisor kept from them, since boot (proc(5), stat)."""
    ticks = os.sysconf("SC_CLK_TCK")
    busy = stolen = 0
    for text in Path("/proc/stat").read_text().splitlines():
        name, *counts = text.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _, _, irq, softirq, steal = (int(count) for count in counts[:8])
            busy += user + nice + system + irq + softirq
            stolen += steal
    return busy / ticks, stolen / ticks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--body-kb", type=float, default=480.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help=f"of load a point, at least {LEAST_REQUESTS} requests"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"packages missing here: {', '.join(missing)}")
    import uvloop

    cores = sorted(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    before, began_s, began_unix_s = busy_and_stolen_s(cores), time.monotonic(), time.time()
    print(f"cores {cores}, 1-minute load before: {load:.2f}", flush=True)
    rows = uvloop.run(measure(arguments.rounds, RATES, round(1000 * arguments.body_kb), arguments.seconds))
    after, lasted_s = busy_and_stolen_s(cores), time.monotonic() - began_s
    host = {
        "cores": cores,
        "cores_online": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": load,
        "lasted_s": lasted_s,
        "busy_share": (after[0] - before[0]) / (lasted_s * len(cores)),
        "stolen_s": after[1] - before[1],
    }
    print(f"\n{HEAD}")
    for row in rows:
        print(line(row["client"], row["offered_qps"], row))
    print(f"\n{lasted_s:.0f} s on cores {cores}, {host['stolen_s']:.2f} s of them stolen")
    if arguments.out:
        facts = {"unix_s": began_unix_s, "rounds": arguments.rounds, "host": host, "rows": rows}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
