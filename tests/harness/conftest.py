# SPDX-License-Identifier: Apache-2.0
"""What the harness's tests share beside `builders`."""

import signal
from collections.abc import Iterator

import pytest

from harness import validity


@pytest.fixture
def hangups_are_heard() -> Iterator[None]:
    """As in a terminal: under nohup a process ignores SIGHUP, and so do those that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def a_late_client_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what follows from real cells, not of how late a busy machine lets their client be."""
    monkeypatch.setattr(validity, "slip_limit_s", lambda *_: 60.0)
    monkeypatch.setattr(validity, "SPAN_TOLERANCE", 1000.0)
