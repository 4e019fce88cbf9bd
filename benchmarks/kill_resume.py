# SPDX-License-Identifier: Apache-2.0
"""Kills the harness (SIGKILL) at random moments of a sweep and resumes it each time.

    python benchmarks/kill_resume.py --kills 20 --out results/kill-resume.json

A pair is served by the tests' stand-in engine (real processes, sockets and files; no model), once without
interruption and once killed again and again. Shown: the resumed run ends with the same list of cells, each with
every request of the trace; a cell that was complete at a kill is the same file ever after; and no engine, no
worker and no known-delay server is left.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAKE = f"{sys.executable} {ROOT / 'tests' / 'harness' / 'fake_engine.py'}"
MARK = "KILL_RESUME_MARK"


def command(out: Path, cache: Path, *more: str) -> list[str]:
    words = [sys.executable, "-m", "harness", "bench", "--engine-command", FAKE, "--out", str(out)]
    words += ["--cache", str(cache), "--requests", "12", "--cohort-size", "4", "--output-tokens", "8"]
    words += ["--rates", "4,6,8", "--absolute-rates", "--sla", "1,2", "--quick", *more]
    return words


def complete_cells(out: Path) -> dict[str, str]:
    """Name -> hash of the rows, of every cell that is whole."""
    cells = {}
    for path in sorted((out / "cells").glob("*.json")):
        if not json.loads(path.read_bytes())["aborted"]:
            cells[path.stem] = hashlib.sha256(path.with_suffix(".parquet").read_bytes()).hexdigest()
    return cells


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


def run_once(words: list[str], log: Path, kill_after_s: float | None) -> int | None:
    """The exit status, or None where it was killed first."""
    with log.open("ab") as file:
        process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file)
        try:
            return process.wait(kill_after_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return None


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
        began = time.monotonic()
        status = run_once(command(base / "whole", base / "cache"), base / "log", None)
        whole_s = time.monotonic() - began
        assert status == 0, (base / "log").read_text()[-2000:]
        wanted = set(complete_cells(base / "whole"))
        print(f"uninterrupted: {len(wanted)} cells in {whole_s:.1f} s", flush=True)

        out, kills, sessions = base / "killed", [], 0
        known: dict[str, str] = {}
        while True:
            sessions += 1
            # Early kills come after a short while, so that a run that goes on from each survives many of them.
            after_s = rng.uniform(0.3, whole_s) if len(kills) < arguments.kills else None
            status = run_once(command(out, base / "cache", "--resume"), base / "log", after_s)
            left = left_over()
            assert not left, f"left over: {left}"
            now = complete_cells(out)
            changed = [name for name, digest in known.items() if now.get(name) != digest]
            assert not changed, f"lost or changed: {changed}"
            known = now
            if status is None:
                kills.append({"after_s": round(after_s or 0, 2), "cells": len(now)})
                print(f"kill {len(kills)}: after {after_s:.1f} s, {len(now)} cells whole", flush=True)
            else:
                assert status == 0, (base / "log").read_text()[-2000:]
                if len(kills) >= arguments.kills:
                    break
                # It ended before its kill: the next kills meet a run of its own.
                print(f"run complete after {len(kills)} kills: begun anew", flush=True)
                assert set(now) == wanted
                out, known = base / f"killed-{len(kills)}", {}
        assert set(known) == wanted, (
            f"{sorted(wanted - set(known))} missing, {sorted(set(known) - wanted)} more"
        )
        summary = json.loads((out / "summary.json").read_bytes())
        counts = {(a["name"], c["offered_qps"], c["repeat"]) for a in summary["arms"] for c in a["cells"]}
        total = sum(len(arm["cells"]) for arm in summary["arms"])
        assert len(counts) == total == len(wanted)
        assert all(c["n"] == 12 for arm in summary["arms"] for c in arm["cells"])
        print(f"{len(kills)} kills, {sessions} sessions: the same {len(known)} cells,", end=" ")
        print("none lost, none doubled, nothing left")
        if arguments.out:
            facts = {"kills": kills, "sessions": sessions, "cells": sorted(known), "whole_s": whole_s}
            arguments.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
