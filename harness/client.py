# SPDX-License-Identifier: Apache-2.0
"""One completion request over HTTP, and the record of everything that happened to it.

Every request opens its own connection. A kept one would save a round trip, but the server may close it while
idle, just as the request is written, and the harness would count its own bad luck as the server's failure.
What the connection costs stands in the record (`connected_s`).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter

from harness.sse import SseReader
from harness.trace import Request

OK = "ok"
HTTP_ERROR = "http_error"
CONNECT_ERROR = "connect_error"
STREAM_ERROR = "stream_error"
TIMEOUT = "timeout"
INCOMPLETE = "incomplete"
CANCELLED = "cancelled"

ERROR_CHARACTERS = 200  # kept of an error's text, or of an error answer's body


@dataclass(frozen=True)
class Target:
    """A server under test. `base_url` has neither `/v1` nor a trailing slash.

    `extensions` sends the fields that only some servers know: min_tokens, ignore_eos and cache_salt.
    """

    name: str
    base_url: str
    model: str
    extensions: bool = True
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class RequestRecord:
    """One row of a cell's Parquet file.

    Times (`*_s`) are seconds from the cell's start on the client's monotonic clock, None where that point was
    never reached:

    - `due_s`: when the schedule wanted it sent; TTFT counts from here
    - `dispatched_s`: the client began; `dispatched_s - due_s` is the slip
    - `connected_s`: the connection stood
    - `sent_s`: the last byte of the body was handed to the socket
    - `first_byte_s`: status line and headers of the answer were read
    - `first_token_s`: the first chunk whose completion count rose was read
    - `done_s`: the stream ended, or the request failed
    - `token_s[i]`: a chunk brought the completion to `token_counts[i]` tokens

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


def encode_body(target: Target, request: Request, cache_salt: str) -> bytes:
    """The JSON body of a streamed completion of exactly `request.output_tokens` tokens."""
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": request.prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "stream": True,
        # Without a tokenizer chunks carry no text: only the running count tells which chunk brings a token.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if target.extensions:
        body |= {"min_tokens": request.output_tokens, "ignore_eos": True, "cache_salt": cache_salt}
    return orjson.dumps(body)


def new_session(target: Target) -> aiohttp.ClientSession:
    """A session for one cell: no limit on connections, a new one for each request, names resolved once."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(_on_connected)
    trace.on_connection_reuseconn.append(_on_reused)
    headers = {
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Accept-Encoding": "identity",
    }
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True, ttl_dns_cache=None),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=headers,
        trace_configs=[trace],
    )


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    request: Request,
    body: bytes,
    due_s: float,
    timeout_s: float,
    clock: Callable[[], float],
) -> RequestRecord:
    """Send one request now and follow it to its end; never raises for what the server or the network does.

    `clock` gives seconds from the cell's start; `timeout_s` counts from the due time. Cancelling the calling
    task ends the request with status "cancelled" and still returns its record.
    """
    timeline = _Timeline(clock, dispatched_s=clock())
    status, error = OK, None
    try:
        async with asyncio.timeout(max(0.0, due_s + timeout_s - clock())):
            await _exchange(session, f"{target.base_url}/v1/completions", body, timeline)
        wanted = request.output_tokens if target.extensions else 1
        if not timeline.finished:
            status, error = INCOMPLETE, "the stream ended without [DONE]"
        elif timeline.completion_tokens < wanted:
            status = INCOMPLETE
            error = f"{timeline.completion_tokens} of {wanted} completion tokens arrived"
    except TimeoutError:
        status, error = TIMEOUT, f"not finished {timeout_s:g} s after it was due"
    except asyncio.CancelledError:
        status, error = CANCELLED, "cancelled by the harness"
    except _Refused as refused:
        status, error = HTTP_ERROR, str(refused)
    except _StreamError as broken:
        status, error = STREAM_ERROR, str(broken)
    except (aiohttp.ClientError, OSError) as broken:
        status = CONNECT_ERROR if timeline.connected_s is None else STREAM_ERROR
        error = one_line(f"{type(broken).__name__}: {broken}")
    return RequestRecord(
        id=request.id,
        cohort=request.cohort,
        limit_class=request.limit_class,
        prompt_tokens=len(request.prompt),
        output_tokens=request.output_tokens,
        due_s=due_s,
        dispatched_s=timeline.dispatched_s,
        connected_s=timeline.connected_s,
        sent_s=timeline.sent_s,
        first_byte_s=timeline.first_byte_s,
        first_token_s=timeline.token_s[0] if timeline.token_s else None,
        done_s=clock() if timeline.done_s is None else timeline.done_s,
        token_s=timeline.token_s,
        token_counts=timeline.token_counts,
        status=status,
        http_status=timeline.http_status,
        error=error,
        completion_tokens=timeline.completion_tokens,
        server_prompt_tokens=timeline.server_prompt_tokens,
        finish_reason=timeline.finish_reason,
        connection_reused=timeline.connection_reused,
    )


def one_line(text: str) -> str:
    """At most `ERROR_CHARACTERS` characters of `text`, white space squeezed."""
    return " ".join(text.split())[:ERROR_CHARACTERS]


class _Refused(Exception):
    """The server answered with an HTTP error."""


class _StreamError(Exception):
    """The server reported an error inside the stream, or sent something that is no completion."""


@dataclass
class _Timeline:
    """What is known about a request while it runs."""

    clock: Callable[[], float]
    dispatched_s: float
    connected_s: float | None = None
    sent_s: float | None = None
    first_byte_s: float | None = None
    done_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    finished: bool = False
    http_status: int | None = None
    completion_tokens: int = 0
    server_prompt_tokens: int | None = None
    finish_reason: str | None = None
    connection_reused: bool = False

    def take(self, event: str, now: float) -> None:
        """Account for one event of the stream, read at `now`."""
        if event == "[DONE]":
            self.finished, self.done_s = True, now
            return
        try:
            chunk = orjson.loads(event)
            if error := chunk.get("error"):
                message = error.get("message", error) if isinstance(error, dict) else error
                raise _StreamError(one_line(str(message)))
            usage = chunk.get("usage") or {}
            count = usage.get("completion_tokens")
            self.server_prompt_tokens = usage.get("prompt_tokens", self.server_prompt_tokens)
            choices = chunk.get("choices")
            if choices:
                choice = choices[0]
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                if count is None:  # no running count: each chunk with text stands for one token
                    count = self.completion_tokens + bool(_text(choice))
                if count > self.completion_tokens:
                    self.token_s.append(now)
                    self.token_counts.append(count)
            # A chunk of usage alone corrects the total and brings no token.
            self.completion_tokens = max(self.completion_tokens, count or 0)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
            raise _StreamError(one_line(f"not a completion chunk: {event}")) from error


def _text(choice: dict[str, Any]) -> str:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""


async def _exchange(session: aiohttp.ClientSession, url: str, body: bytes, timeline: _Timeline) -> None:
    payload = _TimedBody(body, timeline)
    async with session.post(url, data=payload, allow_redirects=False, trace_request_ctx=timeline) as response:
        timeline.first_byte_s = timeline.clock()
        timeline.http_status = response.status
        if response.status != 200:
            text = (await response.content.read(4096)).decode("utf-8", errors="replace")
            raise _Refused(one_line(f"HTTP {response.status}: {text}"))
        reader = SseReader()
        async for chunk in response.content.iter_any():
            now = timeline.clock()
            for event in reader.feed(chunk):
                timeline.take(event, now)
            if timeline.finished:
                return


class _TimedBody(aiohttp.BytesPayload):
    """A body that notes when its last byte was handed to the socket; aiohttp's trace tells it too early."""

    def __init__(self, body: bytes, timeline: _Timeline) -> None:
        super().__init__(body, content_type="application/json")
        self._timeline = timeline

    async def write_with_length(self, writer: AbstractStreamWriter, content_length: int | None) -> None:
        await super().write_with_length(writer, content_length)
        self._timeline.sent_s = self._timeline.clock()


async def _on_connected(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    timeline: _Timeline = context.trace_request_ctx
    timeline.connected_s = timeline.clock()


async def _on_reused(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: object) -> None:
    timeline: _Timeline = context.trace_request_ctx
    timeline.connected_s = timeline.clock()
    timeline.connection_reused = True
