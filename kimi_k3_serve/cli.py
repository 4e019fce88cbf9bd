# SPDX-License-Identifier: Apache-2.0
"""`kimi-k3` (or `python -m kimi_k3_serve`): start a server, and the small model it is tested with."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from kimi_k3_serve import launch
from kimi_k3_serve.errors import UserError


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="kimi-k3", description=__doc__)
    commands = root.add_subparsers(dest="command", required=True)

    for name, text in (
        ("serve", "start a vLLM server in the foreground; arguments after -- go to vLLM"),
        ("explain", "print the command line and environment that serve would use"),
    ):
        serve = commands.add_parser(name, help=text, description=text)
        serve.add_argument("--profile", default="cpu", help=f"hardware: {', '.join(launch.profiles())}")
        serve.add_argument("--topology", required=True, help="tpN, dcpN or tpN-dcpM, for example tp2, dcp2")
        serve.add_argument("--model", type=Path, required=True, help="checkpoint folder")
        serve.add_argument(
            "--host", default="127.0.0.1", help="address to listen on (default: loopback only)"
        )
        serve.add_argument("--port", type=int, default=8000)
        serve.add_argument(
            "--kv-cache-memory-bytes",
            type=int,
            default=64 << 20,
            help="KV cache of one rank (default: 64 MiB)",
        )
        serve.add_argument(
            "--proof-dir", type=Path, help="folder for each rank's proof of its active features"
        )
        serve.add_argument("--backend", choices=("dcp", "stock"), default="dcp", help="CPU MLA backend")
        serve.add_argument("extra", nargs="*", help="further vLLM arguments, after --")

    checkpoint = commands.add_parser(
        "checkpoint", help="write the small MLA checkpoint that the CPU runs use"
    )
    checkpoint.add_argument("--out", type=Path, required=True)
    checkpoint.add_argument("--seed", type=int, default=0)

    reference = commands.add_parser(
        "reference", help="greedy tokens and top-20 logprobs from float32 transformers"
    )
    reference.add_argument("--model", type=Path, required=True)
    reference.add_argument(
        "--prompts", type=Path, required=True, help='JSON: [{"id", "prompt", "output_tokens"}]'
    )
    reference.add_argument("--out", type=Path, required=True)

    lock = commands.add_parser(
        "lock", help="compare the installed vLLM with the text this plugin was written for"
    )
    lock.add_argument("action", choices=("verify", "update"))
    return root


def run(args: argparse.Namespace) -> None:
    if args.command == "checkpoint":
        from kimi_k3_serve.checkpoint import write_checkpoint

        write_checkpoint(args.out, args.seed)
        print(args.out)
    elif args.command == "reference":
        from kimi_k3_serve.reference import greedy

        answers = greedy(args.model, json.loads(args.prompts.read_text()))
        args.out.write_text(json.dumps(answers))
    elif args.command == "lock":
        from kimi_k3_serve import source_lock

        if args.action == "update":
            print("\n".join(source_lock.update()) or "nothing has changed")
        else:
            print(source_lock.verify())
    else:
        if args.proof_dir is not None:
            args.proof_dir.mkdir(parents=True, exist_ok=True)
        planned = launch.plan(
            profile=args.profile,
            topology=args.topology,
            model=args.model,
            host=args.host,
            port=args.port,
            kv_cache_memory_bytes=args.kv_cache_memory_bytes,
            proof_dir=args.proof_dir,
            backend=args.backend,
            extra=args.extra,
        )
        if args.command == "explain":
            for name, value in planned.environment.items():
                print(f"{name}={shlex.quote(value)}")
            print(shlex.join(planned.argv))
            return
        os.execvpe(planned.argv[0], planned.argv, {**os.environ, **planned.environment})


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
