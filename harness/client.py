# SPDX-License-Identifier: Apache-2.0
"""One completion request over HTTP, and the record of everything that happened to it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from harness.answer import (
    CANCELLED,
    CONNECT_ERROR,
    HTTP_ERROR,
    INCOMPLETE,
    OK,
    STREAM_ERROR,
    TIMEOUT,
    CompletionAnswer,
    one_line,
)
from harness.connection import Connection, Connector, Standby, auth
from harness.outbox import Message
from harness.trace import Request

__all__ = [
    "CANCELLED",
    "CONNECT_ERROR",
    "HTTP_ERROR",
    "INCOMPLETE",
    "OK",
    "STREAM_ERROR",
    "TIMEOUT",
    "RequestRecord",
    "Target",
    "Timeouts",
    "encode_body",
    "encode_message",
    "one_line",
    "send",
]

NOT_FINISHED = "not finished"
IDLE_CLOSE_S = 0.25
"""A connection that was opened ahead and ends unanswered this soon was closed before the request came."""


@dataclass(frozen=True)
class Target:
    """A server under test. `base_url` has neither `/v1` nor a trailing slash.

    `extensions` sends the fields that only some servers know: min_tokens, ignore_eos and cache_salt.
    `ca_file` holds the authorities that an https server is checked against, in place of the system's.
    """

    name: str
    base_url: str
    model: str
    extensions: bool = True
    api_key: str | None = field(default=None, repr=False)
    ca_file: Path | None = None


@dataclass(frozen=True)
class Timeouts:
    """Seconds: `connect` from the start of an attempt, the others from the due time.

    The defaults let a prefill of 180,000 tokens wait in a long queue.
    """

    connect_s: float = 60.0
    first_token_s: float = 1800.0
    total_s: float = 3600.0


@dataclass(frozen=True)
class RequestRecord:
    """One row of a cell's Parquet file.

    Times (`*_s`) are seconds from the cell's start on the client's monotonic clock, None where that point was
    never reached:

    - `due_s`: when the schedule wanted it sent; TTFT counts from here
    - `dispatched_s`: the client began; `dispatched_s - due_s` is the slip
    - `connected_s`: the connection stood; it was opened ahead, so normally before `due_s`
    - `sent_s`: the last byte of the body was handed to the socket
    - `first_byte_s`: status line and headers of the answer were read
    - `first_token_s`: the first chunk whose completion count rose was read
    - `done_s`: the stream ended, or the request failed
    - `token_s[i]`: a chunk brought the completion to `token_counts[i]` tokens

    `reconnects` counts sendings on a connection that the server had closed already (see `IDLE_CLOSE_S`).
    Anything but status "ok" is a failure, and a miss for every limit, even where a first token was seen.
    """

    id: str
    cohort: int
    limit_class: str
    prompt_tokens: int
    output_tokens: int
    due_s: float
    dispatched_s: float | None = None
    connected_s: float | None = None
    sent_s: float | None = None
    first_byte_s: float | None = None
    first_token_s: float | None = None
    done_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    status: str = CANCELLED
    http_status: int | None = None
    error: str | None = None
    completion_tokens: int = 0
    server_prompt_tokens: int | None = None
    finish_reason: str | None = None
    connection_reused: bool = False
    reconnects: int = 0


def encode_body(target: Target, request: Request, cache_salt: str) -> bytes:
    """The JSON body of a streamed completion of exactly `request.output_tokens` tokens."""
    asked: dict[str, Any] = {"prompt": request.prompt if request.text is None else request.text}
    if request.messages is not None:
        asked = {"messages": request.messages}
    body = asked | {
        "model": target.model,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        # Without a tokenizer chunks carry no text: only the running count tells which chunk brings a token.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if target.extensions:
        body |= {"min_tokens": request.output_tokens, "ignore_eos": True, "cache_salt": cache_salt}
    return orjson.dumps(body)


def encode_message(target: Target, request: Request, cache_salt: str) -> tuple[bytes, bytes]:
    """Head and body of the whole HTTP request, to be sent in one piece."""
    body = encode_body(target, request, cache_salt)
    parts = urlsplit(target.base_url)
    fields = {
        "Host": parts.netloc,
        "Content-Type": "application/json",
        "Content-Length": len(body),
        "Accept": "text/event-stream",
        "Accept-Encoding": "identity",
        "User-Agent": "kimi-k3-harness",
        "X-Request-Id": f"{cache_salt}-{request.id}",  # names the request in the server's log
        "Connection": "close",
        **auth(target.api_key),
    }
    what = "completions" if request.messages is None else "chat/completions"
    lines = [f"POST {parts.path}/v1/{what} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join((*lines, "", "")).encode("latin-1"), body


async def send(
    connector: Connector,
    standby: Standby,
    target: Target,
    request: Request,
    message: Message,
    due_s: float,
    timeouts: Timeouts,
    clock: Callable[[], float],
) -> RequestRecord:
    """Send one request now and follow it to its end; never raises for what the server or the network does.

    `clock` gives seconds from the cell's start. Cancelling the calling task ends the request with status
    "cancelled" and still returns its record.
    """
    dispatched_s = clock()
    answer = CompletionAnswer()
    connection: Connection | None = None
    reconnects = 0
    try:
        connection = await standby.take()
        connection.send(message, answer)
        await _follow(answer, due_s, timeouts, clock)
        if _was_closed_before(connection, answer, dispatched_s):
            reconnects, answer = 1, CompletionAnswer()
            connection = await connector.open()
            connection.send(message, answer)
            await _follow(answer, due_s, timeouts, clock)
    except asyncio.CancelledError:
        answer.end(CANCELLED, "cancelled by the harness", clock())
    except OSError as error:  # of connecting; a TimeoutError is one, too
        kind = "" if isinstance(error, TimeoutError) else f"{type(error).__name__}: "
        answer.end(CONNECT_ERROR, one_line(f"{kind}{error}"), clock())
    finally:
        if connection:
            connection.close()
        else:
            standby.close()
    wanted = request.output_tokens if target.extensions else 1
    status, error_text = answer.status, answer.error
    if status == OK and answer.completion_tokens < wanted:
        status = INCOMPLETE
        error_text = f"{answer.completion_tokens} of {wanted} completion tokens arrived"
    elif status == OK and not answer.token_s:
        status = INCOMPLETE
        error_text = "no chunk showed when a token came: neither text nor a running count of usage"
    return RequestRecord(
        id=request.id,
        cohort=request.cohort,
        limit_class=request.limit_class,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        due_s=due_s,
        dispatched_s=dispatched_s,
        connected_s=connection.opened_s if connection else None,
        sent_s=answer.sent_s,
        first_byte_s=answer.first_byte_s,
        first_token_s=answer.token_s[0] if answer.token_s else None,
        done_s=answer.done_s,
        token_s=answer.token_s,
        token_counts=answer.token_counts,
        status=status,
        http_status=answer.http_status,
        error=error_text,
        completion_tokens=answer.completion_tokens,
        server_prompt_tokens=answer.server_prompt_tokens,
        finish_reason=answer.finish_reason,
        reconnects=reconnects,
    )


async def _follow(
    answer: CompletionAnswer, due_s: float, timeouts: Timeouts, clock: Callable[[], float]
) -> None:
    """Returns when the answer has ended, by itself or by a time-out."""

    def give_up(what: str, limit_s: float) -> None:
        if what == NOT_FINISHED or not answer.token_s:
            answer.end(TIMEOUT, f"{what} {limit_s:g} s after it was due", clock())

    # Timers rather than asyncio.timeout, whose bookkeeping costs more than the rest of this function.
    loop = asyncio.get_running_loop()
    limits = [(NOT_FINISHED, timeouts.total_s)]
    if timeouts.first_token_s < timeouts.total_s:
        limits.append(("no token", timeouts.first_token_s))
    timers = [
        loop.call_later(max(0.0, due_s + limit_s - clock()), give_up, what, limit_s)
        for what, limit_s in limits
    ]
    try:
        await answer.ended
    finally:
        for timer in timers:
            timer.cancel()


def _was_closed_before(connection: Connection, answer: CompletionAnswer, dispatched_s: float) -> bool:
    """Whether the server, not knowing of the request, had closed a connection that was opened ahead."""
    return (
        answer.status == STREAM_ERROR
        and answer.first_byte_s is None
        and connection.ended
        and connection.opened_s < dispatched_s
        and answer.done_s is not None
        and answer.done_s - dispatched_s < IDLE_CLOSE_S
    )
