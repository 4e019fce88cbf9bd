# SPDX-License-Identifier: Apache-2.0
"""Waking at a time that is exact to tens of microseconds, for an event loop whose own timers count milliseconds.

epoll takes its time-out in whole milliseconds, so asyncio's timers come up to 1 ms late and uvloop's as well;
polling away that millisecond would cost more CPU time than the request itself. Linux has timers that are file
descriptors (timerfd_create(2)), which the loop can wait for like for a socket. Python offers them from 3.13
on; until then two functions of the C library are called.
"""

import asyncio
import ctypes
import os
import time

CLOCK_MONOTONIC = time.CLOCK_MONOTONIC
TFD_TIMER_ABSTIME = 1
POLL_S = 0.0001  # what is left when the timer fires is polled away, for the wake itself takes time

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """`with Alarm() as alarm: await alarm.until(t)`; one waiter at a time, `t` in time.monotonic() seconds."""

    def __enter__(self) -> "Alarm":
        self._fd: int = _libc.timerfd_create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._rang = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._fd, self._ring)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    async def until(self, at_s: float, *, poll: bool = True) -> None:
        """Returns at `at_s`, never before; at once where that has passed. Without `poll` some 0.1 ms later."""
        early_s = POLL_S if poll else 0.0
        if at_s - early_s > time.monotonic():
            self._rang.clear()
            self._set(at_s - early_s)
            await self._rang.wait()
        while time.monotonic() < at_s:
            await asyncio.sleep(0)

    def _set(self, at_s: float) -> None:
        seconds = int(at_s)
        when = _Itimerspec(_Timespec(0, 0), _Timespec(seconds, max(1, int((at_s - seconds) * 1e9))))
        if _libc.timerfd_settime(self._fd, TFD_TIMER_ABSTIME, ctypes.byref(when), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _ring(self) -> None:
        os.read(self._fd, 8)
        self._rang.set()
