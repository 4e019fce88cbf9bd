# SPDX-License-Identifier: Apache-2.0
"""Long contexts on servers that already run: TTFT of a lone prompt, and time between tokens at 1 and N contexts.

    python benchmarks/long_context.py --arm tp2=http://127.0.0.1:8001 --arm dcp2=http://127.0.0.1:8002 --json out.json

Closed loop, one arm after the other, random prompts, a cache salt each. TTFT: --repeats prompts, one at a time, seconds
from sending to the first token. TPOT: median time between tokens of the last of them, and of --contexts prompts at once
once all of them decode, milliseconds.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

DECODE_TAIL = 30
"""The last tokens of each of several contexts: by then every prefill is done."""


async def stream(
    session: aiohttp.ClientSession, url: str, model: str, prompt: list[int], tokens: int
) -> tuple[float, list[float]]:
    """Seconds to the first token, and between the following ones."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "cache_salt": str(random.random()),
    }
    began, arrived = time.monotonic(), []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                usage = json.loads(line[6:]).get("usage") or {}
                if usage.get("completion_tokens", 0) > len(arrived):
                    arrived.append(time.monotonic())
    return arrived[0] - began, [b - a for a, b in pairwise(arrived)]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every arm's numbers, in the order given."""
    generator, found = random.Random(args.seed), {}

    def prompt() -> list[int]:
        return [generator.randrange(3, args.vocab_size) for _ in range(args.tokens)]

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for arm in args.arm:
            name, _, url = arm.partition("=")
            async with session.get(f"{url}/v1/models") as response:
                model = (await response.json())["data"][0]["id"]
            await stream(session, url, model, prompt()[: args.tokens // 6], 4)  # compiles kernels
            alone = [await stream(session, url, model, prompt(), 33) for _ in range(args.repeats)]
            many = await asyncio.gather(
                *(stream(session, url, model, prompt(), 100) for _ in range(args.contexts))
            )
            found[name] = {
                "ttft_s": [ttft for ttft, _ in alone],
                "tpot_ms": {
                    "1": statistics.median(alone[-1][1]) * 1e3,
                    str(args.contexts): statistics.median(g for _, gs in many for g in gs[-DECODE_TAIL:])
                    * 1e3,
                },
            }
            print(name, json.dumps(found[name]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", action="append", required=True, metavar="NAME=URL")
    parser.add_argument("--tokens", type=int, default=120_000, help="of each prompt")
    parser.add_argument("--contexts", type=int, default=8, help="at once")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=160_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = asyncio.run(measure(args))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
