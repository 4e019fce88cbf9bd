# SPDX-License-Identifier: Apache-2.0
"""`python -m harness compare RUN RUN`: two runs of the same trace side by side.

Both runs' cells are judged by the limits of the first run, as if they were arms of one run: TTFT is recorded,
limits are not. Whether a cell counts is judged by what its own run declared. Every two arms are compared, in the
verdict each with the first run's first one; `--arm` leaves one arm of each run. Nothing is written into either run.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import calibrate
from harness.checks import parity_of
from harness.errors import UserError
from harness.files import write_bytes
from harness.report.page import page
from harness.report.plots import drawn_plots
from harness.report.summary import build_summary
from harness.report.tables import markdown_report
from harness.store import Cell, CellKey, RunStore
from harness.validity import cells_that_count

DECLARED = ("shared_cores", "no_preemption")
"""What a run says of itself, by which its cells are judged."""


def require_same_trace(first: RunStore, second: RunStore) -> None:
    """Raises UserError where the runs replayed different traces."""
    hashes = [store.manifest["trace"]["sha256"] for store in (first, second)]
    if hashes[0] != hashes[1]:
        raise UserError(
            f"{first.path} replayed trace {hashes[0][:12]}, {second.path} replayed {hashes[1][:12]}: their requests"
            " differ, so do their times; measure both with one trace"
        )


def compared(first: RunStore, second: RunStore, arm: str | None = None) -> tuple[dict[str, Any], list[Cell]]:
    """Manifest and cells of one run that holds an arm of each: `arm`, or else every arm of both."""
    require_same_trace(first, second)
    manifests = first.manifest, second.manifest
    labels = _labels(first.path, second.path)
    arms: list[dict[str, Any]] = []
    cells: list[Cell] = []
    verdicts: list[Mapping[str, Any] | None] = []
    for store, manifest, label in zip((first, second), manifests, labels, strict=True):
        names = [a["name"] for a in manifest["arms"]]
        if arm is not None and arm not in names:
            raise UserError(f"{store.path} has no arm {arm}; it has {', '.join(names)}")
        wanted = [a for a in manifest["arms"] if arm in (None, a["name"])]
        declared = {name: manifest.get(name, False) for name in DECLARED}
        arms += [{**a, "name": f"{label}:{a['name']}", "declared": declared} for a in wanted]
        kept = {a["name"] for a in wanted}
        measured = list(store.cells())
        cells += [_relabelled(cell, label) for cell in measured if cell.key.arm in kept]
        verdicts.append(parity_of(manifest, cells_that_count(manifest, measured)))
    # What one run refused is no result beside another run either.
    parity = next((verdict for verdict in verdicts if verdict and not verdict["ok"]), None)
    points = [m["client_calibration"] for m in manifests if m.get("client_calibration")]
    facts = dict(manifests[0])
    facts.pop("parity_checks", None)
    if facts.get("timeouts") != manifests[1].get("timeouts"):
        facts.pop("timeouts", None)  # they are neither's alone
    return {
        **facts,
        "arms": arms,
        "sessions": [
            {**session, "name": f"{label}, session {number}"}
            for manifest, label in zip(manifests, labels, strict=True)
            for number, session in enumerate(manifest.get("sessions", ()), start=1)
        ],
        "notes": _notes(manifests, labels, verdicts),
        "parity": parity,
        "client_calibration": calibrate.worst(points) if points else None,
    }, cells


def _labels(first: Path, second: Path) -> tuple[str, str]:
    names = first.resolve().name, second.resolve().name
    return names if names[0] != names[1] else (f"{names[0]}-1", f"{names[1]}-2")


def _relabelled(cell: Cell, label: str) -> Cell:
    key = CellKey(f"{label}:{cell.key.arm}", cell.key.offered_qps, cell.key.repeat)
    return replace(cell, key=key)


def _notes(
    manifests: Sequence[Mapping[str, Any]],
    labels: Sequence[str],
    verdicts: Sequence[Mapping[str, Any] | None],
) -> list[str]:
    """What else differs between the runs, and what each run's own parity check said."""
    notes = [
        "These arms come from two runs: what changed on the machine between them is in every difference."
    ]
    for what in ("host", "packages", "harness_version", "code_sha256", "timeouts", *DECLARED):
        values = [manifest.get(what, False if what in DECLARED else "not recorded") for manifest in manifests]
        if values[0] != values[1]:
            own = "; each one's cells are judged by its own" if what in DECLARED else ""
            notes.append(f"The runs differ in {what}: {_changed(*values)}{own}.")
    limits = [{name: m["limits"].get(name, []) for name in ("applied", "rules")} for m in manifests]
    if limits[0] != limits[1]:
        notes.append(f"The runs applied different limits; here those of {labels[0]} hold for both.")
    for manifest, label, parity in zip(manifests, labels, verdicts, strict=True):
        if not manifest.get("client_calibration"):
            notes.append(f"The client's own error was not measured in {label}.")
        state = "not checked" if parity is None else "passed" if parity["ok"] else parity["refusal"]
        notes.append(f"Parity within {label}: {state}.")
    return notes


def _changed(first: Any, second: Any) -> str:
    if not (isinstance(first, dict) and isinstance(second, dict)):
        return f"{first} and {second}"
    names = [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]
    return ", ".join(f"{name} {first.get(name)} and {second.get(name)}" for name in sorted(names))


def run(arguments: argparse.Namespace) -> None:
    """Prints the tables; with --out writes the page as well."""
    first, second = (RunStore.open(path) for path in (arguments.first, arguments.second))
    manifest, cells = compared(first, second, arguments.arm)
    summary = build_summary(manifest, cells)
    print(markdown_report(summary), end="")
    if arguments.out:
        try:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(arguments.out, page(summary, manifest, list(drawn_plots(summary, cells))).encode())
        except OSError as error:
            raise UserError(
                f"cannot write {arguments.out}: {error.strerror}; choose another --out"
            ) from error


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    compare = commands.add_parser(
        "compare",
        help="two runs of the same trace side by side",
        description="Refuses runs of different traces. The first run's limits hold for both.",
    )
    compare.add_argument("first", type=Path, metavar="RUN", help="folder of a run")
    compare.add_argument("second", type=Path, metavar="RUN", help="folder of another run")
    compare.add_argument("--arm", metavar="NAME", help="only this arm of both (default: all arms)")
    compare.add_argument("--out", type=Path, metavar="FILE", help="write the page there as well (HTML)")
    compare.set_defaults(run=run)
