# SPDX-License-Identifier: Apache-2.0
"""The comparator on answers made up here; the collection against a server that answers by a known rule."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fake_engine import VOCAB, Faults, Server, next_logprobs
from hypothesis import assume, given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.load import Target
from harness.parity import (
    ArmAnswers,
    ParityResult,
    Position,
    Prompt,
    Tolerance,
    at_fault,
    compare,
    logprob_distance,
    make_prompts,
    overlap,
    parse_reference,
)
from harness.parity_collect import collect
from harness.prepare import keep_prompts

TOLERANCE = Tolerance(logprob=0.05, overlap=0.5)
PROMPTS = (Prompt("p0", tuple(range(40))), Prompt("p1", tuple(range(600))))


def position(logprobs: Mapping[int, float]) -> Position:
    best = sorted(logprobs.items(), key=lambda item: -item[1])[:20]
    return Position(best[0][0], dict(best))


def spread(first: int = 0) -> dict[int, float]:
    """30 tokens, 0.3 nats apart."""
    return {first + index: -0.1 - 0.3 * index for index in range(30)}


REFERENCE = {prompt.id: tuple(position(spread(10 * k)) for k in range(5)) for prompt in PROMPTS}

Answer = dict[str, tuple[Position, ...]]


def result(change: Callable[[dict[str, dict[str, Answer]]], None] = lambda _: None) -> ParityResult:
    """Of two arms that answer like the reference, but for `change`."""
    answers = {name: {"alone": dict(REFERENCE), "concurrent": dict(REFERENCE)} for name in ("tp2", "dcp2")}
    change(answers)
    arms = {name: ArmAnswers(**modes, prefills_beside=1) for name, modes in answers.items()}
    return compare(PROMPTS, REFERENCE, arms, TOLERANCE)


def altered(answer: tuple[Position, ...], at: int, logprobs: Mapping[int, float]) -> tuple[Position, ...]:
    return (*answer[:at], position(logprobs), *answer[at + 1 :])


def test_equal_answers_pass_and_every_pair_is_compared() -> None:
    parity = result()
    assert parity.ok and parity.refusal() is None and parity.diverged == ()
    assert [pair.pair for pair in parity.pairs] == [
        "tp2 vs reference",
        "dcp2 vs reference",
        "tp2 alone vs concurrent",
        "dcp2 alone vs concurrent",
        "tp2 vs dcp2",
        "tp2 vs dcp2, concurrent",
    ]
    assert parity.compared == 6 * 2 * 5
    assert all(pair.max_logprob_difference == 0.0 and pair.min_overlap == 1.0 for pair in parity.pairs)


def test_nothing_compared_is_not_parity() -> None:
    assert not compare((), {}, {"tp2": ArmAnswers({}, {}, 0)}).ok


def test_logprob_difference_is_named_by_prompt_position_and_size() -> None:
    def change(answers: dict[str, dict[str, Answer]]) -> None:
        logprobs = {token: logprob - 1.73 for token, logprob in spread(30).items()}
        answers["dcp2"]["alone"]["p1"] = altered(REFERENCE["p1"], 3, logprobs)

    parity = result(change)
    assert not parity.ok
    assert parity.refusal() == (
        "parity refused: prompt p1 (600 tokens), position 3, |Δlogprob| 1.73 > 0.05 (dcp2 vs reference)"
        "; and 2 more"
    )
    assert [(d.pair, d.prompt, d.position, d.kind) for d in parity.diverged] == [
        (pair, "p1", 3, "logprob")
        for pair in ("dcp2 vs reference", "dcp2 alone vs concurrent", "tp2 vs dcp2")
    ]
    worst = {pair.pair: pair.max_logprob_difference for pair in parity.pairs}
    assert worst["dcp2 vs reference"] == pytest.approx(1.73) and worst["tp2 vs reference"] == 0.0


def test_concurrent_answers_that_differ_from_lone_ones_fail() -> None:
    def change(answers: dict[str, dict[str, Answer]]) -> None:
        logprobs = {**spread(), 5: spread()[5] + 0.2}
        answers["tp2"]["concurrent"]["p0"] = altered(REFERENCE["p0"], 0, logprobs)

    refusal = result(change).refusal()
    assert refusal is not None
    assert refusal.endswith(
        "prompt p0 (40 tokens), position 0, |Δlogprob| 0.2 > 0.05 (tp2 alone vs concurrent); and 1 more"
    )


def test_arms_that_part_only_in_company_fail() -> None:
    """Each moves by 0.04 beside others, within the tolerance, but in opposite directions."""

    def change(answers: dict[str, dict[str, Answer]]) -> None:
        for name, by in (("tp2", 0.04), ("dcp2", -0.04)):
            moved = {**spread(), 5: spread()[5] + by}
            answers[name]["concurrent"]["p0"] = altered(REFERENCE["p0"], 0, moved)

    parity = result(change)
    assert [d.pair for d in parity.diverged] == ["tp2 vs dcp2, concurrent"] and not parity.ok
    assert at_fault([asdict(d) for d in parity.diverged], "tp2") == {"dcp2"}


def test_two_arms_that_are_wrong_alike_fail_against_the_reference() -> None:
    def change(answers: dict[str, dict[str, Answer]]) -> None:
        for modes in answers.values():
            for answer in modes.values():
                answer["p0"] = altered(REFERENCE["p0"], 1, spread(77))

    assert [d.pair for d in result(change).diverged] == ["tp2 vs reference", "dcp2 vs reference"]


def test_close_candidates_explain_another_token_and_distant_ones_do_not() -> None:
    near = {**spread(), 0: -0.11, 1: -0.10}  # token 1 before token 0, by 0.01
    tie = {**spread(), 0: -0.10, 1: -0.11}
    assert position(near).token == 1 and position(tie).token == 0

    def with_reference_of(left: Position, right: Position) -> ParityResult:
        arm = ArmAnswers({"p0": (right,)}, {"p0": (right,)}, 1)
        return compare(PROMPTS[:1], {"p0": (left,)}, {"tp2": arm}, TOLERANCE)

    parity = with_reference_of(position(tie), position(near))
    (explained,) = parity.diverged
    assert parity.ok and explained.explained and explained.kind == "token"
    assert explained.margin == pytest.approx(0.01)

    # A sampler that does not take its own best token: the logprobs agree, the token does not.
    parity = with_reference_of(position(spread()), replace(position(spread()), token=1))
    assert parity.refusal() == (
        "parity refused: prompt p0 (40 tokens), position 0, tokens 0 and 1, margin 0.3 > 0.1"
        " (tp2 vs reference)"
    )
    parity = with_reference_of(position(spread()), replace(position(spread()), token=999))
    assert parity.diverged[0].margin is None and not parity.ok  # nobody lists that token


def test_flat_distributions_over_other_tokens_fail_by_their_overlap() -> None:
    flat = [{first + index: -5.0 - index / 1000 for index in range(20)} for first in (0, 15)]
    arm = ArmAnswers({"p0": (position(flat[1]),)}, {"p0": (position(flat[1]),)}, 1)
    parity = compare(PROMPTS[:1], {"p0": (position(flat[0]),)}, {"tp2": arm}, TOLERANCE)
    assert (parity.diverged[0].kind, parity.diverged[0].size) == ("overlap", 0.25)
    assert "top-20 overlap 25% < 50%" in (parity.refusal() or "")


def test_missing_positions_fail() -> None:
    def change(answers: dict[str, dict[str, Answer]]) -> None:
        answers["dcp2"]["alone"]["p1"] = REFERENCE["p1"][:2]

    parity = result(change)
    assert not parity.ok
    assert parity.diverged[0].kind == "missing" and parity.diverged[0].position == 2
    assert "position 2, 3 of 5 positions are missing" in (parity.refusal() or "")


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_values_that_are_not_finite_fail_and_serialise(value: float) -> None:
    def change(answers: dict[str, dict[str, Answer]]) -> None:
        first = REFERENCE["p0"][0]
        broken = Position(first.token, {**first.top, 7: value})
        answers["tp2"]["alone"]["p0"] = (broken, *REFERENCE["p0"][1:])

    parity = result(change)
    assert not parity.ok
    assert parity.diverged[0].size is None
    json.dumps(asdict(parity), allow_nan=False)


def test_unlisted_tokens_bound_the_difference() -> None:
    assert logprob_distance({1: -1.0, 2: -2.0}, {1: -1.1, 3: -1.5}) == pytest.approx(0.5)
    assert logprob_distance({1: -1.0, 2: -2.0}, {1: -1.0, 3: -2.0}) == 0.0
    assert overlap({1: 0.0, 2: 0.0, 3: 0.0}, {1: 0.0, 4: 0.0}) == 0.5


logprob_lists = st.lists(st.floats(0.0, 0.3), min_size=30, max_size=30).map(
    lambda gaps: [-0.1 - sum(gaps[: index + 1]) for index in range(30)]
)
noise = st.lists(st.floats(-0.5, 0.5), min_size=30, max_size=30)


@given(logprob_lists, noise, noise)
def test_noise_within_the_tolerance_never_fails(
    truth: list[float], left: list[float], right: list[float]
) -> None:
    assume(truth[0] - truth[19] > 4 * TOLERANCE.logprob)  # no two best tokens beyond one another's lists
    sides = [
        position({token: truth[token] + 0.999 * TOLERANCE.logprob * change[token] for token in range(30)})
        for change in (left, right)
    ]
    arm = ArmAnswers({"p0": (sides[1],)}, {"p0": (sides[1],)}, 1)
    assert compare(PROMPTS[:1], {"p0": (sides[0],)}, {"tp2": arm}, replace(TOLERANCE, overlap=0.0)).ok


@given(logprob_lists, st.integers(0, 18), st.floats(0.0501, 3.0))
def test_raising_any_listed_token_by_more_than_the_tolerance_always_fails(
    truth: list[float], token: int, by: float
) -> None:
    left = dict(enumerate(truth))
    sides = position(left), position({**left, token: left[token] + by})
    for reference, answer in (sides, sides[::-1]):
        arm = ArmAnswers({"p0": (answer,)}, {"p0": (answer,)}, 1)
        assert not compare(PROMPTS[:1], {"p0": (reference,)}, {"tp2": arm}, TOLERANCE).ok


@given(st.lists(logprob_lists, min_size=2, max_size=2), st.integers(0, 25))
def test_verdicts_do_not_depend_on_the_side(lists: list[list[float]], shift: int) -> None:
    left = position(dict(enumerate(lists[0])))
    right = position({token + shift: logprob for token, logprob in enumerate(lists[1])})
    verdicts = []
    for reference, answer in ((left, right), (right, left)):
        arm = ArmAnswers({"p0": (answer,)}, {"p0": (answer,)}, 1)
        verdicts.append(compare(PROMPTS[:1], {"p0": (reference,)}, {"tp2": arm}, TOLERANCE))
    assert verdicts[0].ok == verdicts[1].ok
    assert [d.size for d in verdicts[0].diverged] == [d.size for d in verdicts[1].diverged]


def test_prompts_are_fixed_by_the_seed_and_never_special() -> None:
    prompts = make_prompts(5, 512)
    assert [len(prompt.tokens) for prompt in prompts] == [40, 127, 250, 505, 513, 1023, 1290, 1800]
    assert prompts == make_prompts(5, 512) != make_prompts(6, 512)
    assert all(3 <= token < 512 for prompt in prompts for token in prompt.tokens)


def test_reference_file() -> None:
    parsed = parse_reference([{"id": "p0", "tokens": [7], "top_logprobs": [{"7": -0.5, "9": -1.5}]}])
    assert parsed == {"p0": (Position(7, {7: -0.5, 9: -1.5}),)}


# Collection: the engine below answers by `next_logprobs`, so what must be seen is known for every context.


class Odd(Server):
    """Prefers its second candidate whenever the context has one of the given lengths."""

    def __init__(self, lengths: set[int]) -> None:
        super().__init__("tp2", 64 << 20, Faults())
        self.lengths = lengths
        self.bodies: list[dict[str, object]] = []

    async def completions(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        return await super().completions(request)

    def distribution(self, context: list[int]) -> dict[int, float]:
        answer = dict(super().distribution(context))
        if len(context) in self.lengths:
            best, second = list(answer)[:2]
            answer[best], answer[second] = answer[second], answer[best]
        return dict(sorted(answer.items(), key=lambda item: -item[1]))


def greedy_continuation(prompt: Prompt, tokens: int) -> tuple[int, ...]:
    context = list(prompt.tokens)
    for _ in range(tokens):
        context.append(next(iter(next_logprobs(context))))
    return tuple(context[len(prompt.tokens) :])


async def collected(engine: Odd, tokens: int = 8) -> ArmAnswers:
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/completions", engine.completions)
    async with TestServer(app) as server:
        target = Target("tp2", str(server.make_url("")).rstrip("/"), "fake-mla")
        continuations = {prompt.id: greedy_continuation(prompt, tokens) for prompt in PROMPTS}
        return await collect(target, PROMPTS, continuations, VOCAB)


async def test_each_position_is_asked_in_the_context_of_the_continuation() -> None:
    engine = Odd({42, 45})  # p0 at positions 2 and 5
    answers = await collected(engine)
    for prompt in PROMPTS:
        continuation = greedy_continuation(prompt, 8)
        for mode in (answers.alone, answers.concurrent):
            contexts = [[*prompt.tokens, *continuation[:k]] for k in range(8)]
            wanted = [engine.distribution(context) for context in contexts]
            assert [p.token for p in mode[prompt.id]] == [next(iter(logprobs)) for logprobs in wanted]
            assert [dict(p.top) for p in mode[prompt.id]] == [
                dict(list(logprobs.items())[:20]) for logprobs in wanted
            ]
    assert [
        k for k, p in enumerate(answers.alone["p0"]) if p.token != greedy_continuation(PROMPTS[0], 8)[k]
    ] == [2, 5]
    assert answers.prefills_beside > 0


async def test_requests_keep_out_of_caches_and_away_from_end_of_text() -> None:
    engine = Odd(set())
    await collected(engine)
    salts = [body["cache_salt"] for body in engine.bodies]
    assert len(salts) == len(set(salts)) > 4
    assert all(
        body["ignore_eos"] and "min_tokens" not in body and not body.get("stream") for body in engine.bodies
    )
    assert [body["max_tokens"] for body in engine.bodies[:2]] == [8, 8]


async def test_engine_that_parts_at_every_position_is_asked_for_each() -> None:
    engine = Odd(set(range(40, 60)))
    answers = await collected(engine)
    assert len(answers.alone["p0"]) == len(answers.alone["p1"]) == 8
    assert [body["max_tokens"] for body in engine.bodies[:8]] == [8, 7, 6, 5, 4, 3, 2, 1]


async def test_refused_request_is_shown_with_the_servers_words() -> None:
    engine = Odd(set())
    engine.kv_tokens = 100
    with pytest.raises(UserError, match=r"arm tp2, parity prompt p1: HTTP 400: .*the prompt does not fit"):
        await collected(engine)


async def test_answer_without_logprobs_is_refused() -> None:
    class Terse(Odd):
        def distribution(self, context: list[int]) -> dict[int, float]:
            return dict(list(super().distribution(context).items())[:5])

    with pytest.raises(
        UserError, match=r"parity prompt p0: no top-20 logprobs \(5 candidates at a position\)"
    ):
        await collected(Terse(set()))


def test_a_reference_to_other_prompts_is_not_kept(tmp_path: Path) -> None:
    continuations = {prompt.id: (3, 4) for prompt in PROMPTS}
    keep_prompts(tmp_path, PROMPTS, 2, continuations)
    assert json.loads((tmp_path / "prompts.json").read_bytes())[0]["continuation"] == [3, 4]
    (tmp_path / "reference.json").write_text("[]")
    keep_prompts(tmp_path, PROMPTS, 2, continuations)
    assert (tmp_path / "reference.json").exists()
    keep_prompts(tmp_path, PROMPTS, 2, continuations | {PROMPTS[0].id: (3, 5)})
    assert not (tmp_path / "reference.json").exists()
