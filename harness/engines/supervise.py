# SPDX-License-Identifier: Apache-2.0
"""Runs one engine and leaves nothing of it behind, whatever ends first.

    python supervise.py --nice 10 --grace 10 -- argv...

The harness starts this file as a program and holds the only writing end of its stdin. The protocol has one
verb:

    stdin reaches end of file    the harness wants the engine stopped, or is gone (SIGKILL closes pipes, too)

A pipe rather than PR_SET_PDEATHSIG on this process, because that signal fires when the *thread* that started
us ends.

Being a child subreaper, the supervisor inherits every process below it whose own parent died: daemons that
left the session or process group included. So "no child is left to wait for" proves that no descendant is
left. As it can be killed itself (SIGKILL), there are two of it, each of which ends the engine without the other:

    guard ── supervisor ── engine ── its workers

    supervisor killed    the guard, a subreaper as well, inherits the orphans and kills them
    guard killed         the supervisor gets SIGTERM (PR_SET_PDEATHSIG) and ends the engine in order

What is left if both are killed, and the harness with them, the next start of an engine ends (process.py).
Shared memory that the engine made, has mapped at its end and does not remove is removed, too.

Exit status: the engine's own, 128 + N when signal N ended it, 127 when it could not be executed. Only the
standard library is imported, so that the file runs wherever the interpreter does. Linux only.
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STRAGGLER_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL for what outlives the main process: time to unlink shared memory."""
POLL_S = 0.02
SHARED_MEMORY = Path("/dev/shm")


def main() -> int:
    parser = argparse.ArgumentParser(prog="supervise")
    parser.add_argument("--nice", type=int, default=0, help="added to the nice value of the engine")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("argv", nargs="+")
    args = parser.parse_args()

    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()
    if supervisor := os.fork():
        return watch_over(supervisor)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    stop_requested = _signals_as_file_descriptor()
    if os.getppid() != guard:  # it died before we asked to be told
        return 128 + signal.SIGTERM
    foreign = set(SHARED_MEMORY.iterdir())
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # a fork does not inherit it
    _lower_priority(args.nice)
    try:
        engine = subprocess.Popen(args.argv, stdin=subprocess.DEVNULL, preexec_fn=_die_with_supervisor).pid
    except OSError as error:
        print(f"cannot execute {args.argv[0]}: {error.strerror}", file=sys.stderr)
        return 127

    engine_ended = os.pidfd_open(engine)
    select.select([sys.stdin.fileno(), stop_requested, engine_ended], [], [])
    segments = mapped_segments(descendants(os.getpid())) - foreign
    status = end(engine, args.grace)
    for segment in segments:
        segment.unlink(missing_ok=True)
    return status


def watch_over(supervisor: int) -> int:
    """The guard: passes signals on, returns the supervisor's status, and ends what it may have left."""

    def pass_on(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    statuses: dict[int, int] = {}
    while supervisor not in statuses:
        pid, status = os.waitpid(-1, 0)
        statuses[pid] = status
    while not _wait(statuses, POLL_S):
        _signal_descendants(signal.SIGKILL)
    code = os.waitstatus_to_exitcode(statuses[supervisor])
    return code if code >= 0 else 128 - code


def end(engine: int, grace_s: float) -> int:
    """Stops the engine and everything below it; the main process first, which knows how to close in order."""
    statuses: dict[int, int] = {}
    if not _wait(statuses, 0.0, engine):
        os.kill(engine, signal.SIGTERM)
        _wait(statuses, grace_s, engine)
    _signal_descendants(signal.SIGTERM)
    if not _wait(statuses, min(grace_s, STRAGGLER_GRACE_S)):
        while not _wait(statuses, POLL_S):
            _signal_descendants(signal.SIGKILL)
    code = os.waitstatus_to_exitcode(statuses[engine])
    return code if code >= 0 else 128 - code


def _wait(statuses: dict[int, int], timeout_s: float, pid: int | None = None) -> bool:
    """Collects dead children into `statuses` until `pid` (None: all) is among them; False at the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            while (dead := os.waitpid(-1, os.WNOHANG))[0]:
                statuses[dead[0]] = dead[1]
        except ChildProcessError:
            return True
        if pid in statuses:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)


def _signal_descendants(number: signal.Signals) -> None:
    for pid in descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):  # ended since the listing
            os.kill(pid, number)


def descendants(root: int) -> list[int]:
    """Every process below `root` in one reading of /proc; what is forked meanwhile, the next one finds."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def mapped_segments(pids: Iterable[int]) -> set[Path]:
    """Named shared memory that the processes have mapped. vLLM leaves 8 MB of it behind with each CPU engine."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # ended since the listing
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            for line in maps.splitlines():
                _, folder, name = line.partition(f"{SHARED_MEMORY}/")
                if folder:
                    found.add(SHARED_MEMORY / name.removesuffix(" (deleted)"))
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue
            # "pid (any name, parentheses and blanks included) state ppid ..."
            yield int(entry.name), int(stat.rpartition(")")[2].split()[1])


def _lower_priority(nice: int) -> None:
    """With sched_autogroup, niceness counts within a session only; so our session gets a weight, too."""
    if nice:
        os.nice(nice)
        with contextlib.suppress(OSError):  # no such file: autogroups are off
            Path("/proc/self/autogroup").write_text(str(nice))


def _signals_as_file_descriptor() -> int:
    """Turns SIGTERM, SIGINT and SIGHUP into a readable pipe, so that one select() waits for everything."""
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return readable


def _die_with_supervisor() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


if __name__ == "__main__":
    sys.exit(main())
