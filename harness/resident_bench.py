# SPDX-License-Identifier: Apache-2.0
"""What `bench --resident` adds to the command line: all arms' engines at once, on this machine's cores or GPUs."""

import argparse
import asyncio
import json
import math
import sys
import time

from harness.arms import Arm
from harness.arrivals import ARRIVALS
from harness.engines import process
from harness.errors import UserError
from harness.pair import Options
from harness.parity import EXACT, OUTPUT_TOKENS, Tolerance
from harness.prepare import make_checkpoint
from harness.resident import ResidentRun
from harness.resident_options import ResidentOptions
from harness.serving import Serving, on_cpu
from harness.session import carry_out

BF16 = Tolerance(logprob=0.3)
"""Of slices in BF16: what rounding in another order moves with the seeded weights, with room (docs/decode.md)."""


PARITY_TOKENS = 32
"""Of each answer on GPUs."""


def add_arguments(bench: argparse.ArgumentParser) -> None:
    group = bench.add_argument_group("all arms' engines at once")
    group.add_argument(
        "--resident", action="store_true", help="start every arm first; cells alternate (always with GPUs)"
    )
    group.add_argument("--repeats", type=int, default=1, metavar="N", help="of each cell (default 1)")
    group.add_argument(
        "--budget", type=float, metavar="MIN", help="end so many minutes from now; see --resume"
    )
    group.add_argument("--kill", metavar="ARM", help="SIGKILL a rank of this arm in the middle of a cell")
    group.add_argument(
        "--lone-prompts", type=int, default=0, metavar="N", help="long prompts to each arm, one at a time"
    )
    group.add_argument(
        "--contexts", type=int, default=0, metavar="N", help="long contexts to each arm, at once"
    )
    group.add_argument("--context-tokens", type=int, metavar="N", help="of a long prompt (120,000 x scale)")
    group.add_argument("--arrivals", choices=ARRIVALS[:2], default="poisson", help="of the trace (poisson)")
    group.add_argument("--parity-lengths", metavar="N,N", help="tokens of parity prompts")
    group.add_argument("--parity-tokens", type=int, metavar="N", help="of each answer (32 on GPUs)")
    group.add_argument(
        "--parity-tolerance", type=float, metavar="NATS", help=f"of a logprob (BF16: {BF16.logprob})"
    )
    group.add_argument(
        "--warm-up-together",
        action="store_true",
        help="all arms compile kernels at once: sooner, but tuned beside each other",
    )
    group.add_argument(
        "--despite-refusal", action="store_true", help="time arms that disagree, to find out why"
    )


def resident_options(arguments: argparse.Namespace, serving: Serving, vocab_size: int) -> ResidentOptions:
    """Raises UserError for a count that is not usable and an arm that is not there."""
    if arguments.repeats < 1:
        raise UserError(f"--repeats is {arguments.repeats}; give at least 1")
    if arguments.kill and arguments.kill not in arguments.arms.split(","):
        raise UserError(f"--kill {arguments.kill} is none of the arms {arguments.arms}")
    if arguments.lone_prompts < 0 or arguments.contexts < 0:
        raise UserError("--lone-prompts and --contexts count prompts; give 0 or more")
    if (arguments.context_tokens or 1) < 1:
        raise UserError(f"--context-tokens is {arguments.context_tokens}; give at least 1")
    return ResidentOptions(
        serving=serving,
        vocab_size=vocab_size,
        arrivals=arguments.arrivals,
        repeats=arguments.repeats,
        lone_prompts=arguments.lone_prompts,
        contexts=arguments.contexts,
        context_tokens=arguments.context_tokens or round(120_000 * arguments.scale),
        parity_tokens=(arguments.parity_tokens or PARITY_TOKENS) if serving.gpu else OUTPUT_TOKENS,
        prefill_tokens=round(120_000 * arguments.scale) if serving.gpu else 700,
        tolerance=tolerance_of(arguments, BF16 if serving.gpu else EXACT),
        deadline_s=time.monotonic() + 60 * arguments.budget if arguments.budget else None,
        kill=arguments.kill,
        warm_up_together=arguments.warm_up_together,
        despite_refusal=arguments.despite_refusal,
    )


def tolerance_of(arguments: argparse.Namespace, default: Tolerance) -> Tolerance:
    """Of parity, as asked for or the default. Raises UserError for one that is not usable."""
    asked = arguments.parity_tolerance
    if asked is not None and not 0 < asked < math.inf:
        raise UserError(f"--parity-tolerance is {asked:g}; give a positive number of nats")
    return default if asked is None else Tolerance(logprob=asked)


def run_on_cpu(arguments: argparse.Namespace, options: Options) -> None:
    """As `bench`, with all engines at once. Raises UserError where something is in the way."""
    if options.start_engine is not process.start:
        raise UserError("--resident starts processes; leave --image out")
    model = asyncio.run(
        make_checkpoint(
            options.program,
            options.cache,
            lambda text: print(text, file=sys.stderr),
            ranks=max(arm.tp for arm in options.arms),
        )
    )
    serving = on_cpu(options.program, model, options.kv_cache_memory_bytes, options.max_model_len)
    vocab_size = json.loads((model / "config.json").read_bytes())["vocab_size"]
    resident = resident_options(arguments, serving, vocab_size)
    carry_out(ResidentRun(options, resident, sys.stderr), options.out, json=options.json)


def arms_of(names: str) -> tuple[Arm, ...]:
    """`tp2,dcp2`; raises UserError for a name that is not an arm's, or given twice."""
    listed = names.split(",")
    if len(set(listed)) < len(listed):
        raise UserError(f"--arms {names} names an arm twice; name each once")
    return tuple(Arm.parse(name) for name in listed)
