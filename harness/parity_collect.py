# SPDX-License-Identifier: Apache-2.0
"""Asks a running engine for the answers that parity.py compares."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import numpy as np

from harness.client import one_line
from harness.errors import UserError
from harness.load import Target
from harness.parity import TOP_K, ArmAnswers, Position, Prompt
from harness.trace import FIRST_TOKEN_ID

PREFILL_TOKENS = 700
REQUEST_TIMEOUT_S = 300.0


async def collect(
    target: Target,
    prompts: Sequence[Prompt],
    continuations: Mapping[str, Sequence[int]],
    vocab_size: int,
    progress: Callable[[str], None] = lambda _: None,
    *,
    prefill_tokens: int = PREFILL_TOKENS,
) -> ArmAnswers:
    """Each prompt alone, then all of them at once while prompts of `prefill_tokens` are prefilled beside them.

    `continuations` are the tokens by prompt id that the engine is teacher-forced on. Raises UserError where
    the engine does not answer, or not with top-20 logprobs.
    """
    async with _session() as session:
        engine = _Engine(session, target)
        alone = {}
        for count, prompt in enumerate(prompts):
            progress(f"{target.name}: prompt {count + 1}/{len(prompts)} alone, {len(prompt.tokens)} tokens")
            alone[prompt.id] = await engine.forced(prompt, continuations[prompt.id])

        progress(f"{target.name}: {len(prompts)} prompts at once, beside prefills")
        prefills = _Prefills(engine, vocab_size, prefill_tokens)
        beside = asyncio.create_task(prefills.run())
        try:
            answers = await asyncio.gather(
                *(engine.forced(prompt, continuations[prompt.id]) for prompt in prompts)
            )
        finally:
            beside.cancel()
            (ended,) = await asyncio.gather(beside, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended
    concurrent = {prompt.id: answer for prompt, answer in zip(prompts, answers, strict=True)}
    return ArmAnswers(alone, concurrent, prefills.done)


async def continue_freely(
    target: Target, prompts: Sequence[Prompt], tokens: int
) -> dict[str, tuple[int, ...]]:
    """Greedy continuations of `tokens` tokens by prompt id, for where no reference gives them."""
    async with _session() as session:
        engine = _Engine(session, target)
        return {
            prompt.id: tuple(p.token for p in await engine.complete(prompt.id, prompt.tokens, tokens))
            for prompt in prompts
        }


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))


class _Engine:
    def __init__(self, session: aiohttp.ClientSession, target: Target) -> None:
        self._session = session
        self._target = target

    async def forced(self, prompt: Prompt, continuation: Sequence[int]) -> tuple[Position, ...]:
        """The engine's greedy token and top 20 in each context prompt + continuation[:k].

        An engine cannot be told its next token. So it decodes freely, and where its token is not the
        continuation's, the rest of its answer has another context and is dropped; a new request goes on
        behind the continuation's token. Each request answers a position at least.
        """
        positions: list[Position] = []
        while len(positions) < len(continuation):
            context = (*prompt.tokens, *continuation[: len(positions)])
            for position in await self.complete(prompt.id, context, len(continuation) - len(positions)):
                positions.append(position)
                if position.token != continuation[len(positions) - 1]:
                    break
        return tuple(positions)

    async def complete(self, name: str, context: Sequence[int], tokens: int) -> list[Position]:
        """Greedy completion of exactly `tokens` tokens, with logprobs, under a salt of its own."""
        body = {
            "model": self._target.model,
            "prompt": context,
            "max_tokens": tokens,
            "temperature": 0,
            # Without min_tokens: it would forbid the end-of-text token, which the reference may choose.
            "ignore_eos": True,
            "logprobs": TOP_K,
            "return_tokens_as_token_ids": True,
            "cache_salt": secrets.token_hex(8),
        }
        asked = f"arm {self._target.name}, parity prompt {name}"
        try:
            async with self._session.post(f"{self._target.base_url}/v1/completions", json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise UserError(
                        f"{asked}: HTTP {response.status}: {one_line(text)}; see the engine's log"
                    )
                return _positions(await response.json(), tokens)
        except (aiohttp.ClientError, TimeoutError) as error:
            cause = str(error) or type(error).__name__
            raise UserError(f"{asked}: no answer ({one_line(cause)}); see the engine's log") from error
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise UserError(
                f"{asked}: no top-{TOP_K} logprobs ({error}); does the engine allow them?"
            ) from error


class _Prefills:
    """Requests of one token each, one after the other for as long as it runs."""

    def __init__(self, engine: _Engine, vocab_size: int, prompt_tokens: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._prompt_tokens = prompt_tokens
        self.done = 0

    async def run(self) -> None:
        generator = np.random.default_rng(0)
        while True:
            tokens = generator.integers(FIRST_TOKEN_ID, self._vocab_size, size=self._prompt_tokens).tolist()
            await self._engine.complete("of a prefill beside", tokens, 1)
            self.done += 1


def _positions(answer: Mapping[str, Any], expected: int) -> list[Position]:
    logprobs = answer["choices"][0]["logprobs"]
    positions = [
        Position(_token(token), {_token(name): float(logprob) for name, logprob in top.items()})
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
    ]
    if len(positions) != expected:
        raise ValueError(f"{len(positions)} tokens instead of {expected}")
    for position in positions:
        if len(position.top) < TOP_K:
            raise ValueError(f"{len(position.top)} candidates at a position")
    return positions


def _token(name: str) -> int:
    return int(name.removeprefix("token_id:"))
