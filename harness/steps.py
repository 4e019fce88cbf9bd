# SPDX-License-Identifier: Apache-2.0
"""What a long run says: lines for people, and the steps it goes through."""

import contextlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

PLAIN_INTERVAL_S = 5.0


def put(stream: TextIO, text: str) -> None:
    """Write at once. A reader that has gone, or a full disk, costs words, never the run that speaks."""
    with contextlib.suppress(OSError):
        stream.write(text)
        stream.flush()


class Lines:
    """Whole lines, and a state that rewrites its line on a terminal and elsewhere is printed every 5 s."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._said = -math.inf
        self._open = False  # a line on the terminal has not been ended yet

    def say(self, text: str) -> None:
        self.end()
        self._put(f"{text}\n")

    def state(self, text: str, *, last: bool = False) -> None:
        """The `last` state of something stands, wherever it is printed."""
        if self._terminal:
            self._put(f"\r\x1b[K{text}" + "\n" * last)
            self._open = not last
        elif last or time.monotonic() - self._said >= PLAIN_INTERVAL_S:
            self._put(f"{text}\n")

    def end(self) -> None:
        """Leaves the line that is open."""
        if self._open:
            self._put("\n")
        self._open = False

    def _put(self, text: str) -> None:
        self._said = time.monotonic()
        put(self._stream, text)


class Steps:
    """`with steps.step("reference"):` says so; `seconds` keeps what each step took, failed or not."""

    def __init__(self, stream: TextIO) -> None:
        self.seconds: dict[str, float] = {}
        self._lines = Lines(stream)
        self._began = time.monotonic()
        self._name = ""

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        self._name = name
        self.say(f"{name} ...")
        outcome = "failed after"
        try:
            yield
            outcome = "took"
        finally:
            self.seconds[name] = round(time.monotonic() - began, 3)
            self.say(f"{name} {outcome} {self.seconds[name]:.1f} s")

    def say(self, text: str) -> None:
        self._lines.say(self._line(text))

    def progress(self, text: str) -> None:
        """A state of the current step."""
        self._lines.state(self._line(f"{self._name}: {text}"))

    def _line(self, text: str) -> str:
        return f"[{time.monotonic() - self._began:4.0f} s] {text}"
