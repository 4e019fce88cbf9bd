# SPDX-License-Identifier: Apache-2.0
"""The requests of a cell, encoded before it begins, in memory that the kernel sends from without copying it.

A write of 480 KB copies it into pages that the kernel first has to find: several milliseconds on cores that were
asleep, in which the client reads no answer. From a file in memory (memfd_create(2)), sendfile(2) hands the pages
themselves to the socket.
"""

import os
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True, slots=True)
class Message:
    """Head and body of one request: bytes `start` to `end` of an open file."""

    file: int
    start: int
    end: int

    def send_on(self, socket: int) -> bytes:
        """Give a non-blocking socket what it takes at once; the rest is returned, also where the socket is broken."""
        at = self.start
        try:
            while at < self.end:
                at += os.sendfile(socket, self.file, at, self.end - at)
        except OSError:  # BlockingIOError, or what the next write will be told as well
            return self.read(at)
        return b""

    def read(self, at: int) -> bytes:
        """From byte `at` of the file to the message's end."""
        return os.pread(self.file, self.end - at, at)


class Outbox:
    """`add` messages, send them, close. Messages end with their outbox."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("outbox", os.MFD_CLOEXEC), "wb")

    def add(self, head: bytes, body: bytes) -> Message:
        start = self._file.tell()
        self._file.write(head)
        self._file.write(body)
        self._file.flush()
        return Message(self._file.fileno(), start, self._file.tell())

    def __enter__(self) -> "Outbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
