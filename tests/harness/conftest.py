# SPDX-License-Identifier: Apache-2.0
"""What the harness's tests share beside `builders`."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def hangups_are_heard() -> Iterator[None]:
    """As in a terminal: under nohup a process ignores SIGHUP, and so do those that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
