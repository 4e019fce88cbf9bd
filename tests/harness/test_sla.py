# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from harness.errors import UserError
from harness.sla import (
    CellVerdict,
    Limits,
    Rule,
    RuleVerdict,
    first_failing,
    first_miss,
    highest_passing,
    misses,
)


def cells(*rows: tuple[float, bool, int]) -> list[CellVerdict]:
    return [CellVerdict(*row) for row in rows]


def test_a_failed_request_misses_every_limit() -> None:
    assert misses([0.5, 1.0, 1.5, math.inf], 1.0) == 2
    assert misses([math.inf], 1e9) == 1


def test_the_limit_itself_is_no_miss() -> None:
    assert misses([15.0], 15.0) == 0


@pytest.mark.parametrize(
    ("rows", "passing", "missing"),
    [
        ([], None, None),
        ([(0.5, True, 0), (1.0, True, 0)], 1.0, None),
        ([(0.5, True, 0), (1.0, True, 1), (1.5, True, 0)], 0.5, 1.0),
        ([(0.5, True, 2)], None, 0.5),
        ([(0.5, False, 0), (1.0, True, 0)], None, None),
        ([(0.5, True, 0), (1.0, False, 3), (1.5, True, 2)], 0.5, 1.5),
        ([(1.5, True, 1), (0.5, True, 0), (1.0, True, 0)], 1.0, 1.5),
        ([(0.5, True, 0), (0.5, True, 1), (1.0, True, 0)], None, 0.5),
        ([(0.5, True, 0), (0.5, False, 0)], None, None),
    ],
)
def test_rates(rows: list[tuple[float, bool, int]], passing: float | None, missing: float | None) -> None:
    assert highest_passing(cells(*rows)) == passing
    assert first_miss(cells(*rows)) == missing


@pytest.mark.parametrize(
    ("verdicts", "failing"),
    [
        ([CellVerdict(0.5, True, 0), CellVerdict(1.0, True, 0)], None),  # nothing was shown not to pass
        ([CellVerdict(0.5, True, 0), CellVerdict(1.0, True, 1)], 1.0),
        ([CellVerdict(0.5, True, 0), CellVerdict(1.0, False, 0, True), CellVerdict(1.5, True, 2)], 1.0),
        ([CellVerdict(0.5, True, 0), CellVerdict(1.0, False, 3), CellVerdict(1.5, True, 2)], 1.5),
        ([CellVerdict(0.5, True, 0), CellVerdict(1.0, False, 3)], None),  # a late client tells nothing
        ([CellVerdict(0.5, True, 2)], 0.5),
        ([], None),
    ],
)
def test_what_was_shown_not_to_pass(verdicts: list[CellVerdict], failing: float | None) -> None:
    assert first_failing(verdicts) == failing


def test_limits_keep_the_source_names() -> None:
    assert Limits.of(1.2, 2.0, "rule").applied == {"15": 1.2, "25": 2.0}


@pytest.mark.parametrize("pair", [(0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, math.inf), (math.nan, 1.0)])
def test_impossible_limits_are_refused(pair: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="ascending"):
        Limits.of(*pair, rule="rule")


def test_a_rule_covers_a_range_and_a_class() -> None:
    rule = Rule.parse("short=5@p95:0-60000/chat")
    assert rule == Rule("short", 5.0, 95, 0, 60_000, "chat")
    assert str(rule) == "short: 95 % of requests of 0 to 60,000 prompt tokens of class chat within 5 s"
    assert rule.covers(60_000, "chat")
    assert not rule.covers(60_001, "chat") and not rule.covers(100, "default")
    assert Rule.parse("all=15").covers(10**9, "anything")


@pytest.mark.parametrize(
    "text", ["short", "short=0", "short=-1", "short=1.2.3", "a=1@p0", "a=1@p100", "a=1:9-3", "=1", "a=1/"]
)
def test_an_unusable_rule_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(UserError, match="NAME=SECONDS"):
        Rule.parse(text)


def test_a_percentile_rule_allows_its_share_and_needs_its_sample() -> None:
    rule = Rule("r", 1.0, percent=90)
    assert rule.judge([0.5] * 18 + [2.0] * 2) == RuleVerdict(20, 2, True)
    assert rule.judge([0.5] * 17 + [math.inf] * 3) == RuleVerdict(20, 3, False)
    assert rule.judge([0.5] * 19).holds is None  # P90 needs 20
    assert rule.judge([0.5] * 38, repeats=2).holds is None  # different ones
    assert Rule("r", 1.0).judge([0.5, 1.5]) == RuleVerdict(2, 1, False)
    assert Rule("r", 1.0).judge([]).holds is None


def test_two_rules_of_one_name_are_refused() -> None:
    rules = (Rule("short", 1.0), Rule("long", 2.0), Rule("short", 3.0))
    with pytest.raises(UserError, match="two --limit share the name short"):
        Limits({"15": 1.0, "25": 2.0}, "rule", rules)
