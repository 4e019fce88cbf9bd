# SPDX-License-Identifier: Apache-2.0
"""Server-sent events from bytes that may be cut anywhere.

Follows the WHATWG event-stream grammar as far as a completion stream uses it: lines end in LF, CR or CRLF;
`data` lines of one event are joined by LF; comments and other fields are skipped; an event without its blank
line is discarded.
"""

import re

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


class SseReader:
    """Feed it bytes as they arrive; it returns the data of each event that they complete.

    Works on bytes and decodes whole lines only, so that a cut inside a character or between CR and LF does no
    harm. Each byte is scanned once, however many pieces an event comes in.
    """

    def __init__(self) -> None:
        self._line: list[bytes] = []  # pieces of the line that has not ended yet
        self._data: list[str] = []  # data lines of the event that has not ended yet
        self._after_cr = False
        self._first_line = True

    def feed(self, chunk: bytes) -> list[str]:
        """The data of every event that ends within `chunk`, in order."""
        if not chunk:
            return []
        if self._after_cr and chunk[:1] == b"\n":  # the second half of a CRLF that was cut in two
            chunk = chunk[1:]
            self._after_cr = False
            if not chunk:
                return []
        self._after_cr = chunk[-1:] == b"\r"

        events = []
        *ended, rest = _LINE_END.split(chunk)
        for piece in ended:
            self._line.append(piece)
            line = b"".join(self._line)
            self._line.clear()
            if self._first_line:
                line = line.removeprefix(_BOM)
                self._first_line = False
            if line:
                self._take(line)
            elif self._data:
                events.append("\n".join(self._data))
                self._data.clear()
        if rest:
            self._line.append(rest)
        return events

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", errors="replace"))
