# SPDX-License-Identifier: Apache-2.0
"""What the command line's words mean."""

import pytest

from harness.errors import UserError
from harness.options import parse_arm, parse_limits, parse_rates, parse_words


def test_rates() -> None:
    assert parse_rates("1,0.25,.5") == (0.25, 0.5, 1.0)
    for wrong in ("", "1,", "nan", "inf", "-1", "1,1.0", "0.1234561,0.1234562"):
        with pytest.raises(UserError):
            parse_rates(wrong)


def test_limits() -> None:
    assert parse_limits("0.5, 2") == (0.5, 2.0)
    for wrong in ("15", "15,15", "1,2,3", "a,b", "0,1"):
        with pytest.raises(UserError):
            parse_limits(wrong)


def test_arms() -> None:
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert parse_arm(f"tp8={url}") == ("tp8", "http://h:1")
    assert parse_arm("a=https://h/proxy/v1") == ("a", "https://h/proxy")
    for wrong in (
        "a",
        "=http://h",
        "a=",
        "a=h:1",
        "a=http://",
        "a=http://h:x",
        "a=http://h?q=1",
        "a=http://u:p@h",
    ):
        with pytest.raises(UserError):
            parse_arm(wrong)


def test_words() -> None:
    assert parse_words("--a 'b c'", "--engine-arguments") == ("--a", "b c")
    with pytest.raises(UserError, match='--engine-arguments "\'": no closing quotation; close what is open'):
        parse_words("'", "--engine-arguments")
