# SPDX-License-Identifier: Apache-2.0
"""Kills the harness (SIGKILL) at random moments of a sweep and resumes it each time.

    python benchmarks/kill_resume.py --kills 20 --out results/kill-resume.json

A pair is served by the tests' stand-in engine (real processes, sockets and files; no model), once without
interruption and then killed again and again, each time before its last cell is whole; after four kills a run may
end, and another one is begun. An engine has two supervisors (harness/engines/supervise.py): with two kills in three
one of them is killed as well. Shown: each resumed run ends with the same list of cells, each with every request of
the trace; a cell that was complete at a kill is the same file ever after, or set aside for a client that was late on a
busy machine; and no engine, no worker and no known-delay server is left.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAKE = f"{sys.executable} {ROOT / 'tests' / 'harness' / 'fake_engine.py'}"
KILLS_A_RUN = 4
REQUESTS = 12
MARK = "KILL_RESUME_MARK"


def command(out: Path, cache: Path, *more: str) -> list[str]:
    words = [sys.executable, "-m", "harness", "bench", "--engine-command", FAKE, "--out", str(out)]
    words += [
        "--cache",
        str(cache),
        "--requests",
        str(REQUESTS),
        "--cohort-size",
        "4",
        "--output-tokens",
        "8",
    ]
    words += ["--rates", "4,6,8", "--absolute-rates", "--sla", "1,2", "--quick", *more]
    return words


def complete_cells(out: Path) -> dict[str, str]:
    """Name -> hash of the rows, of every cell that is whole."""
    cells = {}
    for path in sorted((out / "cells").glob("*.json")):
        if not json.loads(path.read_bytes())["aborted"]:
            cells[path.stem] = hashlib.sha256(path.with_suffix(".parquet").read_bytes()).hexdigest()
    return cells


def aside(out: Path) -> set[str]:
    """Hashes of the rows of cells that were set aside."""
    paths = (out / "set_aside").glob("*-[0-9].parquet")
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def written(out: Path) -> int:
    """How many cells there are; a killed harness writes none that is not whole."""
    return len(list((out / "cells").glob("*.json")))


def marked_processes() -> list[int]:
    """Processes that inherited our mark and still live."""
    needle = f"{MARK}={os.environ[MARK]}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def left_over(within_s: float = 20.0) -> list[int]:
    deadline = time.monotonic() + within_s
    while (left := marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@dataclass(frozen=True)
class Moment:
    """When to kill the harness, and which supervisors with it ("nobody", "guard" or "supervisor").

    `after_s` counts from the session's start, or, where `cells` is not 0, from so many more whole cells.
    """

    cells: int
    after_s: float
    also: str


def supervisors() -> dict[str, list[int]]:
    """Of the engines that run: the outer ones ("guard") and the inner ones ("supervisor")."""
    programs = {}
    for pid in marked_processes():
        with contextlib.suppress(OSError):  # ended since the listing
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if b"supervise.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                programs[pid] = int(stat[1])
    return {
        "guard": [pid for pid, parent in programs.items() if parent not in programs],
        "supervisor": [pid for pid, parent in programs.items() if parent in programs],
    }


def run_whole(words: list[str], log: Path, out: Path) -> tuple[int, list[float]]:
    """Exit status, and the seconds after which there was one more whole cell."""
    began = time.monotonic()
    whole_s: list[float] = []
    with log.open("ab") as file:
        process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file)
        while process.poll() is None:
            if written(out) > len(whole_s):
                whole_s.append(time.monotonic() - began)
            time.sleep(0.05)
    return process.returncode, whole_s


def run_killed(
    words: list[str], log: Path, out: Path, moment: Moment, cells: int
) -> tuple[int | None, list[str]]:
    """Exit status and who was killed: None and some, or, where all `cells` were whole before the moment, nobody."""
    deadline = time.monotonic() + moment.after_s if moment.cells == 0 else math.inf
    first = written(out)
    with log.open("ab") as file:
        process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file)
        while time.monotonic() < deadline:
            if process.poll() is not None or (found := written(out)) == cells:
                return process.wait(), []
            if deadline == math.inf and found - first >= moment.cells:
                deadline = time.monotonic() + moment.after_s
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)  # it sees nobody die before it does
        with_it = supervisors().get(moment.also, [])
        for pid in (*with_it, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
    return None, ["harness", *([moment.also] if with_it else [])]


def require_same(out: Path, cells: set[str], wanted: set[str]) -> None:
    """A finished run holds the wanted cells, each once and with every request, also in its report."""
    assert cells == wanted, f"{sorted(wanted - cells)} missing, {sorted(cells - wanted)} more"
    arms = json.loads((out / "summary.json").read_bytes())["arms"]
    told = [(arm["name"], cell["offered_qps"], cell["repeat"]) for arm in arms for cell in arm["cells"]]
    assert len(set(told)) == len(told) == len(wanted)
    assert all(cell["n"] == REQUESTS for arm in arms for cell in arm["cells"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    rng = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        status: int | None
        status, whole_s = run_whole(command(base / "whole", base / "cache"), base / "log", base / "whole")
        assert status == 0, (base / "log").read_text()[-2000:]
        wanted = set(complete_cells(base / "whole"))
        print(f"uninterrupted: {len(wanted)} cells, the last one whole after {whole_s[-1]:.1f} s", flush=True)

        out, sessions, runs, here = base / "killed-0", 0, 0, 0
        kills: list[dict[str, Any]] = []
        known: dict[str, str] = {}
        while True:
            sessions += 1
            words = command(out, base / "cache", "--resume")
            if here < KILLS_A_RUN and len(kills) < arguments.kills:
                cells = rng.randrange(len(wanted) - len(known))
                at = len(known) + cells
                soonest_s, latest_s = (0.0, whole_s[at] - whole_s[at - 1]) if cells else (0.3, whole_s[0])
                also = rng.choice(("nobody", "guard", "supervisor"))
                moment = Moment(cells, rng.uniform(soonest_s, latest_s), also)
                status, killed = run_killed(words, base / "log", out, moment, len(wanted))
            else:
                (status, _), killed = run_whole(words, base / "log", out), []
            left = left_over()
            assert not left, f"left over: {left}"
            now = complete_cells(out)
            changed = [name for name, digest in known.items() if digest not in (now.get(name), *aside(out))]
            assert not changed, f"lost or changed: {changed}"
            known = now
            if killed:
                here += 1
                kills.append(
                    {
                        "after_cells": moment.cells,
                        "after_s": round(moment.after_s, 2),
                        "killed": killed,
                        "cells_whole": len(now),
                    }
                )
                print(
                    f"kill {len(kills)} ({' and '.join(killed)}): {moment.after_s:.1f} s after"
                    f" {f'{moment.cells} more cells' if moment.cells else 'its start'}, {len(now)} cells whole",
                    flush=True,
                )
            else:
                assert status == 0, (base / "log").read_text()[-2000:]
                require_same(out, set(now), wanted)
                runs += 1
                if len(kills) >= arguments.kills:
                    break
                print(f"run {runs} complete after {len(kills)} kills in all: another one", flush=True)
                out, known, here = base / f"killed-{runs}", {}, 0
        print(
            f"{len(kills)} kills, {sessions} sessions, {runs} runs: each with the same {len(wanted)} cells,",
            end=" ",
        )
        print("none lost, none doubled, nothing left")
        if arguments.out:
            facts = {
                "kills": kills,
                "sessions": sessions,
                "runs": runs,
                "cells": sorted(wanted),
                "whole_s": whole_s[-1],
            }
            arguments.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
