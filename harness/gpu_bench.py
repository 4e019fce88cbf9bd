# SPDX-License-Identifier: Apache-2.0
"""The pair on a host with GPUs: the source's own workload and limits, on as much of the model as the GPUs hold.

With fewer GPUs than the model needs, a slice of it is served (slices.py): fewer layers, real widths, weights that
follow from their names. Two ways:

    process    the vLLM of this environment, all arms' engines at once (resident.py): a slice on two or eight GPUs
    docker     an image by digest, one arm after the other, with the whole checkpoint or a slice

Both compare their arms with each other and with themselves; a slice's float32 reference needs a GPU of its own and is
asked afterwards (`kimi_k3_serve.slice_reference`). Grade: research for docker, of which planning, --dry-run and, with a
stand-in, the course of a run are tested.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import docker_pair
from harness.arms import Arm
from harness.errors import UserError
from harness.nvidia import visible_gpus
from harness.options import parse_counts, parse_rates, parse_words
from harness.pair import SOURCE_TOKENS, Options
from harness.resident import ResidentRun
from harness.resident_bench import BF16, PARITY_TOKENS, arms_of, resident_options, tolerance_of
from harness.resident_options import ResidentOptions
from harness.serving import longest_context, on_gpus
from harness.session import carry_out
from harness.sla import SOURCE_LIMITS_S
from harness.slices import FULL_ATTENTION, VOCAB_SIZE, write_slice

PROFILES = {  # (part of the GPU's name, how many) -> profile, arms
    ("B300", 8): ("b300-8", ("tp8", "dcp8")),
    ("RTX PRO 6000", 16): ("rtx6000-16", ("tp16", "dcp16")),
    ("H200", 8): ("slice-h200-8", ("tp8", "dcp8", "dcp8-stock")),
    ("H200", 2): ("slice-h200-2", ("tp2", "dcp2", "dcp2-stock", "dcp2-shard")),
}
GIB = 1 << 30
READY_TIMEOUT_S = 1800.0
ANSWER_ROOM = 512  # tokens of an answer to a parity prompt or a long one
LEAST_START_S = 300.0
START_SHARE = 0.6  # of a --budget: a start that takes longer leaves no time to measure


@dataclass(frozen=True)
class Load:
    """What is asked of a model, where the command line does not say. `kv_bytes` of one rank."""

    rates: str
    requests: int
    cohort_size: int
    output_tokens: int
    kv_bytes: int


WHOLE = Load("0.5,0.7,0.9,1.0,1.15", requests=60, cohort_size=5, output_tokens=400, kv_bytes=0)
"""Rates around the source's crossing; the KV cache is what the image's profile leaves for it."""
SLICES = {
    "kimi-k3": Load("0.15,0.3", requests=20, cohort_size=5, output_tokens=32, kv_bytes=GIB),
    "mla": Load("0.1,0.2", requests=20, cohort_size=5, output_tokens=32, kv_bytes=round(3.6 * GIB)),
}
SLICE_RANKS = 2
"""One rate far below what so many H200 serve of the slice, and one near it, with enough requests for a growing backlog
to show (validity.py). TP2 keeps about 420,000 tokens: three of the longest prompts are more."""
PARITY_LENGTHS = (40, 513, 1800, 4100, 9000, 20_000, 33_000, 60_000)
"""Around blocks and chunks of 8,192 tokens, and across several of them."""


def choose(gpus: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Profile and arms for a host's GPUs.

    Raises:
        UserError: there is no pair for them.
    """
    for (name, count), found in PROFILES.items():
        if len(gpus) == count and all(name in gpu for gpu in gpus):
            return found
    offered = ", ".join(f"{count}x {name}" for name, count in PROFILES)
    raise UserError(
        f"no pair is known for {len(gpus)}x {gpus[0]} (known: {offered}); name --profile and --arms"
    )


def add_arguments(bench: argparse.ArgumentParser) -> None:
    group = bench.add_argument_group("on GPUs")
    group.add_argument(
        "--gpu", action="store_true", help="serve on this host's GPUs (default: where there are some)"
    )
    group.add_argument("--cpu", action="store_true", help="serve the small checkpoint, GPUs or not")
    group.add_argument(
        "--engine", choices=("process", "docker"), help="default: docker with --image, else process"
    )
    group.add_argument("--profile", help="of the launcher (default: by this host's GPUs)")
    group.add_argument(
        "--slice", choices=tuple(FULL_ATTENTION), default="kimi-k3", help="of the model (default kimi-k3)"
    )
    group.add_argument("--model", type=Path, metavar="DIR", help="a checkpoint, in place of a slice")
    group.add_argument("--eager", action="store_true", help="no CUDA graphs in decode steps")
    group.add_argument(
        "--engine-arguments", default="", metavar="WORDS", help="further vLLM arguments of every arm"
    )
    group.add_argument("--dry-run", action="store_true", help="print everything that would be done")


def wanted(arguments: argparse.Namespace, default_program: str) -> bool:
    """Whether the pair goes to GPUs: asked for, or there are some and nothing speaks against it."""
    if arguments.gpu:
        return True
    own_program = arguments.engine_command != default_program
    return not (arguments.cpu or own_program or arguments.image or arguments.resident) and bool(
        visible_gpus()
    )


def run(arguments: argparse.Namespace) -> None:
    """Prints the plan; without --dry-run carries it out and reports."""
    profile, names = profile_of(arguments, visible_gpus())
    arms = arms_of(",".join(names))
    if (arguments.engine or ("docker" if arguments.image else "process")) == "docker":
        plan = docker_plan(arguments, profile, arms)
        print(plan.describe())
        if not arguments.dry_run:
            carry_out(docker_pair.DockerRun(plan), plan.out, json=arguments.json)
        return
    arguments.arms = ",".join(names)
    options, resident = resident_plan(arguments, profile, arms)
    print(describe(options, resident), flush=True, file=sys.stderr if options.json else sys.stdout)
    if not arguments.dry_run:
        carry_out(ResidentRun(options, resident, sys.stderr), options.out, json=options.json)


def profile_of(arguments: argparse.Namespace, gpus: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """As named, else by the GPUs. Raises UserError where neither says."""
    if arguments.profile:
        known = dict(PROFILES.values())
        names = tuple(arguments.arms.split(",")) if arguments.arms else known.get(arguments.profile)
        if names is None:
            raise UserError(f"--profile {arguments.profile} needs --arms, for example --arms tp8,dcp8")
        return arguments.profile, names
    if not gpus:
        raise UserError(
            "no GPU is visible; without --gpu the pair runs on the CPU, or name --profile to plan"
        )
    profile, names = choose(gpus)
    return profile, tuple(arguments.arms.split(",")) if arguments.arms else names


def rates_of(arguments: argparse.Namespace, load: Load, arms: Sequence[Arm]) -> tuple[float, ...]:
    """As asked for, else the load's own, a slice's in proportion to the ranks that serve it."""
    if arguments.rates or load is WHOLE:
        return parse_rates(arguments.rates or load.rates)
    return tuple(rate * arms[0].tp / SLICE_RANKS for rate in parse_rates(load.rates))


def docker_plan(arguments: argparse.Namespace, profile: str, arms: tuple[Arm, ...]) -> docker_pair.DockerPlan:
    """Raises UserError for what is missing."""
    if not arguments.image:
        raise UserError("--engine docker serves from an image; name it with --image kimi-k3-serve@sha256:…")
    model = arguments.model
    if model is not None and not (model / "config.json").is_file():
        raise UserError("--model DIR holds no config.json; give a checkpoint's folder")
    if model is None and not profile.startswith("slice-"):
        raise UserError(f"{profile} serves the whole model; give its checkpoint with --model DIR")
    load = WHOLE if model is not None else SLICES[arguments.slice]
    return docker_pair.DockerPlan(
        image=arguments.image,
        profile=profile,
        arms=arms,
        model=model or write_slice(arguments.slice, arguments.cache),
        seeded=model is None,
        rates=rates_of(arguments, load, arms),
        requests=arguments.requests or load.requests,
        cohort_size=arguments.cohort_size or load.cohort_size,
        output_tokens=arguments.output_tokens or load.output_tokens,
        kv_bytes=arguments.kv_cache_memory_bytes or load.kv_bytes,
        out=arguments.out or Path("results") / f"{profile}-pair",
        seed=arguments.seed,
        parity_lengths=parity_lengths_of(arguments),
        parity_tokens=arguments.parity_tokens or PARITY_TOKENS,
        tolerance=tolerance_of(arguments, BF16),
        despite_refusal=arguments.despite_refusal,
    )


def parity_lengths_of(arguments: argparse.Namespace) -> tuple[int, ...]:
    return parse_counts(arguments.parity_lengths) if arguments.parity_lengths else PARITY_LENGTHS


def resident_plan(
    arguments: argparse.Namespace, profile: str, arms: tuple[Arm, ...]
) -> tuple[Options, ResidentOptions]:
    """Raises UserError for what is missing."""
    if arguments.model is not None:
        raise UserError("--model is served from an image; name one with --image, or choose a --slice")
    if not profile.startswith("slice-"):
        raise UserError(f"{profile} serves the whole model; name an image with --image and --model DIR")
    load, scale = SLICES[arguments.slice], 1.0 if arguments.scale is None else arguments.scale
    arguments.scale = scale
    options = Options(
        out=arguments.out or Path("results") / f"{profile.removeprefix('slice-')}-{arguments.slice}",
        arms=arms,
        rates=rates_of(arguments, load, arms),
        absolute_rates=True,
        limits_s=(SOURCE_LIMITS_S["15"], SOURCE_LIMITS_S["25"]),
        scale=scale,
        requests=arguments.requests or load.requests,
        cohort_size=arguments.cohort_size or load.cohort_size,
        output_tokens=arguments.output_tokens or load.output_tokens,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes or load.kv_bytes,
        parity_lengths=parity_lengths_of(arguments),
        seed=arguments.seed,
        program=parse_words(arguments.engine_command, "--engine-command"),
        cache=arguments.cache,
        resume=arguments.resume,
        bisect_qps=arguments.bisect,
        json=arguments.json,
    )
    others = (length + ANSWER_ROOM for length in (*options.parity_lengths, arguments.context_tokens or 0))
    serving = on_gpus(
        options.program,
        profile,
        write_slice(arguments.slice, arguments.cache),
        options.kv_cache_memory_bytes,
        longest_context(SOURCE_TOKENS[1], scale, options.output_tokens, *others),
        seeded=True,
        graphs=not arguments.eager,
        extra=parse_words(arguments.engine_arguments, "--engine-arguments"),
        ready_timeout_s=READY_TIMEOUT_S
        if arguments.budget is None
        else min(READY_TIMEOUT_S, max(LEAST_START_S, START_SHARE * 60 * arguments.budget)),
    )
    return options, resident_options(arguments, serving, VOCAB_SIZE)


def describe(options: Options, resident: ResidentOptions) -> str:
    """Every step of a resident run, with the command line that starts each arm."""
    serving = resident.serving
    low, high = (round(tokens * options.scale) for tokens in SOURCE_TOKENS)
    lines = [
        f"trace: {options.requests} requests of {low}-{high} prompt tokens and {options.output_tokens} output"
        f" tokens, {resident.arrivals} arrivals, cohorts of {options.cohort_size}, seed {options.seed}",
        f"limits: {', '.join(f'{limit:g} s' for limit in SOURCE_LIMITS_S.values())} on TTFT, the source's own",
        f"KV cache: {options.kv_cache_memory_bytes:,} bytes of each rank in every arm",
        "start all arms at once, until every rank has written its proof:",
    ]
    for arm in options.arms:
        setting = [f"{name}={value}" for name, value in serving.environment(arm).items()]
        proof = options.out / "proof" / arm.name
        lines.append(f"  {arm.name}: {shlex.join([*setting, *serving.argv(arm, 8000, proof)])}")
    lengths = ", ".join(f"{length:,}" for length in options.parity_lengths)
    lines.append(
        f"parity: prompts of {lengths} tokens, {resident.parity_tokens} tokens each, alone and at once beside"
        f" prefills of {resident.prefill_tokens:,} tokens; tolerance {resident.tolerance.logprob:g} nats"
    )
    if resident.lone_prompts or resident.contexts:
        lines.append(
            f"long contexts: {resident.lone_prompts} prompts of {resident.context_tokens:,} tokens to each arm alone,"
            f" {resident.contexts} at once"
        )
    seconds = 0.0
    for repeat in range(resident.repeats):
        for rate in options.rates:
            took = options.requests / rate
            seconds += took * len(options.arms)
            lines += [
                f"  cell {arm.name} @ {rate:g} QPS, repeat {repeat}, {took:.0f} s" for arm in options.arms
            ]
    if resident.kill:
        lines.append(f"SIGKILL for one rank of {resident.kill} in the middle of its first cell")
    lines.append(f"report in {options.out}; about {seconds / 60:.0f} min of load, and the engines' start")
    return "\n".join(lines)
