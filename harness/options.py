# SPDX-License-Identifier: Apache-2.0
"""What the command line's words mean; anything that cannot be meant is a UserError."""

import argparse
import math
import shlex

from harness.engines.endpoint import normalise_url
from harness.errors import UserError
from harness.store import check_arm_name


def parse_rates(text: str) -> tuple[float, ...]:
    """`0.5,1` -> (0.5, 1.0), ascending. Rates must differ in the six digits that name their files."""
    rates = [_positive(part, "rate") for part in text.split(",")]
    names = [format(rate, "g") for rate in rates]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"rate {twice} is given twice; name each rate once")
    return tuple(sorted(rates))


def parse_limits(text: str) -> tuple[float, float]:
    """`15,25` -> (15.0, 25.0): two applied limits in seconds, ascending."""
    values = [_positive(part, "limit") for part in text.split(",")]
    if len(values) != 2 or values[0] >= values[1]:
        raise UserError(f"--sla {text!r} is not usable; give two limits in seconds, ascending, like 15,25")
    return values[0], values[1]


def parse_arm(text: str) -> tuple[str, str]:
    """`tp2=http://host:8000` -> the name and the server's base URL."""
    name, equals, url = text.partition("=")
    if not equals:
        raise UserError(f"--arm {text!r} is not NAME=URL; write for example tp8=http://127.0.0.1:8000")
    return check_arm_name(name), normalise_url(url)


def parse_words(text: str, option: str) -> tuple[str, ...]:
    """As a shell would split them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"{option} {text!r}: {str(error).lower()}; close what is open") from None


def positive(text: str) -> float:
    """For argparse: a number that is neither 0, negative nor infinite."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UserError(
            f"{what} {text!r} is not a number; give positive numbers separated by commas"
        ) from None
    if not 0 < value < math.inf:
        raise UserError(f"{what} {text!r} is not positive and finite; give positive numbers")
    return value


def parse_counts(text: str) -> tuple[int, ...]:
    """`40,513` -> (40, 513): whole numbers of 1 or more."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise UserError(f"{text!r} is not a list of counts; give whole numbers from 1, like 40,513")
    return counts
