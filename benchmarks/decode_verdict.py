# SPDX-License-Identifier: Apache-2.0
"""What `decode_parity.py` makes of its arms' answers, and of arms that gave none."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from decode_arms import LENGTHS, OUTPUT_TOKENS, UNCURED, slug

from harness.parity import logprob_distance

NO_ERROR = re.compile(r"\b(DEBUG|INFO|WARNING) \d\d-\d\d ")
"""Levels of vLLM's log, with whole tracebacks in them."""
ERROR = re.compile(r"\b\w*(Error|Exception)(:|$)")
"""As a traceback ends, unlike the source line that raised it."""
CONSEQUENCE = re.compile(r"EngineDeadError|See root cause")
"""Of an error that was logged before."""


def progress_file(out: Path, name: str) -> Path:
    """Where an arm keeps how far it has come."""
    return out / f"{slug(name)}.progress.json"


def progress(out: Path, name: str) -> dict[str, float]:
    """Seconds after which an arm was loaded, had its turn, was warm and had answered, as far as it came."""
    path = progress_file(out, name)
    found: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def judge(
    out: Path, arms: Sequence[str], ended: Mapping[str, Mapping[str, Any]], tolerance: float
) -> dict[str, Any]:
    """Differences of every arm, in nats, and whether all are within the tolerance.

    `ended` says of each arm {"died": its exit status}, or {"late": {"limit_s", "since"}} where it was given up.
    """
    reference = {
        entry["id"]: [
            {"token": token, "top": top, "decoded": position > 0}
            for position, (token, top) in enumerate(zip(entry["tokens"], entry["top_logprobs"], strict=True))
        ]
        for entry in json.loads((out / "reference.json").read_text())
    }
    answers = {
        name: json.loads((out / f"{slug(name)}.json").read_text())
        for name in arms
        if (out / f"{slug(name)}.json").is_file()
    }
    rows, ok = [], True
    for name in arms:
        if name not in answers:
            row: dict[str, Any] = {"arm": name, "seconds": progress(out, name), **ended[name]}
            if "died" in row:
                row["expected"] = name in UNCURED
                row["words"] = last_words(out / f"{slug(name)}.log")
            ok &= row.get("expected", False)
            rows.append(row)
            continue
        mine = answers[name]
        row = {"arm": name, "seconds": mine["seconds"]}
        pairs = {
            "alone vs reference": (mine["alone"], reference),
            "together vs reference": (mine["together"], reference),
            "alone vs together": (mine["alone"], mine["together"]),
        }
        if "tp2" in answers and name != "tp2":
            pairs["alone vs tp2"] = (mine["alone"], answers["tp2"]["alone"])
        found = {key: differences(*sides, tolerance) for key, sides in pairs.items()}
        row |= found
        agrees = not any(pair["beyond"] for pair in found.values())
        missing = max(pair["missing"] for pair in found.values())
        row["right"] = agrees and not missing
        row["verdict"] = "right" if row["right"] else f"{missing} positions missing" if agrees else "WRONG"
        row["steps"], row["vllm_nccl"] = mine.get("steps"), mine.get("vllm_nccl")
        ok &= row["right"] or name in UNCURED
        rows.append(row)
    first = {entry[0]["token"] for entry in reference.values()}
    return {
        "ok": ok,
        "tolerance": tolerance,
        "lengths": LENGTHS,
        "output_tokens": OUTPUT_TOKENS,
        "distinct_first_tokens": len(first),
        "config": json.loads((out / "config.json").read_text()),
        "arms": rows,
    }


def differences(left: Mapping[str, Any], right: Mapping[str, Any], tolerance: float) -> dict[str, Any]:
    """Largest and median difference of a listed token's logprob, of prefills and of decodes; positions beyond."""
    by_kind: dict[bool, list[float]] = {False: [], True: []}
    tokens = missing = 0
    for name, ours in left.items():
        missing += OUTPUT_TOKENS - min(len(ours), len(right[name]))
        for mine, other in zip(ours, right[name], strict=False):
            by_kind[mine["decoded"] or other["decoded"]].append(logprob_distance(mine["top"], other["top"]))
            tokens += mine["token"] != other["token"]
    return {
        "prefill_max": max(by_kind[False], default=0.0),
        "decode_max": max(by_kind[True], default=0.0),
        "decode_median": float(np.median(by_kind[True])) if by_kind[True] else 0.0,
        "positions": len(by_kind[False]) + len(by_kind[True]),
        "beyond": sum(size > tolerance for sizes in by_kind.values() for size in sizes),
        "other_tokens": tokens,
        "missing": missing,
    }


def table(report: Mapping[str, Any]) -> list[str]:
    lines = [
        f"nats; largest difference of a prefill / of a decode (median) positions beyond {report['tolerance']}",
        f"{'arm':22s} {'alone vs reference':>27s} {'together vs reference':>27s} {'alone vs together':>27s}"
        f" {'alone vs tp2':>27s}  verdict",
    ]
    for row in report["arms"]:
        if "late" in row:
            late = f"not answered within {row['late']['limit_s']:g} s of its {row['late']['since']}"
            loaded = f"loaded after {row['seconds']['loaded']:g} s" if row["seconds"] else "not loaded"
            lines.append(f"{row['arm']:22s} late: {late} ({loaded})")
            continue
        if "died" in row:
            kind = "as expected" if row["expected"] else "NOT expected"
            lines.append(f"{row['arm']:22s} died ({kind}): {row['words']}")
            continue
        cells = []
        for key in ("alone vs reference", "together vs reference", "alone vs together", "alone vs tp2"):
            found = row.get(key)
            cells.append(
                f"{found['prefill_max']:.3f} / {found['decode_max']:.3f} ({found['decode_median']:.3f})"
                f" {found['beyond']:2d}"
                if found
                else "-"
            )
        lines.append(
            f"{row['arm']:22s} " + " ".join(f"{cell:>27s}" for cell in cells) + f"  {row['verdict']}"
        )
    for row in report["arms"]:
        for step in row.get("steps") or []:
            lines.append(f"{row['arm']:22s} {step}")
    return lines


def last_words(log: Path) -> str:
    """The end of a log's last line that is an error; of its last line that is no warning, where none is an error.

    An error that is only the consequence of another one gives way to it.
    """
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not NO_ERROR.search(line)]
    errors = [line for line in lines if ERROR.search(line)]
    causes = [line for line in errors if not CONSEQUENCE.search(line)]
    # Without the folders of source files, which say nothing here.
    words = re.sub(r"/\S*/", "", (causes or errors or lines or ["no error in its log"])[-1])[-200:]
    return words if errors or not lines else f"no error in its log; last line: {words}"
