# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.sse import SseReader

STREAM = (
    '\ufeffdata: {"text": "grüße 東京 🙂"}\n\n'
    ": a comment\r\n\r\n"
    "event: token\r\nid: 7\r\ndata:first\r\ndata: second\r\ndata\r\n\r\n"
    "data: cr only\r\r"
    "retry: 10\ndata:  two spaces\n\n\n\n"
    "data:\n\n"
    "data: [DONE]\n\n"
    "data: an event without its blank line\n"
).encode()
EVENTS = ['{"text": "grüße 東京 🙂"}', "first\nsecond\n", "cr only", " two spaces", "", "[DONE]"]


def read(pieces: list[bytes]) -> list[str]:
    reader = SseReader()
    return [event for piece in pieces for event in reader.feed(piece)]


def test_whole_stream_in_one_piece() -> None:
    assert read([STREAM]) == EVENTS


def test_every_byte_on_its_own() -> None:
    assert read([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=30))
def test_any_split_gives_the_same_events(cuts: list[int]) -> None:
    edges = sorted([0, *cuts, len(STREAM)])
    assert read([STREAM[a:b] for a, b in pairwise(edges)]) == EVENTS


LINES = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]))
ENDS = st.sampled_from(["\n\n", "\r\n\r\n", "\r\r"])


@given(st.lists(st.tuples(LINES, ENDS)), st.integers(1, 9))
def test_whatever_was_written_is_read(events: list[tuple[str, str]], size: int) -> None:
    stream = "".join(f"data: {line}{end}" for line, end in events).encode()
    pieces = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert read(pieces) == [line for line, _ in events]


@pytest.mark.parametrize("newline", ["\n", "\r", "\r\n"])
def test_an_event_comes_as_soon_as_its_blank_line(newline: str) -> None:
    """A lone CR ends the line at once: nothing waits for a LF that may never come."""
    reader = SseReader()
    assert reader.feed(f"data: x{newline}{newline}".encode()) == ["x"]


def test_an_empty_piece_between_cr_and_lf_changes_nothing() -> None:
    assert read([b"data: a\r", b"", b"\ndata: b\r\n", b"\r", b"\n"]) == ["a\nb"]


def test_a_huge_event_in_small_pieces() -> None:
    payload = "x" * 4_000_000
    stream = f"data: {payload}\n\n".encode()
    assert read([stream[i : i + 1000] for i in range(0, len(stream), 1000)]) == [payload]


def test_invalid_utf8_is_replaced_and_the_next_event_survives() -> None:
    assert read([b"data: \xff\n\ndata: ok\n\n"]) == ["\ufffd", "ok"]
