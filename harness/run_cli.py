# SPDX-License-Identifier: Apache-2.0
"""`python -m harness run`: measure OpenAI-compatible servers that are already running."""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from harness import calibrate
from harness.client import OK, RequestRecord, Timeouts
from harness.course import Plan
from harness.engines.endpoint import ask_model, check_reachable, describe_server
from harness.errors import UserError
from harness.load import Target
from harness.manifest import add_session, new_arm, new_manifest
from harness.options import parse_arm, parse_limits, parse_rates, positive
from harness.progress import JsonEvents, display, tell_plan
from harness.report import write_report
from harness.signals import on_ending
from harness.sla import GIVEN, Limits, Rule
from harness.steps import put
from harness.store import RunStore
from harness.sweep import measure
from harness.trace import Trace, load_trace

UNCALIBRATED = "The client's own error was not measured again before every session (--skip-calibration)."


def run(arguments: argparse.Namespace) -> None:
    """Measures what is asked and reports it, whatever ends the measurement."""
    arms = [parse_arm(text) for text in arguments.arm]
    names = [name for name, _ in arms]
    if len(set(names)) < len(names):
        raise UserError(f"two arms share a name ({', '.join(names)}); give each its own")
    rule = "the source's own" if arguments.sla == "15,25" else GIVEN
    first_s, second_s = parse_limits(arguments.sla)
    rules = tuple(Rule.parse(text) for text in arguments.limit)
    limits = Limits(Limits.of(first_s, second_s, rule).applied, rule, rules)
    trace = load_trace(arguments.trace)
    plan = _plan(arguments)
    api_key = _read_key(arguments.api_key_file)
    if arguments.ca_file and not arguments.ca_file.is_file():
        raise UserError(f"--ca-file {arguments.ca_file} is not a file; give a PEM file of authorities")
    try:
        targets = uvloop.run(_targets(arms, arguments, api_key))
        engines = uvloop.run(_engines(targets))
        manifest = new_manifest(
            trace=trace,
            trace_path=str(arguments.trace),
            arms=[new_arm(t.name, t.base_url, engine=engines[t.name]) for t in targets],
            rates=plan.rates,
            repeats=plan.repeats,
            limits=limits,
            fixed_cohort=_fixed_cohort(trace, arguments.fixed_cohort),
            shared_cores=arguments.shared_cores,
        )
        manifest |= {"no_preemption": arguments.no_preemption, "timeouts": plan.timeouts}
        open_store = RunStore.resume if arguments.resume else RunStore.create
        store = open_store(arguments.out, manifest, trace)
        store.require_same(manifest)
        manifest = store.manifest
        add_session(manifest)
        store.write_manifest(manifest)
        try:
            complete = uvloop.run(_measure(store, targets, engines, trace, plan, arguments))
        finally:
            store.write_manifest(_widened(store, plan, arguments.skip_calibration))
            report = write_report(store)
            if not arguments.json:
                put(sys.stdout, report)
    except asyncio.CancelledError:
        raise UserError("interrupted before the first cell; nothing was measured") from None
    kept = sum(1 for _ in store.cells())
    if not complete and plan.budget_s is None:
        raise UserError(f"interrupted; {kept} cells kept in {store.path}; go on with --resume")
    if arguments.json:
        JsonEvents(sys.stdout).tell("done", dir=str(store.path), cells=kept, complete=complete)
    _require_answers(store)


def _widened(store: RunStore, plan: Plan, uncalibrated: bool) -> dict[str, Any]:
    """The manifest with what a session added to the run that it went on with."""
    manifest = store.manifest
    notes = manifest["notes"]
    if uncalibrated and "client_calibration" in manifest and UNCALIBRATED not in notes:
        notes = [*notes, UNCALIBRATED]
    measured = {cell.key.offered_qps for cell in store.cells()}
    rates = sorted({*manifest["rates"], *(measured & set(plan.rates))})
    return {**manifest, "rates": rates, "repeats": max(manifest["repeats"], plan.repeats), "notes": notes}


def _require_answers(store: RunStore) -> None:
    """Raises UserError where an arm answered nothing at all: its cells are kept, but nobody should build on them."""
    records: dict[str, list[RequestRecord]] = {}
    for cell in store.cells():
        records.setdefault(cell.key.arm, []).extend(cell.records)
    for arm, found in records.items():
        if all(record.status != OK for record in found):
            raise UserError(
                f"arm {arm} answered none of {len(found)} requests ({found[0].error}); check the server, then"
                f" measure again: {store.path} is kept"
            )


def _plan(arguments: argparse.Namespace) -> Plan:
    return Plan(
        rates=parse_rates(arguments.rates),
        repeats=arguments.repeats,
        request_timeout_s=arguments.timeout,
        drain_timeout_s=arguments.drain_timeout,
        first_token_timeout_s=arguments.first_token_timeout,
        connect_timeout_s=arguments.connect_timeout,
        grid_qps=arguments.bisect,
        budget_s=None if arguments.budget is None else 60 * arguments.budget,
        client_processes=arguments.client_processes,
    )


async def _targets(
    arms: Sequence[tuple[str, str]], arguments: argparse.Namespace, api_key: str | None
) -> list[Target]:
    targets = []
    for name, url in arms:
        if arguments.model is None:
            model = await ask_model(url, api_key, arguments.ca_file)
        else:
            await check_reachable(url)
            model = arguments.model
        targets.append(Target(name, url, model, not arguments.plain_openai, api_key, arguments.ca_file))
    return targets


async def _engines(targets: Sequence[Target]) -> dict[str, dict[str, Any]]:
    return {target.name: await describe_server(target) for target in targets}


async def _measure(
    store: RunStore,
    targets: Sequence[Target],
    engines: dict[str, dict[str, Any]],
    trace: Trace,
    plan: Plan,
    arguments: argparse.Namespace,
) -> bool:
    """Measure until done or until the first SIGINT, SIGTERM or SIGHUP."""
    stop = asyncio.Event()
    on_ending(stop.set)
    tell_plan(plan, len(targets), trace.span, sys.stderr, json=arguments.json)
    if not arguments.skip_calibration:
        calibrating = asyncio.create_task(calibrate.brief(trace, min(plan.rates)))

        def end() -> None:
            stop.set()
            calibrating.cancel()

        on_ending(end)
        with contextlib.suppress(asyncio.CancelledError):
            manifest = store.manifest
            calibrate.keep(manifest, await calibrating)
            store.write_manifest(manifest)
            put(sys.stderr, calibrate.error_bar(manifest["client_calibration"]) + "\n")

    with display(sys.stderr, json=arguments.json) as progress:
        return await measure(
            store,
            targets,
            trace,
            plan,
            engines=engines,
            describe=describe_server,
            on_progress=progress,
            stop=stop,
            resumed=arguments.resume,
        )


def _read_key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the API key in {path}: {error}") from error
    if not key.isascii() or not key.isprintable():
        raise UserError(f"the API key in {path} holds what no HTTP header may: give one line of ASCII")
    return key


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


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("run", help="measure OpenAI-compatible servers that are already running")
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="from `trace make`")
    parser.add_argument(
        "--rates", required=True, metavar="Q,Q", help="offered rates, requests a second, like 0.5,1"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the results")
    parser.add_argument(
        "--arm",
        action="append",
        required=True,
        metavar="NAME=URL",
        help="a server, http[s]://HOST:PORT[/v1]; repeat for each arm; the others are compared with the first",
    )
    parser.add_argument(
        "--model", metavar="M", help="model name (default: the one on each server's /v1/models)"
    )
    _add_course(parser)
    _add_time_limits(parser)
    parser.add_argument("--sla", default="15,25", metavar="A,B", help="limits on TTFT, s (default 15,25)")
    parser.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="RULE",
        help="a further limit, NAME=SECONDS[@pPERCENT][:MIN-MAX tokens][/CLASS]; repeat for more",
    )
    parser.add_argument(
        "--fixed-cohort", type=int, metavar="NAME", help="cohort of the headline (default: the middle one)"
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="send the file's content as the bearer token"
    )
    parser.add_argument(
        "--ca-file", type=Path, metavar="FILE", help="PEM authorities for https, in place of the system's"
    )
    parser.add_argument(
        "--shared-cores",
        action="store_true",
        help="client and engine share few CPU cores: a cell counts with the client up to max(50 ms, 5%% of the "
        "median TTFT) late, not only max(10 ms, 1%%)",
    )
    parser.add_argument("--no-preemption", action="store_true", help="a cell with preemptions does not count")
    parser.add_argument(
        "--plain-openai",
        action="store_true",
        help="leave out min_tokens, ignore_eos and cache_salt, for servers that reject them",
    )
    parser.add_argument(
        "--client-processes", type=_count, metavar="N", help="that send (default: as many as the load needs)"
    )
    parser.add_argument("--skip-calibration", action="store_true", help="no error bar of the client's own")
    parser.add_argument("--json", action="store_true", help="events as JSON lines on stdout, no report there")
    parser.set_defaults(run=run)


def _add_course(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeats", type=_count, default=1, metavar="N", help="cells a rate and arm (default 1)"
    )
    parser.add_argument(
        "--bisect",
        type=positive,
        metavar="STEP",
        help="after the walk, close in on each limit's boundary down to this step in QPS, like 0.025",
    )
    parser.add_argument(
        "--budget",
        type=positive,
        metavar="MIN",
        help="start no cell that would not end within so many minutes",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --out; measured cells are kept, never mixed",
    )


def _add_time_limits(parser: argparse.ArgumentParser) -> None:
    for option, default, what in (
        ("--timeout", Timeouts.total_s, "a request fails S s after it was due"),
        ("--first-token-timeout", Timeouts.first_token_s, "it fails without a token S s after it was due"),
        ("--connect-timeout", Timeouts.connect_s, "an attempt to connect fails after S s"),
        (
            "--drain-timeout",
            Plan.drain_timeout_s,
            "wait S s after the last request; a cell with requests left is unstable",
        ),
    ):
        parser.add_argument(
            option, type=positive, default=default, metavar="S", help=f"{what} (default {default:g})"
        )
