# SPDX-License-Identifier: Apache-2.0
"""Long contexts on servers that already run: TTFT of a lone prompt, and time between tokens at 1 and N contexts.

    python benchmarks/long_context.py --arm tp2=http://127.0.0.1:8001 --arm dcp2=http://127.0.0.1:8002 --json out.json
    python benchmarks/long_context.py --read results/RUN/long_context-1.json      # what lone prompts of a record say

Closed loop: every arm is asked the same random prompts, arms in turns, a cache salt each. TTFT: --repeats prompts, one
at a time, seconds from sending to the first token. TPOT: median time between tokens of each of them, and of --contexts
prompts at once once all of them decode, milliseconds. What `bench --resident --lone-prompts` does on its own engines.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.engines.endpoint import ask_model
from harness.load import Target
from harness.long_context import (
    between_text,
    lone,
    lone_text,
    paired_texts,
    prompts,
    question,
    session,
    stream,
    together,
)
from harness.options import parse_arm


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every arm's numbers, in the order given."""
    targets = [
        Target(name, url, await ask_model(url, None)) for name, url in (parse_arm(text) for text in args.arm)
    ]
    (first_ever,) = prompts(args.seed + 1, 1, args.tokens // 6, args.vocab_size)
    async with session() as client:  # compiles kernels
        await asyncio.gather(*(stream(client, question(target, first_ever, 4)) for target in targets))
    asked = prompts(args.seed, max(args.repeats, args.contexts), args.tokens, args.vocab_size)
    alone = await lone(targets, asked[: args.repeats])
    found: dict[str, Any] = {"tokens": args.tokens, "lone": alone}
    if args.contexts:
        arms = {
            target.name: await together(target, asked[: args.contexts], args.chunk_tokens)
            for target in targets
        }
        found["together"] = {"contexts": args.contexts, "arms": arms}
    return found


def told(found: Mapping[str, Any]) -> Iterator[str]:
    """A record in lines: every arm, then every two arms."""
    lone = found.get("lone") or {}
    for name, alone in lone.items():
        yield f"{name} (n = {len(alone['ttft_s'])}): {lone_text(alone)}"
    together = found.get("together") or {}
    for name, times in together.get("arms", {}).items():
        yield f"{name}: {together['contexts']} contexts at once, {between_text(times['tpot_ms'])}"
    yield from paired_texts(lone)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--arm", action="append", metavar="NAME=URL")
    what.add_argument("--read", type=Path, metavar="RECORD", help="asks nobody")
    parser.add_argument("--tokens", type=int, default=120_000, help="of each prompt")
    parser.add_argument("--contexts", type=int, default=8, help="at once; 0 leaves them out")
    parser.add_argument(
        "--chunk-tokens", type=int, default=8192, help="the servers' --max-num-batched-tokens"
    )
    parser.add_argument("--repeats", type=int, default=4, help="lone prompts, at least 1")
    parser.add_argument("--vocab-size", type=int, default=160_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = json.loads(args.read.read_text()) if args.read else asyncio.run(measure(args))
    lines = list(told(found))
    if not lines:
        sys.exit(f"{args.read} holds neither lone prompts nor contexts at once; name a long_context-N.json")
    print("\n".join(lines))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
