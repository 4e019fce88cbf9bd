# SPDX-License-Identifier: Apache-2.0
"""The steps of a long run: announced when they begin, timed when they end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

PLAIN_INTERVAL_S = 5.0


class Steps:
    """`with steps.step("reference"):` says so; `seconds` keeps what each step took, failed or not."""

    def __init__(self, stream: TextIO) -> None:
        self.seconds: dict[str, float] = {}
        self._stream = stream
        self._terminal = stream.isatty()
        self._began = time.monotonic()
        self._said = self._began
        self._name = ""
        self._open = False  # a line on the terminal has not been ended yet

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
        self._write("\n" if self._open else "", f"{self._line(text)}\n")
        self._open = False

    def progress(self, text: str) -> None:
        """A state of the current step: rewrites one line on a terminal, elsewhere prints one every 5 s."""
        line = self._line(f"{self._name}: {text}")
        if self._terminal:
            self._write(f"\r\x1b[K{line}")
            self._open = True
        elif time.monotonic() - self._said >= PLAIN_INTERVAL_S:
            self._write(f"{line}\n")

    def _line(self, text: str) -> str:
        return f"[{time.monotonic() - self._began:4.0f} s] {text}"

    def _write(self, *parts: str) -> None:
        self._said = time.monotonic()
        self._stream.write("".join(parts))
        self._stream.flush()
