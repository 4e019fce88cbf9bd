# SPDX-License-Identifier: Apache-2.0
"""Messages kept in memory that the kernel sends from."""

import socket

from harness.outbox import Outbox


def test_what_a_socket_takes_and_the_rest_are_the_message() -> None:
    """The reader takes nothing: some of 8 MB goes into the buffers, the rest is handed back."""
    with Outbox() as outbox:
        outbox.add(b"another", b"request")
        body = bytes(range(256)) * 32768
        message = outbox.add(b"head", body)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            rest = message.send_on(ours.fileno())
            assert 0 < len(rest) < len(body)
            taken = b""
            while len(taken) + len(rest) < 4 + len(body):
                taken += theirs.recv(1 << 20)
            assert taken + rest == b"head" + body


def test_a_message_can_be_sent_again() -> None:
    with Outbox() as outbox:
        message = outbox.add(b"head", b"body")
        for _ in range(2):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                assert message.send_on(ours.fileno()) == b""
                assert theirs.recv(100) == b"headbody"


def test_a_broken_socket_takes_nothing() -> None:
    with Outbox() as outbox:
        message = outbox.add(b"head", b"body")
        ours, theirs = socket.socketpair()
        with ours:
            theirs.close()
            assert message.send_on(ours.fileno()) == b"headbody"
