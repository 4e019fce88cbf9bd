# SPDX-License-Identifier: Apache-2.0
"""What the harness's tests share beside `builders`."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from harness import calibrate, connection, load, validity

settings.register_profile("untimed", settings(), deadline=None)  # an example may be slow where the machine is
settings.load_profile("untimed")


@pytest.fixture
def hangups_are_heard() -> Iterator[None]:
    """As in a terminal: under nohup a process ignores SIGHUP, and so do those that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def client_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what follows from real cells, not of how well a busy machine lets their client keep time.

    It is never too late, its own error is measured by four requests, and its progress is looked at often.
    """
    monkeypatch.setattr(validity, "slip_limit_s", lambda *_: 60.0)
    monkeypatch.setattr(validity, "SPAN_TOLERANCE", 1000.0)
    monkeypatch.setattr(calibrate, "LEAST_REQUESTS", 4)
    monkeypatch.setattr(load, "PROGRESS_S", 0.02)


@pytest.fixture
def connects_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment in which the machine stands still hardly falls between a cell's beginning and its first connection."""
    monkeypatch.setattr(load, "LEAD_S", 0.0)
    monkeypatch.setattr(connection, "REOPEN_S", 0.001)
