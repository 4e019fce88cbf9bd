# SPDX-License-Identifier: Apache-2.0
"""Do two engines compute the same model? Pure functions over what they answered; parity_collect.py asks.

Every answer is teacher-forced on one continuation, the reference's greedy tokens c: at position k (from 0)
each engine states its greedy token and its top-20 logprobs *in the context prompt + c[:k]*. So any two
answers compare position by position, and one early difference does not spoil everything after it.

At each position two sides agree when

- no token's logprob differs by more than the tolerance. A token that only one side lists is, on the other
  side, at most as likely as the last token listed there, which bounds its difference from below;
- their top-20 sets share at least half of their tokens;
- their greedy tokens are equal, or the margin between the two candidates, taken on the side where it is
  larger, is at most twice the tolerance: shifting each of two logprobs by the tolerance swaps candidates that
  are so close, and no others.

What is compared: each arm with the reference (two arms can be wrong alike), each arm's answers alone with
those given concurrently, and each arm with the first one, both alone and concurrently.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from harness.trace import FIRST_TOKEN_ID

TOP_K = 20
PROMPT_LENGTHS = (40, 127, 250, 505, 513, 1023, 1290, 1800)
"""Odd and even, around blocks of 128 and chunks of 512 tokens; decoding from 505 crosses such a boundary."""
OUTPUT_TOKENS = 20
IN_COMPANY = ", concurrent"
"""Ends the name of a pair of arms whose concurrent answers are compared."""


@dataclass(frozen=True)
class Prompt:
    id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Position:
    """A greedy token, and natural logarithms of probability by token id for the top 20."""

    token: int
    top: Mapping[int, float]


Answers = Mapping[str, Sequence[Position]]
"""By prompt id: a Position for each token of the continuation; fewer where they were not all asked for."""


@dataclass(frozen=True)
class ArmAnswers:
    """The same prompts asked one by one, and all at once beside the prefills of other requests."""

    alone: Answers
    concurrent: Answers
    prefills_beside: int


@dataclass(frozen=True)
class Tolerance:
    """The default suits float32: there, rounding in another order was seen to move logprobs by 3e-5."""

    logprob: float = 1e-3
    """Largest accepted difference of a token's logprob, in nats."""
    overlap: float = 0.5
    """Smallest accepted share of the top-20 tokens that both sides list."""


EXACT = Tolerance()


@dataclass(frozen=True)
class Difference:
    """One position at which two sides part.

    `kind` is "logprob" (size: the largest difference in nats), "overlap" (size: the share of common tokens),
    "token" (size and margin: the margin in nats, None where a side does not list the other's token) or
    "missing" (size: positions that are not there). Only token differences can be explained; everything else
    fails.
    """

    pair: str
    prompt: str
    prompt_tokens: int
    position: int
    kind: str
    size: float | None
    margin: float | None
    explained: bool
    text: str

    def __str__(self) -> str:
        prompt = f"prompt {self.prompt} ({self.prompt_tokens} tokens)"
        return f"{prompt}, position {self.position}, {self.text} ({self.pair})"


@dataclass(frozen=True)
class PairSummary:
    """The extremes over all positions of one pair, failed ones included."""

    pair: str
    positions: int
    max_logprob_difference: float | None
    """None where it has no number: a logprob was not finite."""
    min_overlap: float
    token_differences: int


@dataclass(frozen=True)
class ParityResult:
    ok: bool
    compared: int
    """Positions compared, over all pairs."""
    tolerance: Tolerance
    pairs: tuple[PairSummary, ...]
    diverged: tuple[Difference, ...] = field(default=())
    """Explained token differences, and of each pair and prompt the first difference that is not."""

    def refusal(self) -> str | None:
        """Why the arms must not be compared for speed, in one line; None where they may."""
        failures = [difference for difference in self.diverged if not difference.explained]
        if not failures:
            return None
        more = f"; and {len(failures) - 1} more" if len(failures) > 1 else ""
        return f"parity refused: {failures[0]}{more}"

    def record(self, prompts: Iterable[Prompt]) -> dict[str, Any]:
        """As a run keeps it, with the length of each prompt."""
        lengths = {prompt.id: len(prompt.tokens) for prompt in prompts}
        return {**asdict(self), "refusal": self.refusal(), "prompts": lengths}


def make_prompts(seed: int, vocab_size: int, lengths: Sequence[int] = PROMPT_LENGTHS) -> tuple[Prompt, ...]:
    """Uniform random token ids, so that any wrong or missing row of context changes the answer."""
    generator = np.random.Generator(np.random.PCG64([seed, 0x70617269]))  # apart from the traces' streams
    return tuple(
        Prompt(f"p{index}", tuple(generator.integers(FIRST_TOKEN_ID, vocab_size, size=length).tolist()))
        for index, length in enumerate(lengths)
    )


def parse_reference(answers: Iterable[Mapping[str, Any]]) -> dict[str, tuple[Position, ...]]:
    """The reference's output file: [{"id", "tokens", "top_logprobs": [{"<token id>": logprob}]}]."""
    return {
        answer["id"]: tuple(
            Position(token, {int(name): logprob for name, logprob in top.items()})
            for token, top in zip(answer["tokens"], answer["top_logprobs"], strict=True)
        )
        for answer in answers
    }


def compare(
    prompts: Sequence[Prompt],
    reference: Answers | None,
    arms: Mapping[str, ArmAnswers],
    tolerance: Tolerance = EXACT,
    output_tokens: int = OUTPUT_TOKENS,
) -> ParityResult:
    """Every pair at every position; the first of `arms` is the one that the others are compared with.

    `reference` is None for a model that has none: then arms are compared with each other and with themselves.
    Answers are as long as the reference's, or `output_tokens` long without one.
    """
    first = next(iter(arms))
    against = {} if reference is None else arms
    pairs = [
        *((f"{name} vs reference", reference or {}, arm.alone) for name, arm in against.items()),
        *((f"{name} alone vs concurrent", arm.alone, arm.concurrent) for name, arm in arms.items()),
        *(
            pair
            for name, arm in arms.items()
            if name != first
            for pair in (
                (f"{first} vs {name}", arms[first].alone, arm.alone),
                (f"{first} vs {name}{IN_COMPANY}", arms[first].concurrent, arm.concurrent),
            )
        ),
    ]
    summaries: list[PairSummary] = []
    diverged: list[Difference] = []
    for pair, left, right in pairs:
        contexts = [
            _Context(pair, prompt, position, *sides)
            for prompt in prompts
            for position, sides in enumerate(zip(left[prompt.id], right[prompt.id], strict=False))
        ]
        summaries.append(_summary(pair, contexts))
        for prompt in prompts:
            ours = [context for context in contexts if context.prompt is prompt]
            expected = output_tokens if reference is None else len(reference[prompt.id])
            diverged += _differences(pair, prompt, ours, expected, tolerance)
    compared = sum(summary.positions for summary in summaries)
    return ParityResult(
        ok=compared > 0 and all(difference.explained for difference in diverged),
        compared=compared,
        tolerance=tolerance,
        pairs=tuple(summaries),
        diverged=tuple(diverged),
    )


def at_fault(diverged: Iterable[Mapping[str, Any]], first: str) -> set[str]:
    """The arms that unexplained differences (as in parity.json) speak against; `first` if it differs with itself."""
    arms = set()
    for difference in diverged:
        if not difference["explained"]:
            left, right = difference["pair"].removesuffix(IN_COMPANY).split(" vs ")
            arms.add(right if left == first and right != "reference" else left.removesuffix(" alone"))
    return arms


def logprob_distance(left: Mapping[int, float], right: Mapping[int, float]) -> float:
    """The largest difference of a token's logprob that the two lists prove, in nats; infinite where a value
    is not finite.

    With {a: -1, b: -2} and {a: -1.1, c: -1.5}: a differs by 0.1; b, unlisted on the right, is at most -1.5
    there, which proves nothing; c is at most -2 on the left, so it differs by 0.5 or more. The answer is 0.5.
    """
    if not all(math.isfinite(value) for value in (*left.values(), *right.values())):
        return math.inf
    floors = min(left.values()), min(right.values())

    def difference(token: int) -> float:
        if token in left and token in right:
            return abs(left[token] - right[token])
        listed, floor = (left[token], floors[1]) if token in left else (right[token], floors[0])
        return max(0.0, listed - floor)

    return max(difference(token) for token in left.keys() | right.keys())


def overlap(left: Mapping[int, float], right: Mapping[int, float]) -> float:
    """Share of the shorter list's tokens that the other one lists too."""
    return len(left.keys() & right.keys()) / min(len(left), len(right))


def margin(left: Position, right: Position) -> float:
    """By how much the sides prefer their own greedy token to the other's, in nats, on the side where that is
    more.

    Infinite where a side does not even list the other's token.
    """
    return max(
        side.top[own] - side.top[other] if own in side.top and other in side.top else math.inf
        for side, own, other in ((left, left.token, right.token), (right, right.token, left.token))
    )


@dataclass(frozen=True)
class _Context:
    """Two answers in the same context."""

    pair: str
    prompt: Prompt
    position: int
    left: Position
    right: Position

    def difference(self, tolerance: Tolerance) -> Difference | None:
        distance = logprob_distance(self.left.top, self.right.top)
        if distance > tolerance.logprob:
            text = f"|Δlogprob| {distance:.3g} > {tolerance.logprob:g}"
            return self._difference("logprob", distance, text)
        common = overlap(self.left.top, self.right.top)
        if common < tolerance.overlap:
            return self._difference(
                "overlap", common, f"top-{TOP_K} overlap {common:.0%} < {tolerance.overlap:.0%}"
            )
        if self.left.token == self.right.token:
            return None
        size, accepted = margin(self.left, self.right), 2 * tolerance.logprob
        text = (
            f"tokens {self.left.token} and {self.right.token}, margin {size:.3g}"
            f" {'<=' if size <= accepted else '>'} {accepted:g}"
        )
        return self._difference("token", size, text, margin=_finite(size), explained=size <= accepted)

    def _difference(
        self, kind: str, size: float, text: str, margin: float | None = None, explained: bool = False
    ) -> Difference:
        return Difference(
            pair=self.pair,
            prompt=self.prompt.id,
            prompt_tokens=len(self.prompt.tokens),
            position=self.position,
            kind=kind,
            size=_finite(size),
            margin=margin,
            explained=explained,
            text=text,
        )


def _differences(
    pair: str, prompt: Prompt, contexts: Sequence[_Context], expected: int, tolerance: Tolerance
) -> Iterator[Difference]:
    """Up to the first one that is not explained: what follows it says nothing new."""
    for context in contexts:
        found = context.difference(tolerance)
        if found:
            yield found
            if not found.explained:
                return
    if missing := expected - len(contexts):
        yield Difference(
            pair,
            prompt.id,
            len(prompt.tokens),
            len(contexts),
            "missing",
            float(missing),
            None,
            explained=False,
            text=f"{missing} of {expected} positions are missing",
        )


def _summary(pair: str, contexts: Sequence[_Context]) -> PairSummary:
    distances = [logprob_distance(context.left.top, context.right.top) for context in contexts]
    overlaps = [overlap(context.left.top, context.right.top) for context in contexts]
    return PairSummary(
        pair=pair,
        positions=len(contexts),
        max_logprob_difference=_finite(max(distances, default=0.0)),
        min_overlap=min(overlaps, default=0.0),
        token_differences=sum(context.left.token != context.right.token for context in contexts),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
