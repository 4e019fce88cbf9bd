# SPDX-License-Identifier: Apache-2.0
"""The answer to one completion request, read as it arrives: which chunk brought which token, and when."""

import asyncio
from typing import Any

import orjson

from harness.sse import SseReader

ERROR_CHARACTERS = 200  # kept of an error's text, or of an error answer's body
ERROR_BODY_BYTES = 4096

OK = "ok"
HTTP_ERROR = "http_error"
CONNECT_ERROR = "connect_error"
STREAM_ERROR = "stream_error"
TIMEOUT = "timeout"
INCOMPLETE = "incomplete"
CANCELLED = "cancelled"


class CompletionAnswer:
    """`ended` is done with the end. The rest are facts so far.

    `status` and `error` are as in `RequestRecord`; OK stands until something goes wrong.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.status = OK
        self.error: str | None = None
        self.sent_s: float | None = None
        self.first_byte_s: float | None = None
        self.done_s: float | None = None
        self.token_s: list[float] = []
        self.token_counts: list[int] = []
        self.finished = False
        self.http_status: int | None = None
        self.completion_tokens = 0
        self.server_prompt_tokens: int | None = None
        self.finish_reason: str | None = None
        self._events = SseReader()
        self._error_body = b""

    def end(self, status: str, error: str | None, now: float) -> None:
        """The first end counts."""
        if self.done_s is None:
            self.status, self.error, self.done_s = status, error, now
            if not self.ended.done():  # who waited for it may have been cancelled
                self.ended.set_result(None)

    # connection.Answer

    def on_sent(self, now: float) -> None:
        self.sent_s = now

    def on_head(self, status: int, headers: dict[bytes, bytes], now: float) -> None:
        self.first_byte_s, self.http_status = now, status
        if location := headers.get(b"location"):
            self._error_body = b"redirected to " + location + b" "
        if (encoding := headers.get(b"content-encoding", b"identity")) != b"identity":
            self.end(STREAM_ERROR, f"the answer is encoded as {encoding.decode('latin-1')}, unasked", now)

    def on_body(self, data: bytes, now: float) -> None:
        if self.done_s is not None:
            return
        if self.http_status != 200:
            self._error_body += data
            if len(self._error_body) >= ERROR_BODY_BYTES:
                self.on_end(now)
            return
        try:
            for event in self._events.feed(data):
                self._take(event, now)
                if self.finished:
                    return self.end(OK, None, now)
        except StreamError as broken:
            self.end(STREAM_ERROR, str(broken), now)

    def on_end(self, now: float) -> None:
        if self.http_status != 200:
            text = self._error_body.decode("utf-8", errors="replace")
            self.end(HTTP_ERROR, one_line(f"HTTP {self.http_status}: {text}"), now)
        else:
            self.end(INCOMPLETE, "the stream ended without [DONE]", now)

    def on_lost(self, reason: str | None, now: float) -> None:
        if reason is None or (self.http_status or 200) != 200:
            self.on_end(now)
        else:
            self.end(STREAM_ERROR, one_line(reason), now)

    def _take(self, event: str, now: float) -> None:
        """Account for one event of the stream, read at `now`."""
        if event == "[DONE]":
            self.finished = True
            return
        try:
            chunk = orjson.loads(event)
            if error := chunk.get("error"):
                message = error.get("message", error) if isinstance(error, dict) else error
                raise StreamError(one_line(str(message)))
            usage = chunk.get("usage") or {}
            count = _count(usage.get("completion_tokens"))
            self.server_prompt_tokens = _count(usage.get("prompt_tokens")) or self.server_prompt_tokens
            choices = chunk.get("choices")
            if choices:
                choice = choices[0]
                if reason := choice.get("finish_reason"):
                    self.finish_reason = str(reason)
                if count is None:  # no running count: each chunk with text stands for one token
                    count = self.completion_tokens + bool(_text(choice))
                if count > self.completion_tokens:
                    self.token_s.append(now)
                    self.token_counts.append(count)
            # A chunk of usage alone corrects the total and brings no token.
            self.completion_tokens = max(self.completion_tokens, count or 0)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise StreamError(one_line(f"not a completion chunk: {event}")) from error


class StreamError(Exception):
    """The server reported an error inside the stream, or sent something that is no completion."""


def one_line(text: str) -> str:
    """At most `ERROR_CHARACTERS` characters of `text`, white space squeezed."""
    return " ".join(text.split())[:ERROR_CHARACTERS]


def _count(value: object) -> int | None:
    """A number of tokens, or None where it is not stated."""
    if value is not None and not isinstance(value, int):
        raise TypeError(f"{value!r} is no count of tokens")
    return value


def _text(choice: dict[str, Any]) -> str:
    """Text of a completion, or of a chat answer: reasoning comes first there and counts as well."""
    delta = choice.get("delta") or {}
    return (
        choice.get("text")
        or delta.get("content")
        or delta.get("reasoning_content")
        or delta.get("reasoning")
        or ""
    )
