# SPDX-License-Identifier: Apache-2.0
"""Limits on TTFT and the verdicts drawn from them. Pure.

A limit is named after the source's threshold ("15", "25"); what is applied may differ, for a scaled-down
engine. A request misses a limit when its TTFT is above it. A failed request has an infinite TTFT: it misses
every limit.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.errors import UserError
from harness.stats import supports

SOURCE_LIMITS_S = {"15": 15.0, "25": 25.0}


GIVEN = "given with --sla"


@dataclass(frozen=True)
class Limits:
    """The applied thresholds in seconds by source name, and in words where they come from."""

    applied: dict[str, float]
    rule: str
    rules: tuple["Rule", ...] = ()
    """Further limits, each for some of the requests."""

    def __post_init__(self) -> None:
        names = [rule.name for rule in self.rules]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"two --limit share the name {twice}; give each its own")

    @classmethod
    def of(cls, first_s: float, second_s: float, rule: str, rules: Sequence["Rule"] = ()) -> "Limits":
        """`first_s` stands for the source's 15 s, `second_s` for its 25 s."""
        if not 0 < first_s < second_s < math.inf:
            raise ValueError(f"limits must be positive and ascending, got {first_s:g},{second_s:g}")
        return cls(dict(zip(SOURCE_LIMITS_S, (first_s, second_s), strict=True)), rule, tuple(rules))


_RULE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9.-]*)=(?P<seconds>[0-9.]+)"
    r"(?:@p(?P<percent>[1-9][0-9]?))?"
    r"(?::(?P<low>[0-9]+)-(?P<high>[0-9]+))?"
    r"(?:/(?P<class>[A-Za-z0-9][A-Za-z0-9.-]*))?"
)


@dataclass(frozen=True)
class Rule:
    """A limit on TTFT for the requests that it covers, kept by all of them or by `percent` %.

    `min_tokens` and `max_tokens` bound the prompt, both included; `limit_class` names a class of the trace.
    """

    name: str
    threshold_s: float
    percent: int = 100
    min_tokens: int = 0
    max_tokens: int | None = None
    limit_class: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """`NAME=SECONDS[@pPERCENT][:MIN-MAX][/CLASS]`, like `short=5@p95:0-60000` or `batch=60/bulk`."""
        match = _RULE.fullmatch(text)
        seconds = float(match["seconds"]) if match and match["seconds"].count(".") < 2 else 0.0
        low, high = (int(match[end]) if match and match[end] else None for end in ("low", "high"))
        if match is None or not seconds > 0 or (low or 0) > (math.inf if high is None else high):
            raise UserError(
                f"--limit {text!r} is not usable; write NAME=SECONDS[@pPERCENT][:MIN-MAX tokens][/CLASS],"
                " like short=5@p95:0-60000"
            )
        return cls(match["name"], seconds, int(match["percent"] or 100), low or 0, high, match["class"])

    def covers(self, prompt_tokens: int, limit_class: str) -> bool:
        inside = self.min_tokens <= prompt_tokens and prompt_tokens <= (
            math.inf if self.max_tokens is None else self.max_tokens
        )
        return inside and self.limit_class in (None, limit_class)

    def judge(self, ttft_s: Sequence[float], repeats: int = 1) -> "RuleVerdict":
        """`ttft_s` of the requests that it covers, each once in every repeat; failures infinite.

        The same requests sent again are no larger sample: a percentile needs so many different ones.
        """
        late, n = misses(ttft_s, self.threshold_s), len(ttft_s)
        if not n or (self.percent < 100 and not supports(n // repeats, self.percent)):
            return RuleVerdict(n, late, None)
        return RuleVerdict(n, late, 100 * (n - late) >= self.percent * n)

    def __str__(self) -> str:
        who = "every request" if self.percent == 100 else f"{self.percent} % of requests"
        if self.max_tokens is not None:
            who += f" of {self.min_tokens:,} to {self.max_tokens:,} prompt tokens"
        if self.limit_class:
            who += f" of class {self.limit_class}"
        return f"{self.name}: {who} within {self.threshold_s:g} s"


@dataclass(frozen=True)
class RuleVerdict:
    """Of `n` requests `misses` came late; `holds` is None where so few cannot tell."""

    n: int
    misses: int
    holds: bool | None


@dataclass(frozen=True)
class CellVerdict:
    """What one cell says about one limit: whether the cell counts, and how many of its requests missed.

    `unstable` cells are not valid, and yet tell that the server does not keep up.
    """

    offered_qps: float
    valid: bool
    misses: int
    unstable: bool = False


def misses(ttft_s: Sequence[float], limit_s: float) -> int:
    """How many requests came later than `limit_s`; pass failures as infinity."""
    return sum(ttft > limit_s for ttft in ttft_s)


def highest_passing(cells: Sequence[CellVerdict]) -> float | None:
    """The highest tested rate at and below which every cell is valid and has no miss, or None.

    All repeats of a rate must pass. Rates 0.5 and 1 pass, 1.5 misses, 2 passes: the answer is 1.
    """
    highest = None
    for rate in sorted({cell.offered_qps for cell in cells}):
        if not all(cell.valid and cell.misses == 0 for cell in cells if cell.offered_qps == rate):
            break
        highest = rate
    return highest


def first_failing(cells: Sequence[CellVerdict]) -> float | None:
    """The lowest rate above the highest passing one that was shown not to pass: a valid cell with a miss, or an
    unstable one. None: how much more than its highest passing rate the arm would have passed is not known."""
    passed = highest_passing(cells) or 0.0
    failing = (cell for cell in cells if cell.unstable or (cell.valid and cell.misses))
    return min((cell.offered_qps for cell in failing if cell.offered_qps > passed), default=None)


def first_miss(cells: Sequence[CellVerdict]) -> float | None:
    """The lowest rate that has a valid cell with a miss; None where there is none."""
    return min((cell.offered_qps for cell in cells if cell.valid and cell.misses), default=None)
