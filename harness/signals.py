# SPDX-License-Identifier: Apache-2.0
"""The signals that ask a run to end: Ctrl-C, SIGTERM, and SIGHUP where it is not ignored (nohup)."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def ending() -> tuple[signal.Signals, ...]:
    """All three end a run in the same way: with a report of what there is."""
    hung_up = () if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *hung_up)


def on_ending(callback: Callable[[], object]) -> None:
    """Have the running event loop call `callback` instead of ending the process."""
    for number in ending():
        asyncio.get_running_loop().add_signal_handler(number, callback)


@contextmanager
def deferred() -> Iterator[None]:
    """What is inside is finished first; then a signal that came meanwhile raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():  # the others get no signals
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in ending()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
    if came:
        raise KeyboardInterrupt
