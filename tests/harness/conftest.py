# SPDX-License-Identifier: Apache-2.0
"""What the harness's tests share beside `builders`."""

import signal
from collections.abc import Iterator

import pytest

from harness import calibrate, validity


@pytest.fixture
def hangups_are_heard() -> Iterator[None]:
    """As in a terminal: under nohup a process ignores SIGHUP, and so do those that it starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def client_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what follows from real cells, not of how well a busy machine lets their client keep time.

    It is never too late, and its own error is measured by four requests.
    """
    monkeypatch.setattr(validity, "slip_limit_s", lambda *_: 60.0)
    monkeypatch.setattr(validity, "SPAN_TOLERANCE", 1000.0)
    monkeypatch.setattr(calibrate, "LEAST_REQUESTS", 4)
