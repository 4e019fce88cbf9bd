# SPDX-License-Identifier: Apache-2.0
"""`python -m harness trace`: make, import and show frozen workloads."""

import argparse
from collections import Counter
from pathlib import Path

from harness.arrivals import ARRIVALS
from harness.errors import UserError
from harness.trace import Trace, load_trace, make_trace, save_trace
from harness.workloads import (
    PROMPT_KINDS,
    Columns,
    LimitClass,
    as_words,
    import_log,
    make_shared_prefix,
    read_log,
    with_limit_classes,
)

WORKLOADS = ("uniform", "shared-prefix")


def make(arguments: argparse.Namespace) -> None:
    """`trace make`: draw a trace."""
    _write(_drawn(arguments), arguments)


def import_(arguments: argparse.Namespace) -> None:
    """`trace import`: lengths and gaps of a production log."""
    trace = import_log(
        arguments.log,
        seed=arguments.seed,
        vocab_size=arguments.vocab_size,
        cohort_size=arguments.cohort_size,
        scale=arguments.scale,
        columns=_columns(arguments.columns),
        limit=arguments.requests,
    )
    _write(trace, arguments)
    if qps := trace.header["generator"]["recorded_qps"]:
        print(f"recorded at {qps:.4g} requests a second: offer --rates {qps:.4g} to replay it as it was")


def show(arguments: argparse.Namespace) -> None:
    """`trace show`: what a trace holds."""
    trace = load_trace(arguments.file)
    lengths = sorted(request.prompt_tokens for request in trace.requests)
    outputs = sorted({request.output_tokens for request in trace.requests})
    listed = ", ".join(map(str, outputs)) if len(outputs) <= 5 else f"{outputs[0]} to {outputs[-1]}"
    classes = Counter(request.limit_class for request in trace.requests)
    print(f"workload       {trace.header['generator'].get('name', 'unknown')}")
    print(f"requests       {len(trace.requests)}")
    print(f"prompt tokens  {lengths[0]} to {lengths[-1]}, mean {sum(lengths) / len(lengths):.1f}")
    print(f"output tokens  {listed}")
    print(f"span           {trace.span:.3f} (unit-rate time: divide by the offered rate for seconds)")
    print(f"limit classes  {', '.join(f'{name} {count}' for name, count in sorted(classes.items()))}")
    print(f"scale          {trace.scale:g}")
    print(f"sha256         {trace.sha256}")
    for cohort in trace.cohorts:
        members = [request.prompt_tokens for request in trace.requests if request.cohort == cohort]
        print(f"cohort {cohort:<7} {len(members)} requests, {min(members)} to {max(members)} prompt tokens")


def _drawn(arguments: argparse.Namespace) -> Trace:
    if arguments.workload == "shared-prefix":
        if arguments.shared_tokens is None or arguments.own_tokens is None:
            raise UserError("a shared-prefix workload needs --shared-tokens and --own-tokens")
        if arguments.arrivals == "recorded":
            raise UserError("a shared-prefix workload draws its arrivals; choose another --arrivals")
        return make_shared_prefix(
            requests=arguments.requests,
            shared_tokens=arguments.shared_tokens,
            own_tokens=arguments.own_tokens,
            output_tokens=arguments.output_tokens,
            prefixes=arguments.prefixes,
            cohort_size=arguments.cohort_size,
            arrivals=arguments.arrivals,
            seed=arguments.seed,
            vocab_size=arguments.vocab_size,
            scale=arguments.scale,
            burstiness=arguments.burstiness,
        )
    if arguments.min_tokens is None or arguments.max_tokens is None:
        raise UserError("a uniform workload needs --min-tokens and --max-tokens")
    if (arguments.arrivals == "recorded") != (arguments.arrivals_log is not None):
        raise UserError("--arrivals recorded and --arrivals-log FILE belong together")
    recorded = []
    if arguments.arrivals_log is not None:
        rows = read_log(arguments.arrivals_log, _columns(arguments.columns))
        recorded = [row.time_s for row in rows]
    return make_trace(
        requests=arguments.requests,
        min_tokens=arguments.min_tokens,
        max_tokens=arguments.max_tokens,
        output_tokens=arguments.output_tokens,
        cohort_size=arguments.cohort_size,
        arrivals=arguments.arrivals,
        seed=arguments.seed,
        vocab_size=arguments.vocab_size,
        scale=arguments.scale,
        burstiness=arguments.burstiness,
        recorded_s=recorded,
    )


def _write(trace: Trace, arguments: argparse.Namespace) -> None:
    if arguments.prompts != "tokens":
        if arguments.tokenizer is None:
            raise UserError(f"--prompts {arguments.prompts} needs --tokenizer, the model's folder")
        trace = as_words(trace, arguments.prompts, arguments.tokenizer)
    if arguments.limit_class:
        trace = with_limit_classes(trace, [LimitClass.parse(text) for text in arguments.limit_class])
    try:
        save_trace(trace, arguments.out)
    except OSError as error:
        raise UserError(f"cannot write {arguments.out}: {error.strerror}; choose another --out") from error
    print(f"{arguments.out}: {len(trace.requests)} requests, sha256 {trace.sha256}")


def _columns(text: str | None) -> Columns:
    if text is None:
        return Columns()
    names = text.split(",")
    if len(names) != 3:
        raise UserError(f"--columns {text!r} is not usable; name three: time,prompt tokens,output tokens")
    return Columns(*names)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verbs = commands.add_parser("trace", help="make, import or show a frozen workload").add_subparsers(
        required=True, metavar="make|import|show"
    )
    made = verbs.add_parser("make", help="draw a trace and write it with its hash")
    made.add_argument("--workload", choices=WORKLOADS, default="uniform", help="(default: uniform)")
    made.add_argument("--requests", type=int, required=True, metavar="N", help="number of requests")
    made.add_argument("--min-tokens", type=int, metavar="A", help="uniform: shortest prompt, before --scale")
    made.add_argument("--max-tokens", type=int, metavar="B", help="uniform: longest prompt, before --scale")
    made.add_argument("--shared-tokens", type=int, metavar="A", help="shared-prefix: of the common prefix")
    made.add_argument("--own-tokens", type=int, metavar="B", help="shared-prefix: of each request's own part")
    made.add_argument("--prefixes", type=int, default=1, metavar="P", help="shared-prefix: how many (1)")
    made.add_argument(
        "--output-tokens", type=int, required=True, metavar="M", help="tokens to generate a request"
    )
    made.add_argument("--arrivals", choices=ARRIVALS, required=True, help="gaps between requests")
    made.add_argument(
        "--burstiness",
        type=float,
        metavar="B",
        help="gamma: shape of the gaps; 1 is Poisson, less is burstier",
    )
    made.add_argument(
        "--arrivals-log", type=Path, metavar="FILE", help="recorded: a log, as `import` reads it"
    )
    made.set_defaults(run=make)

    imported = verbs.add_parser(
        "import",
        help="make a trace of a production log",
        description="Lengths and gaps come from the log, prompts are random tokens. The log is CSV with a header"
        " line, or JSON Lines; times are seconds or ISO 8601.",
    )
    imported.add_argument("log", type=Path, metavar="LOG", help="CSV or JSON Lines")
    imported.add_argument("--requests", type=int, metavar="N", help="the first N of the log (default: all)")
    imported.set_defaults(run=import_)

    for verb in (made, imported):
        verb.add_argument(
            "--out", type=Path, required=True, metavar="FILE", help="JSON Lines; gzip if it ends in .gz"
        )
        verb.add_argument(
            "--cohort-size", type=int, required=True, metavar="K", help="consecutive requests in a cohort"
        )
        verb.add_argument(
            "--seed", type=int, required=True, metavar="S", help="the same seed gives the same trace"
        )
        verb.add_argument(
            "--vocab-size", type=int, required=True, metavar="V", help="token ids are drawn from [3, V)"
        )
        verb.add_argument(
            "--scale", type=float, default=1.0, metavar="X", help="factor on prompt lengths (default 1.0)"
        )
        verb.add_argument(
            "--columns",
            metavar="T,P,O",
            help="what a log calls time, prompt and output tokens (time,prompt_tokens,output_tokens)",
        )
        verb.add_argument(
            "--limit-class",
            action="append",
            metavar="NAME=A-B",
            help="a class for prompts of A to B tokens, for --limit of `run`; repeat for more",
        )
        verb.add_argument(
            "--prompts", choices=PROMPT_KINDS, default="tokens", help="what is sent (default: token ids)"
        )
        verb.add_argument(
            "--tokenizer",
            type=Path,
            metavar="DIR",
            help="for text and chat: the model's folder, to count with",
        )
    shown = verbs.add_parser("show", help="count, lengths, cohorts, classes and sha256 of a trace")
    shown.add_argument("file", type=Path, metavar="FILE")
    shown.set_defaults(run=show)
