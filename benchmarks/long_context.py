# SPDX-License-Identifier: Apache-2.0
"""Long contexts on servers that already run: TTFT of a lone prompt, and time between tokens at 1 and N contexts.

    python benchmarks/long_context.py --arm tp2=http://127.0.0.1:8001 --arm dcp2=http://127.0.0.1:8002 --json out.json

Closed loop: every arm is asked the same random prompts, arms in turns, a cache salt each. TTFT: --repeats prompts, one
at a time, seconds from sending to the first token. TPOT: median time between tokens of each of them, and of --contexts
prompts at once once all of them decode, milliseconds. What `bench --resident --lone-prompts` does on its own engines.
"""

import argparse
import asyncio
import json
from pathlib import Path
from statistics import median
from typing import Any

from harness.engines.endpoint import ask_model
from harness.load import Target
from harness.long_context import lone, paired_text, prompts, session, stream, together
from harness.options import parse_arm


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every arm's numbers, in the order given."""
    targets = [
        Target(name, url, await ask_model(url, None)) for name, url in (parse_arm(text) for text in args.arm)
    ]
    (first_ever,) = prompts(args.seed + 1, 1, args.tokens // 6, args.vocab_size)
    async with session() as client:  # compiles kernels
        await asyncio.gather(*(stream(client, target, first_ever, 4) for target in targets))
    asked = prompts(args.seed, max(args.repeats, args.contexts), args.tokens, args.vocab_size)
    alone = await lone(targets, asked[: args.repeats])
    found: dict[str, Any] = {"tokens": args.tokens, "lone": alone, "contexts": args.contexts, "together": {}}
    for target in targets:
        if args.contexts:
            found["together"][target.name] = await together(target, asked[: args.contexts], args.chunk_tokens)
        times = {"1": median(alone[target.name]["tpot_ms"])}
        if args.contexts:
            times[str(args.contexts)] = found["together"][target.name]["tpot_ms"]
        print(
            f"{target.name}: P50 TTFT {median(alone[target.name]['ttft_s']):.4f} s, ms between tokens {times}"
        )
    for target in targets[1:]:
        print(paired_text(targets[0].name, target.name, alone))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", action="append", required=True, metavar="NAME=URL")
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
    found = asyncio.run(measure(args))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
