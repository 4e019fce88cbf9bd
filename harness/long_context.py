# SPDX-License-Identifier: Apache-2.0
"""Long contexts on servers that run: TTFT of a lone prompt, and time between tokens at one and at several contexts.

Closed loop and streamed, a cache salt for each request. Every arm is asked the same prompts, arms in turns (A B B A),
so that a prompt's times in two arms pair.
"""

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import orjson

from harness.errors import UserError
from harness.load import Target
from harness.stats import percentile_interval
from harness.trace import FIRST_TOKEN_ID

LONE_TOKENS = 33
TOGETHER_TOKENS = 32
"""That all contexts decode together, at least."""
TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Answer:
    """When it was sent and when each token came, on time.monotonic()."""

    sent_s: float
    token_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    def gaps_s(self, since_s: float = 0.0, until_s: float = math.inf) -> list[float]:
        """Between tokens that both came in the window."""
        inside = [at_s for at_s in self.token_s if since_s <= at_s <= until_s]
        return [after - before for before, after in pairwise(inside)]


@dataclass(frozen=True)
class Question:
    """A request whose body is ready, so that no time goes into encoding it."""

    target: Target
    prompt_tokens: int
    answer_tokens: int
    body: bytes


def question(target: Target, prompt: Sequence[int], answer_tokens: int) -> Question:
    """Asks for exactly so many tokens, under a salt of its own."""
    body = {
        "model": target.model,
        "prompt": list(prompt),
        "max_tokens": answer_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "cache_salt": secrets.token_hex(8),
    }
    return Question(target, len(prompt), answer_tokens, orjson.dumps(body))


async def stream(client: aiohttp.ClientSession, asked: Question) -> Answer:
    """The streamed answer. Raises UserError where it does not come."""
    name = asked.target.name
    arrived: list[float] = []
    url, headers = f"{asked.target.base_url}/v1/completions", {"Content-Type": "application/json"}
    began = time.monotonic()
    try:
        async with client.post(url, data=asked.body, headers=headers) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    usage = json.loads(line[6:]).get("usage") or {}
                    arrived += [time.monotonic()] * (usage.get("completion_tokens", 0) - len(arrived))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise UserError(
            f"arm {name}: no answer to a prompt of {asked.prompt_tokens} tokens ({error}); see the engine's log"
        ) from error
    if len(arrived) != asked.answer_tokens:
        raise UserError(
            f"arm {name}: {len(arrived)} tokens instead of {asked.answer_tokens}; see the engine's log"
        )
    return Answer(began, tuple(arrived))


def prompts(seed: int, count: int, tokens: int, vocab_size: int) -> list[list[int]]:
    """Uniform random token ids."""
    generator = np.random.Generator(np.random.PCG64([seed, 0x6C6F6E67]))  # apart from other streams
    return [generator.integers(FIRST_TOKEN_ID, vocab_size, size=tokens).tolist() for _ in range(count)]


async def lone(
    targets: Sequence[Target],
    asked: Sequence[Sequence[int]],
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, dict[str, list[float]]]:
    """By arm: `ttft_s` of each prompt in an otherwise idle engine, `tpot_ms` its median time between tokens."""
    found: dict[str, dict[str, list[float]]] = {
        target.name: {"ttft_s": [], "tpot_ms": []} for target in targets
    }
    async with session() as client:
        for index, prompt in enumerate(asked):
            for target in reversed(targets) if index % 2 else targets:
                progress(f"{target.name}: prompt {index + 1}/{len(asked)} of {len(prompt)} tokens alone")
                answer = await stream(client, question(target, prompt, LONE_TOKENS))
                found[target.name]["ttft_s"].append(answer.ttft_s)
                found[target.name]["tpot_ms"].append(median(answer.gaps_s()) * 1e3)
    return found


async def together(target: Target, asked: Sequence[Sequence[int]], chunk_tokens: int) -> dict[str, Any]:
    """All prompts at once: `ttft_s` of each, and `tpot_ms` while all of them decode, None if they never all do.

    Prompts are prefilled one after the other in chunks of `chunk_tokens`, and with each chunk the contexts before it
    decode a token: answers are long enough for the first to go on when the last has begun.
    """
    steps = sum(math.ceil(len(prompt) / chunk_tokens) for prompt in asked[1:])
    questions = [question(target, prompt, steps + TOGETHER_TOKENS) for prompt in asked]
    async with session() as client:
        answers = await asyncio.gather(*(stream(client, each) for each in questions))
    return {"ttft_s": [answer.ttft_s for answer in answers], **while_all_decode(answers)}


def while_all_decode(answers: Sequence[Answer]) -> dict[str, Any]:
    """Median time between tokens from the last answer's first token to the end of the first that ends."""
    since_s = max(answer.token_s[0] for answer in answers)
    until_s = min(answer.token_s[-1] for answer in answers)
    gaps = [gap for answer in answers for gap in answer.gaps_s(since_s, until_s)]
    return {"tpot_ms": median(gaps) * 1e3 if gaps else None, "gaps": len(gaps)}


def lone_text(times: Mapping[str, Sequence[float]]) -> str:
    """Of an arm's lone prompts."""
    return f"P50 TTFT {median(times['ttft_s']):.4f} s, {median(times['tpot_ms']):.2f} ms between tokens"


def between_text(tpot_ms: float | None) -> str:
    """Of contexts at once; None as `together` gives it."""
    return "never all decoding" if tpot_ms is None else f"{tpot_ms:.2f} ms between tokens"


def paired_texts(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """Of every two arms, in their order."""
    return [paired_text(first, other, found) for first, other in combinations(found, 2)]


def paired_text(first: str, other: str, found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """`dcp2 - tp2 -0.0200 s (95 % -0.0310 to -0.0110 over prompts, of these launches alone)`: the same prompts' median
    difference, by order statistics."""
    deltas = [b - a for a, b in zip(found[first]["ttft_s"], found[other]["ttft_s"], strict=True)]
    interval = percentile_interval(deltas, 50)
    ends = (
        f"95 % {interval.low:+.4f} to {interval.high:+.4f} over prompts, of these launches alone"
        if interval
        else f"n = {len(deltas)}, no interval"
    )
    return f"{other} - {first} {median(deltas):+.4f} s ({ends})"


def session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), connector=connector)
