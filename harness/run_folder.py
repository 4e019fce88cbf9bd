# SPDX-License-Identifier: Apache-2.0
"""The folder of a run that starts its own engines: what store.py keeps, and the evidence beside it.

baseline.json                the first arm's unloaded TTFT and capacity, with the requests they come from
parity.json                  the verdict, extremes of each pair, every difference
parity/prompts.json          what was asked; reference.json and <arm>.json.gz: what was answered
parity/check-<n>/            all that of each verdict, for every launch: checks.py
proof/<arm>/rank-<r>.json    what each rank stated about itself
logs/<name>.log              output of every program that was run
set_aside/                   among them cells that an engine's death ended, and that were measured again
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import calibrate, parity
from harness.arms import Arm
from harness.baseline import Baseline
from harness.checks import keep_answers, keep_check
from harness.engines.process import Engine
from harness.engines.proof import Proof, read_proofs
from harness.errors import UserError
from harness.files import write_json
from harness.launches import flags_of
from harness.manifest import new_arm, new_manifest
from harness.sla import Limits
from harness.steps import Steps
from harness.store import Cell, CellKey, RunStore
from harness.trace import Trace
from harness.validity import lasting_environment

PROVISIONAL = "the source's own: the unloaded TTFT was not measured yet"
"""Rule of limits that nobody asked for and no baseline froze yet."""


class RunFolder:
    """A run's manifest and files; every change of the manifest is on disk when a method returns."""

    def __init__(self, store: RunStore, manifest: dict[str, Any]) -> None:
        self.store = store
        self.manifest = manifest

    @classmethod
    def open(
        cls,
        path: Path,
        trace: Trace,
        arms: Sequence[Arm],
        *,
        rates: Sequence[float],
        limits: Limits,
        repeats: int,
        shared_cores: bool,
        facts: Mapping[str, Any],
        resume: bool,
    ) -> "RunFolder":
        """A new run, or with `resume` the one that is there.

        `rates` are empty until a baseline gives them; `facts` come on top of the manifest's own. Raises
        UserError where the folder holds another run.
        """
        asked = new_manifest(
            trace=trace,
            trace_path="trace.jsonl.gz",
            arms=[new_arm(arm.name, "", topology=arm.topology) for arm in arms],
            rates=rates,
            repeats=repeats,
            limits=limits,
            fixed_cohort=trace.cohorts[len(trace.cohorts) // 2],
            shared_cores=shared_cores,
        )
        asked |= {"frozen": False, **facts}  # limits and rates, until the baseline has been measured
        if not resume:
            return cls(RunStore.create(path, asked, trace), asked)
        store = RunStore.resume(path, asked, trace)
        known = {"limits": store.manifest["limits"]} if limits.rule == PROVISIONAL else {}
        store.require_same(asked | known)
        return cls(store, {**store.manifest, "notes": []})

    @property
    def path(self) -> Path:
        return self.store.path

    def folder(self, *names: str) -> Path:
        folder = self.path.joinpath(*names)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def arm(self, name: str) -> dict[str, Any]:
        """The arm's entry in the manifest."""
        entry: dict[str, Any] = next(arm for arm in self.manifest["arms"] if arm["name"] == name)
        return entry

    def save(self) -> None:
        self.store.write_manifest(self.manifest)

    def note(self, text: str) -> None:
        if text not in self.manifest["notes"]:
            self.manifest["notes"].append(text)

    def keep_calibration(self, point: Mapping[str, Any]) -> None:
        """The client's own error (`calibrate.brief`) before the cells of one command: the worst is the run's."""
        calibrate.keep(self.manifest, point)
        self.save()

    # Engines

    def record_engine(
        self, arm: Arm, engine: Engine, argv: Sequence[str], proofs: Sequence[Proof], log: str
    ) -> None:
        """What was started, and its KV cache as its first rank sees it, where that can tell."""
        entry = self.arm(arm.name)
        entry["url"] = engine.url
        if proofs:
            entry["kv_tokens"], entry["kv_bytes"] = proofs[0].kv_tokens, proofs[0].kv_bytes
        entry["engine"] = {
            **engine.started_as(),
            "ranks": [proof.raw for proof in proofs],
            "log": log,
            "digest": self.manifest["checkpoint"]["sha256"],
            "packages": {"vllm": proofs[0].vllm, "plugin": proofs[0].raw.get("plugin_sha256")}
            if proofs
            else {},
            "flags": flags_of(argv),
        }
        self.save()

    def engine_facts(self, name: str) -> dict[str, Any]:
        """What is recorded of an arm's engine with each of its cells."""
        entry = self.arm(name)["engine"]
        facts = {fact: entry[fact] for fact in ("digest", "packages", "flags", "log")}
        return facts | {"environment": lasting_environment(entry["environment"])}

    def launches(self) -> dict[str, int]:
        """By arm: which launch of it (from 0) runs now, over all sessions; restarts count (see Fleet)."""
        return {arm["name"]: arm.get("starts", 1) - 1 for arm in self.manifest["arms"]}

    def require_equal_bytes(self) -> None:
        """Of the KV caches that the engines' proofs state, to within a block: of those a cache holds whole ones."""
        known = {arm["name"]: arm["kv_bytes"] for arm in self.manifest["arms"] if arm["kv_bytes"] is not None}
        blocks = [
            rank["kv_bytes"] / rank["kv_blocks"]
            for arm in self.manifest["arms"]
            for rank in (arm["engine"] or {}).get("ranks", ())
            if rank.get("kv_blocks")
        ]
        if max(known.values(), default=0) - min(known.values(), default=0) > max(blocks, default=0):
            sizes = ", ".join(f"{name} {size:,}" for name, size in known.items())
            raise UserError(f"the arms' KV caches differ in bytes ({sizes}); compare them at equal bytes")

    def read_proofs(self, name: str) -> tuple[Proof, ...]:
        """The ranks' proofs as they stand now, into the manifest too."""
        proofs = read_proofs(self.folder("proof", name))
        self.arm(name)["engine"]["ranks"] = [proof.raw for proof in proofs]
        self.save()
        return proofs

    # Verdicts

    def judge(
        self,
        prompts: Sequence[parity.Prompt],
        reference: parity.Answers | None,
        answers: Mapping[str, parity.ArmAnswers],
        steps: Steps,
        *,
        launches: Mapping[str, int],
        tolerance: parity.Tolerance = parity.EXACT,
        output_tokens: int = parity.OUTPUT_TOKENS,
    ) -> str | None:
        """Keeps what was answered and the verdict so far; returns why the arms must not be timed, if they must not.

        `launches`: of the arms, those that this verdict is about; other answers are of launches that have theirs.
        """
        verdict = parity.compare(prompts, reference, answers, tolerance, output_tokens)
        record = verdict.record(prompts)
        self.manifest["parity"] = record
        keep_answers(self.folder("parity"), answers)
        beside = {name: answer.prefills_beside for name, answer in answers.items()}
        write_json(self.path / "parity.json", {**record, "prefills_beside": beside})
        keep_check(self.path, self.manifest, record, answers, launches)
        self.save()
        for pair in verdict.pairs:
            steps.say(
                f"  {pair.pair}: {pair.positions} positions, {pair.token_differences} other tokens,"
                f" max |Δlogprob| {number(pair.max_logprob_difference)}"
            )
        return verdict.refusal()

    def freeze(
        self, baseline: Baseline | None, arm: str, rates: Sequence[float], limits_s: object, absolute: bool
    ) -> None:
        """Limits and rates (requests a second) of the sweep, from here on the same for every arm.

        Without a `baseline` they are as asked for; with one, what was not asked for follows from it.
        """
        if baseline is not None:
            write_json(self.path / "baseline.json", baseline.as_record())
            if limits_s is None:
                limits = baseline.limits(arm)
                self.manifest["limits"] |= {"applied": limits.applied, "rule": limits.rule}
            if not absolute:
                rates = baseline.rates(rates)
        self.manifest |= {"rates": list(rates), "frozen": True}
        self.save()

    # Cells

    def has_failures(self, key: CellKey) -> bool:
        return any(record.status != "ok" for cell in self._cells([key]) for record in cell.records)

    def mark_aborted(self, key: CellKey) -> None:
        """For an engine that outlived its last answer by a moment: its cell looked complete when written."""
        for cell in self._cells([key]):
            write_json(self.path / "cells" / f"{key}.json", {**cell.facts, "aborted": True})

    def note_missing(self, arms: Iterable[Arm]) -> None:
        measured = {cell.key.arm for cell in self.store.cells()}
        if missing := [arm.name for arm in arms if arm.name not in measured]:
            rest = "this run compares nothing" if len(measured) < 2 else "it is not compared"
            self.note(f"{', '.join(missing)} was not measured: {rest}.")

    def note_launches(self) -> None:
        """Which arms only one launch was measured of, by their cells."""
        found: dict[str, set[int]] = {}
        for cell in self.store.cells():
            found.setdefault(cell.key.arm, set()).add(cell.facts["launch"])
        if once := [arm for arm, launches in found.items() if len(launches) == 1]:
            which = "each engine" if len(once) == len(found) else f"the engine of {', '.join(once)}"
            self.note(
                f"One launch of {which}: how much launches of the same arm differ was not measured in this run."
            )

    def _cells(self, keys: Iterable[CellKey]) -> list[Cell]:
        """Those of the cells that there are, in the order of `keys`."""
        found = {cell.key: cell for cell in self.store.cells()}
        return [found[key] for key in keys if key in found]


def number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
