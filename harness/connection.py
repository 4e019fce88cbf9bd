# SPDX-License-Identifier: Apache-2.0
"""Connections that are open before a request is due, each of which carries one request.

A request that first has to connect pays for the handshake, for a slow accept and for the client's own work
at the one moment that counts. So each request's connection is opened a little ahead (`Standby`) and replaced
when the server closes it meanwhile. What neither side can prevent is a close that is already on its way when
the request is written; such a request is sent again on a new connection (client.py), never counted as a
failure, and its TTFT still runs from its due time.

The event loop's protocols are used rather than an HTTP client's coroutines: at 80 requests of 480 KB a second
these cost more than the bounds that the harness sets itself. HTTP is parsed by httptools (llhttp).
"""

import asyncio
import contextlib
import functools
import select
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from harness.errors import UserError
from harness.outbox import Message

REOPEN_S = 0.02
"""Pause before a connection that the server closed while it was idle is opened again."""


class Answer(Protocol):
    """What a connection tells about the answer to its request; times are its clock's."""

    def on_sent(self, now: float) -> None: ...
    def on_head(self, status: int, headers: dict[bytes, bytes], now: float) -> None: ...
    def on_body(self, data: bytes, now: float) -> None: ...
    def on_end(self, now: float) -> None: ...
    def on_lost(self, reason: str | None, now: float) -> None:
        """The connection ended first; `reason` is None where its end is a regular end of the answer."""


class Connection(asyncio.Protocol):
    """One TCP or TLS connection. `lost` is done once it has ended."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.opened_s = 0.0
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clock = clock
        self._now = 0.0  # when the bytes that are being parsed were read
        self._answer: Answer | None = None
        self._spoke = False  # the server sent something before it was asked
        self._full = False  # the transport holds bytes that the socket did not take yet

    @property
    def ended(self) -> bool:
        return self.lost.done() or self._transport.is_closing()

    @property
    def usable(self) -> bool:
        """It stands, and no end of it waits in the socket for the event loop to notice."""
        return not (self.ended or self._spoke or self._poll.poll(0))

    def send(self, message: Message, answer: Answer) -> None:
        """Send the request at once; `answer` hears of everything that follows."""
        if self.ended:  # since it was opened; its socket's number may be another connection's by now
            answer.on_lost("the server closed the connection", self._clock())
            return
        self._answer = answer
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        encrypted = self._transport.get_extra_info("sslcontext") is not None
        rest = message.read(message.start) if encrypted else message.send_on(self._socket)
        if rest:
            self._transport.write(rest)
        if not self._full:
            answer.on_sent(self._clock())

    def close(self) -> None:
        """Drop the connection; `answer` hears nothing more."""
        self._answer = None
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop has a class of its own
        self._transport = transport
        # resume_writing() then tells when the last byte has left for the socket.
        transport.set_write_buffer_limits(high=0)
        self._poll = select.poll()
        self._socket: int = transport.get_extra_info("socket").fileno()
        self._poll.register(self._socket, select.POLLIN)
        self.opened_s = self._clock()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        if self._answer:
            self._answer.on_sent(self._clock())

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        if self._answer is None:
            self._spoke = True  # nobody asked: a proxy's time-out, say
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._answer:
                self._answer.on_lost(f"not an HTTP answer: {error}", self._now)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
        if self._answer is None:
            return
        reason: str | None = (
            f"{type(error).__name__}: {error}" if error else "the server closed the connection"
        )
        if not error and self._headers and not self._framed:
            reason = None  # an answer without a length lasts until the connection ends
        self._answer.on_lost(reason, self._clock())

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue and its like announce the answer
            self._headers.clear()
        elif self._answer:
            self._answer.on_head(status, self._headers, self._now)

    def on_body(self, data: bytes) -> None:
        if self._answer:
            self._answer.on_body(data, self._now)

    def on_message_complete(self) -> None:
        if self._answer and self._parser.get_status_code() >= 200:
            self._answer.on_end(self._now)

    @property
    def _framed(self) -> bool:
        return b"content-length" in self._headers or b"chunked" in self._headers.get(
            b"transfer-encoding", b""
        )


class Connector:
    """Opens connections to one server; its name is resolved once."""

    def __init__(
        self, base_url: str, clock: Callable[[], float], *, timeout_s: float, ca_file: Path | None = None
    ) -> None:
        parts = urlsplit(base_url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls_context(ca_file) if parts.scheme == "https" else None
        self._clock = clock
        self._timeout_s = timeout_s
        self._addresses: list[str] = []

    async def resolve(self) -> None:
        """Look the server's addresses up; where that fails, each request will say so."""
        with contextlib.suppress(OSError, UnicodeError):  # of a name that cannot be one
            found = await asyncio.get_running_loop().getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )
            self._addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))

    async def open(self) -> Connection:
        """A new connection. OSError (TLS errors included) or TimeoutError where there is none to be had."""
        loop = asyncio.get_running_loop()
        failure: OSError = OSError(f"cannot resolve {self._host}")
        for address in self._addresses:
            try:
                async with asyncio.timeout(self._timeout_s):
                    _, connection = await loop.create_connection(
                        lambda: Connection(self._clock),
                        address,
                        self._port,
                        ssl=self._tls,
                        server_hostname=self._host if self._tls else None,
                    )
            except TimeoutError:
                failure = TimeoutError(f"no connection within {self._timeout_s:g} s")
            except OSError as error:
                failure = error
            else:
                if address != self._addresses[0]:  # the next request need not try the others
                    self._addresses.sort(key=address.__ne__)
                return connection
        raise failure


class Standby:
    """A connection that is being kept open until `take`."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._kept = True
        self._opening = self._open()

    async def take(self) -> Connection:
        """The connection kept, or one that is opened now. Raises what `Connector.open` raises."""
        self._kept = False
        if self._opening.done() and (self._opening.exception() or not self._opening.result().usable):
            self.close()
            self._opening = asyncio.ensure_future(self._connector.open())
        if not self._opening.done():
            await self._opening
        return self._opening.result()

    def close(self) -> None:
        """For one that nobody will take."""
        self._kept = False
        self._opening.cancel()
        if self._opening.done() and not self._opening.cancelled() and not self._opening.exception():
            self._opening.result().close()

    def _open(self) -> "asyncio.Task[Connection]":
        opening = asyncio.ensure_future(self._connector.open())
        opening.add_done_callback(self._watch)
        return opening

    def _watch(self, opening: "asyncio.Future[Connection]") -> None:
        """Opens it again when the server ends it. A failure to open is for the request to report."""
        if not opening.cancelled() and not opening.exception():
            opening.result().lost.add_done_callback(self._pause)

    def _pause(self, _: object) -> None:
        if self._kept:
            asyncio.get_running_loop().call_later(REOPEN_S, self._open_again)

    def _open_again(self) -> None:
        if self._kept:
            self._opening = self._open()


def auth(api_key: str | None) -> dict[str, str]:
    """The header that a server with an API key asks for on every path."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


@functools.cache
def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """The system's authorities, or only those of `ca_file`; names are always checked."""
    try:
        return ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
    except ssl.SSLError as error:
        raise UserError(
            f"--ca-file {ca_file}: {error.reason or error}; give a PEM file of authorities"
        ) from error
