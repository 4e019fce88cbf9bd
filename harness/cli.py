# SPDX-License-Identifier: Apache-2.0
"""`python -m harness`: make traces, measure servers, rebuild reports."""

import argparse
import asyncio
import math
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import bench, calibrate, trace_cli
from harness.engines.endpoint import ask_model, check_reachable
from harness.errors import UserError
from harness.load import Target
from harness.options import parse_arm, parse_limits, parse_rates
from harness.progress import ProgressLine
from harness.report import write_report
from harness.sla import Limits
from harness.store import RunStore, new_arm, new_manifest
from harness.sweep import Plan, measure
from harness.trace import Trace, load_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 2: something the user can put right, told in one line on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 2
    return 0


def _run(arguments: argparse.Namespace) -> None:
    arms = [parse_arm(text) for text in arguments.arm]
    names = [name for name, _ in arms]
    if len(set(names)) < len(names):
        raise UserError(f"two arms share a name ({', '.join(names)}); give each its own")
    plan = Plan(parse_rates(arguments.rates), arguments.repeats, arguments.timeout, arguments.drain_timeout)
    rule = "the source's own" if arguments.sla == "15,25" else "given with --sla"
    limits = Limits.of(*parse_limits(arguments.sla), rule=rule)
    trace = load_trace(arguments.trace)
    api_key = _read_key(arguments.api_key_file)
    models = asyncio.run(_models(arms, arguments.model, api_key))
    targets = [
        Target(name, url, model, extensions=not arguments.plain_openai, api_key=api_key)
        for (name, url), model in zip(arms, models, strict=True)
    ]
    manifest = new_manifest(
        trace=trace,
        trace_path=str(arguments.trace),
        arms=[new_arm(target.name, target.base_url, engine={"model": target.model}) for target in targets],
        rates=plan.rates,
        repeats=plan.repeats,
        limits=limits,
        fixed_cohort=_fixed_cohort(trace, arguments.fixed_cohort),
        shared_cores=arguments.shared_cores,
    )
    store = RunStore.create(arguments.out, manifest, trace)
    try:
        complete = asyncio.run(_measure(store, targets, trace, plan))
    finally:
        print(write_report(store), end="")
    kept = sum(1 for _ in store.cells())
    if not complete:
        raise UserError(f"interrupted; {kept} cells kept in {store.path}")


async def _models(arms: Sequence[tuple[str, str]], named: str | None, api_key: str | None) -> list[str]:
    if named is None:
        return [await ask_model(url, api_key) for _, url in arms]
    for _, url in arms:
        await check_reachable(url)
    return [named] * len(arms)


async def _measure(store: RunStore, targets: Sequence[Target], trace: Trace, plan: Plan) -> bool:
    """Measure until done or until the first SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with ProgressLine(sys.stderr) as progress:
        return await measure(store, targets, trace, plan, on_progress=progress, stop=stop)


def _report(arguments: argparse.Namespace) -> None:
    store = RunStore.open(arguments.dir)
    store.trace()  # a run whose trace was changed is not reported
    print(write_report(store), end="")


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the API key in {path}: {error}") from error


def _fixed_cohort(trace: Trace, named: int | None) -> int:
    cohorts = trace.cohorts
    if named is None:
        return cohorts[len(cohorts) // 2]
    if named not in cohorts:
        raise UserError(f"the trace has no cohort {named}; choose one of {cohorts[0]} to {cohorts[-1]}")
    return named


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _duration(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of seconds")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="harness", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    trace_cli.add_parser(commands)
    _add_run(commands)
    report = commands.add_parser(
        "report", help="rebuild tables, plots and summary.json of a run, without a server"
    )
    report.add_argument("dir", type=Path, metavar="DIR", help="the folder that `run --out` or `bench` wrote")
    report.set_defaults(run=_report)
    bench.add_parser(commands)
    calibrate.add_parser(commands)
    return parser


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = commands.add_parser("run", help="measure OpenAI-compatible servers that are already running")
    run.add_argument("--trace", type=Path, required=True, metavar="FILE", help="from `trace make`")
    run.add_argument(
        "--rates", required=True, metavar="Q,Q", help="offered rates, requests a second, like 0.5,1"
    )
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the results")
    run.add_argument(
        "--arm",
        action="append",
        required=True,
        metavar="NAME=URL",
        help="a server, http://HOST:PORT[/v1]; repeat for each arm; the others are compared with the first",
    )
    run.add_argument("--model", metavar="M", help="model name (default: the one on each server's /v1/models)")
    run.add_argument("--sla", default="15,25", metavar="A,B", help="limits on TTFT, s (default 15,25)")
    run.add_argument(
        "--repeats", type=_count, default=1, metavar="N", help="cells a rate and arm (default 1)"
    )
    run.add_argument(
        "--timeout",
        type=_duration,
        default=600.0,
        metavar="S",
        help="a request fails S s after it was due (default 600)",
    )
    run.add_argument(
        "--drain-timeout",
        type=_duration,
        default=120.0,
        metavar="S",
        help="wait S s after the last request; a cell with requests left is unstable (default 120)",
    )
    run.add_argument(
        "--fixed-cohort", type=int, metavar="NAME", help="cohort of the headline (default: the middle one)"
    )
    run.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="send the file's content as the bearer token"
    )
    run.add_argument(
        "--shared-cores",
        action="store_true",
        help="client and engine share few CPU cores: a cell counts with the client up to max(50 ms, 5%% of the "
        "median TTFT) late, not only max(10 ms, 1%%)",
    )
    run.add_argument(
        "--plain-openai",
        action="store_true",
        help="leave out min_tokens, ignore_eos and cache_salt, for servers that reject them",
    )
    run.set_defaults(run=_run)
