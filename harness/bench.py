# SPDX-License-Identifier: Apache-2.0
"""`python -m harness bench`: a TP2 / DCP2 pair on this machine, end to end, and its report."""

import argparse
import math
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from harness import gpu_bench, resident_bench
from harness.engines import in_image, process
from harness.errors import UserError
from harness.options import parse_counts, parse_limits, parse_rates, parse_words
from harness.pair import SOURCE_TOKENS, Options, PairRun
from harness.parity import PROMPT_LENGTHS
from harness.resident_bench import arms_of
from harness.session import carry_out

PROGRAM = shlex.join([sys.executable, "-m", "kimi_k3_serve"])
ARMS = "tp2,dcp2"
SCALE = 0.01


@dataclass(frozen=True)
class Size:
    """How much is measured, where the command line does not say."""

    rates: str
    requests: int
    cohort_size: int
    output_tokens: int
    parity_lengths: tuple[int, ...]


FULL = Size("0.3,0.6,0.9,1.2", requests=24, cohort_size=6, output_tokens=48, parity_lengths=PROMPT_LENGTHS)
MAX_SCALE = 0.09
"""180,000 tokens at this scale still fit the small model's 16,384 positions."""
QUICK = Size("0.5,1.2", requests=8, cohort_size=4, output_tokens=16, parity_lengths=(40, 505, 1290))


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser(
        "bench",
        help="start, check and measure a pair of arms on this machine (what `make bench` runs)",
        description="Serves a small checkpoint with each arm in turn, checks that the arms agree with each "
        "other and with a float32 reference, replays one trace at the same rates on both, and reports.",
    )
    bench.add_argument(
        "--arms", metavar="A,B", help=f"the others are compared with the first ({ARMS}; on GPUs theirs)"
    )
    bench.add_argument(
        "--rates",
        metavar="F,F",
        help=f"offered rates as fractions of the first arm's capacity ({FULL.rates})",
    )
    bench.add_argument("--absolute-rates", action="store_true", help="--rates are in requests a second")
    bench.add_argument(
        "--sla", metavar="A,B", help="limits on TTFT, s (default: 4.8 and 8 times the unloaded P50)"
    )
    bench.add_argument(
        "--scale", type=float, metavar="X", help=f"of 60,000-180,000 tokens ({SCALE:g}; 1 on GPUs)"
    )
    bench.add_argument("--requests", type=int, metavar="N", help=f"of the trace ({FULL.requests})")
    bench.add_argument("--cohort-size", type=int, metavar="K", help=f"requests ({FULL.cohort_size})")
    bench.add_argument("--output-tokens", type=int, metavar="M", help=f"a request ({FULL.output_tokens})")
    bench.add_argument(
        "--kv-cache-memory-bytes",
        type=int,
        metavar="N",
        help="KV cache of a rank (default 16 MiB, and in proportion above a scale of 0.01)",
    )
    bench.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of traces and parity prompts (default 0)"
    )
    bench.add_argument("--out", type=Path, metavar="DIR", help="new folder (default: results/<UTC time>)")
    bench.add_argument(
        "--quick", action="store_true", help="few requests at two rates, to see that everything works"
    )
    bench.add_argument(
        "--engine-command",
        default=PROGRAM,
        metavar="COMMAND",
        help="what offers `serve`, `checkpoint` and `reference` (default: kimi_k3_serve)",
    )
    bench.add_argument(
        "--cache", type=Path, default=Path(".cache"), metavar="DIR", help="for the checkpoint (.cache)"
    )
    bench.add_argument(
        "--launches",
        type=int,
        default=1,
        metavar="N",
        help="of each engine, alternating A B B A: from 2 on the noise between launches is known (default 1)",
    )
    bench.add_argument(
        "--resume", action="store_true", help="go on with the run in --out; measured cells are kept"
    )
    bench.add_argument(
        "--image", metavar="NAME", help="serve each arm from this image with the Docker engine (by digest)"
    )
    bench.add_argument(
        "--bisect",
        type=float,
        metavar="STEP",
        help="with --resident: after the walk, close in on each limit's boundary down to this step in QPS, like 0.025",
    )
    bench.add_argument("--json", action="store_true", help="events as JSON lines on stdout, no report there")
    resident_bench.add_arguments(bench)
    gpu_bench.add_arguments(bench)
    bench.set_defaults(run=run)


def options_from(arguments: argparse.Namespace) -> Options:
    """Raises UserError for an unknown arm, a rate or limit that is not usable."""
    if arguments.launches < 1:
        raise UserError(f"--launches is {arguments.launches}; give at least 1")
    for option in ("budget", "bisect"):
        if (value := getattr(arguments, option)) is not None and not 0 < value < math.inf:
            raise UserError(f"--{option} is {value:g}; give a positive number")
    if arguments.bisect and not arguments.resident:
        raise UserError(
            "--bisect needs --resident: else every rate that it chooses would restart each engine"
        )
    if arguments.resume and not arguments.out:
        raise UserError("--resume needs the run to go on with; name it with --out")
    size = QUICK if arguments.quick else FULL
    arguments.arms = arguments.arms or ARMS
    arms = arms_of(arguments.arms)
    if variant := next((arm.name for arm in arms if arm.name != arm.topology_name), None):
        raise UserError(f"arm {variant} needs GPUs; use tpN and dcpN on the CPU")
    arguments.scale = SCALE if arguments.scale is None else arguments.scale
    return Options(
        out=arguments.out or Path("results") / time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
        arms=arms,
        rates=parse_rates(arguments.rates or size.rates),
        absolute_rates=arguments.absolute_rates,
        limits_s=parse_limits(arguments.sla) if arguments.sla else None,
        scale=arguments.scale,
        requests=size.requests if arguments.requests is None else arguments.requests,
        cohort_size=size.cohort_size if arguments.cohort_size is None else arguments.cohort_size,
        output_tokens=size.output_tokens if arguments.output_tokens is None else arguments.output_tokens,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes or default_kv_bytes(arguments.scale),
        parity_lengths=parse_counts(arguments.parity_lengths)
        if arguments.parity_lengths
        else size.parity_lengths,
        seed=arguments.seed,
        program=parse_words(arguments.engine_command, "--engine-command"),
        cache=arguments.cache,
        launches=arguments.launches,
        resume=arguments.resume,
        start_engine=in_image.starter(arguments.image) if arguments.image else process.start,
        budget_s=None if arguments.budget is None else 60 * arguments.budget,
        bisect_qps=arguments.bisect,
        json=arguments.json,
    )


def default_kv_bytes(scale: float) -> int:
    """KV cache of a rank in bytes: room for about two of the longest requests, so that capacity binds.

    Raises UserError for a scale that the small model's positions do not allow.
    """
    if not 0 < scale <= MAX_SCALE:
        raise UserError(
            f"--scale {scale:g} is not usable; the small model takes more than 0, up to {MAX_SCALE}"
        )
    return round((16 << 20) * max(1.0, scale / 0.01))


def run(arguments: argparse.Namespace) -> None:
    """Measures and reports; whatever ends the measurement, what was kept is reported first."""
    if gpu_bench.wanted(arguments, PROGRAM):
        return gpu_bench.run(arguments)
    options = options_from(arguments)
    if arguments.dry_run:
        return print(describe(options))
    if arguments.resident:
        return resident_bench.run_on_cpu(arguments, options)
    carry_out(PairRun(options, sys.stderr), options.out, json=options.json)


def describe(options: Options) -> str:
    """What a run would do, in order."""
    rates = ", ".join(f"{rate:g}" for rate in options.rates)
    unit = "QPS" if options.absolute_rates else f"of the capacity of {options.arms[0].name}"
    low, high = (round(tokens * options.scale) for tokens in SOURCE_TOKENS)
    lines = [f"write the checkpoint below {options.cache} and ask the float32 reference"]
    lines.append(
        f"trace: {options.requests} requests of {low}-{high} tokens, {options.output_tokens} output tokens"
    )
    for arm in options.arms:
        lines.append(f"arm {arm.name}: {shlex.join([*options.program, 'serve', '--topology', arm.name])} ...")
        lines.append(
            f"  proof of every rank, parity of {len(options.parity_lengths)} prompts, rates {rates} {unit}"
        )
    return "\n".join([*lines, f"report in {options.out}"])
