# SPDX-License-Identifier: Apache-2.0
"""Every verdict on parity that a run came to, for each launch of its engines, with what it rests on.

parity/check-<n>/    n from 1: verdict.json, prompts.json.gz, <arm>.json.gz, and the ranks' proofs as they stood then,
                     proof/<arm>/rank-<r>.json

The manifest's `parity_checks` list them: `launches` by arm are those that the verdict is about, which is that of the
last check that names a launch. Runs of before have none of it, but parity.json and its answers, of the last session.
"""

import gzip
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.files import write_bytes, write_json
from harness.parity import ArmAnswers
from harness.store import Cell


def keep_answers(folder: Path, answers: Mapping[str, ArmAnswers]) -> None:
    for name, answer in answers.items():
        write_bytes(folder / f"{name}.json.gz", gzip.compress(json.dumps(asdict(answer)).encode(), mtime=0))


def keep_check(
    run: Path,
    manifest: dict[str, Any],
    verdict: Mapping[str, Any],
    answers: Mapping[str, ArmAnswers],
    launches: Mapping[str, int],
) -> None:
    """Adds a check to the manifest, which is left to the caller to write. `answers` are all that were compared."""
    checks = manifest.setdefault("parity_checks", [])
    folder = folder_of(run, len(checks) + 1)
    folder.mkdir(parents=True, exist_ok=True)
    keep_answers(folder, answers)
    if (prompts := run / "parity" / "prompts.json").exists():
        write_bytes(folder / "prompts.json.gz", gzip.compress(prompts.read_bytes(), mtime=0))
    for name in answers:
        for proof in (run / "proof" / name).glob("rank-*.json"):
            (folder / "proof" / name).mkdir(parents=True, exist_ok=True)
            write_bytes(folder / "proof" / name / proof.name, proof.read_bytes())
    write_json(folder / "verdict.json", verdict)
    checks.append(
        {
            "unix_s": time.time(),
            "session": len(manifest.get("sessions", ())),
            "launches": dict(launches),
            "ok": verdict["ok"],
            "refusal": verdict["refusal"],
        }
    )


def folder_of(run: Path, number: int) -> Path:
    return run / "parity" / f"check-{number}"


def parity_of(manifest: Mapping[str, Any], cells: Iterable[Cell]) -> dict[str, Any] | None:
    """A run's verdict on parity: its last one, but refused where a launch of `cells` did not pass its own check."""
    last: dict[str, Any] | None = manifest.get("parity")
    checks = manifest.get("parity_checks")
    if last is None or not last["ok"] or checks is None:
        return last
    check_of = {launch: check for check in checks for launch in check["launches"].items()}
    for arm, launch in sorted({(cell.key.arm, cell.facts["launch"]) for cell in cells}):
        check = check_of.get((arm, launch))
        if check is None or not check["ok"]:
            why = "its parity was not checked" if check is None else check["refusal"]
            return {**last, "ok": False, "refusal": f"launch {launch + 1} of {arm} was timed, but {why}"}
    return last
