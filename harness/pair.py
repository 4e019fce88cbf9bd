# SPDX-License-Identifier: Apache-2.0
"""A pair of arms on this machine, from a checkpoint to the last cell.

Each arm is started, proves what it is, passes parity, and is swept over the same trace at the same rates; one
engine runs at a time. With several launches an arm these alternate (A B B A ...): a cell's repeat is then the
number of its launch, and launches of one arm differ by the noise that a difference between arms must exceed.
The first arm sets limits and rates, which are frozen in the manifest before its sweep.
In the run's folder, beside what store.py keeps:

    baseline.json                the first arm's unloaded TTFT and capacity, with the requests they come from
    parity.json                  the verdict, extremes of each pair, every difference
    parity/prompts.json          what was asked; reference.json and <arm>.json.gz: what was answered
    proof/<arm>/rank-<r>.json    what each rank stated about itself
    logs/<name>.log              output of every program that was run
"""

import asyncio
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from harness import parity
from harness.arms import Arm
from harness.baseline import measure_baseline
from harness.calibrate import brief, error_bar
from harness.engines.endpoint import ask_model
from harness.engines.in_image import Start
from harness.engines.process import Engine, free_port, start
from harness.engines.proof import read_proofs
from harness.errors import UserError
from harness.launches import flags_of, kept_answers, launch_order, what_bound
from harness.load import Progress, Target
from harness.parity_collect import collect
from harness.prepare import ask_reference, make_checkpoint, sha256_of
from harness.progress import ProgressLine
from harness.sla import SOURCE_LIMITS_S, Limits
from harness.steps import Steps
from harness.store import CellKey, RunStore, new_arm, new_manifest, write_bytes, write_json
from harness.sweep import Plan, Position, measure
from harness.trace import Trace, make_trace

SOURCE_TOKENS = (60_000, 180_000)
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Options:
    """What a pair is asked to be.

    `rates` are fractions of the first arm's capacity, or requests a second with `absolute_rates`. `limits_s`
    are applied limits in seconds, None to derive them. `program` offers serve, checkpoint and reference.
    Each arm is started `launches` times and swept each time; `resume` goes on with the run in `out`.
    `start_engine` starts an arm's engine: as a process here, or in a container of an image.
    """

    out: Path
    arms: tuple[Arm, ...]
    rates: tuple[float, ...]
    absolute_rates: bool
    limits_s: tuple[float, float] | None
    scale: float
    requests: int
    cohort_size: int
    output_tokens: int
    kv_cache_memory_bytes: int
    parity_lengths: tuple[int, ...]
    seed: int
    program: tuple[str, ...]
    cache: Path
    launches: int = 1
    resume: bool = False
    start_engine: Start = start


class PairRun:
    """One run of a pair. `store` is None until there is a folder to keep anything in."""

    def __init__(self, options: Options, stream: TextIO) -> None:
        self.options = options
        self.store: RunStore | None = None
        self.steps = Steps(stream)
        self._stream = stream
        self._manifest: dict[str, Any] = {}
        self._interrupted = False
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    def interrupt(self) -> None:
        """For a signal handler: ends the cell that runs and keeps it, or cancels whatever else is done."""
        self._interrupted = True
        if self._stop is not None and not self._stop.is_set():
            self._stop.set()
        elif self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Raises UserError where the run cannot go on, CancelledError when it was interrupted."""
        self._task = asyncio.current_task()
        try:
            await self._measure()
        finally:
            if self.store:
                self._note_missing()
                self._save()

    async def _measure(self) -> None:
        options, step = self.options, self.steps.step
        with step("checkpoint"):
            model = await make_checkpoint(options.program, options.cache, self.steps.progress)
        vocab_size = json.loads((model / "config.json").read_bytes())["vocab_size"]
        with step("trace"):
            trace = self._trace(options.seed, vocab_size)
            self._create(trace, model)
        prompts = parity.make_prompts(options.seed, vocab_size, options.parity_lengths)
        with step("reference"):
            reference = await ask_reference(
                options.program,
                model,
                prompts,
                folder=self._folder("parity"),
                log_path=self._folder("logs") / "reference.log",
                progress=self.steps.progress,
            )

        answers = kept_answers(self._run.path, self._manifest) if options.resume else {}
        for arm, launch in launch_order(options.arms, options.launches):
            if answers.keys() >= {arm.name} and self._is_measured(arm, launch):
                continue
            name = arm.name if options.launches == 1 else f"{arm.name} launch {launch + 1}"
            with step(f"{name} start"):
                engine = await self._start(arm, launch, model)
            with engine:
                model_name = await engine.guard(ask_model(engine.url, None), "starting")
                target = Target(arm.name, engine.url, model_name)
                if arm.name not in answers:
                    with step(f"{name} parity"):
                        continuations = {
                            asked: [p.token for p in answer] for asked, answer in reference.items()
                        }
                        asking = collect(target, prompts, continuations, vocab_size, self.steps.progress)
                        answers[arm.name] = await engine.guard(asking, "answering the parity prompts")
                        self._judge(arm, prompts, reference, answers)
                if not self._manifest["frozen"]:
                    with step(f"{name} baseline"):
                        await self._baseline(engine, target, self._trace(options.seed + 1, vocab_size))
                if "client_calibration" not in self._manifest:
                    with step("calibration"):
                        self._manifest["client_calibration"] = await brief(trace)
                        self.steps.say(f"  {error_bar(self._manifest['client_calibration'])}")
                with step(f"{name} sweep"):
                    await self._sweep(engine, target, trace, launch)
            self._save()
        for arm in options.arms:
            self._note_what_bound(arm, self._manifest["rates"][-1])

    # Preparation

    def _trace(self, seed: int, vocab_size: int) -> Trace:
        low, high = SOURCE_TOKENS
        return make_trace(
            requests=self.options.requests,
            min_tokens=low,
            max_tokens=high,
            output_tokens=self.options.output_tokens,
            cohort_size=self.options.cohort_size,
            arrivals="poisson",
            seed=seed,
            vocab_size=vocab_size,
            scale=self.options.scale,
        )

    def _create(self, trace: Trace, model: Path) -> None:
        given = self.options.limits_s
        if given:
            limits = Limits.of(*given, rule="given with --sla")
        else:
            limits = Limits(SOURCE_LIMITS_S, rule="the source's own: the unloaded TTFT was not measured yet")
        self._manifest = new_manifest(
            trace=trace,
            trace_path="trace.jsonl.gz",
            arms=[new_arm(arm.name, "", topology=arm.topology) for arm in self.options.arms],
            rates=self.options.rates if self.options.absolute_rates else (),
            repeats=self.options.launches,
            limits=limits,
            fixed_cohort=trace.cohorts[len(trace.cohorts) // 2],
            shared_cores=True,
        )
        self._manifest["checkpoint"] = {"path": str(model), "sha256": sha256_of(model)}
        self._manifest["launches"] = self.options.launches
        self._manifest["frozen"] = False  # limits and rates, until the baseline has been measured
        if not self.options.resume:
            self.store = RunStore.create(self.options.out, self._manifest, trace)
            return
        asked = self._manifest
        self.store = RunStore.resume(self.options.out, asked, trace)
        self._manifest = {**self.store.manifest, "notes": []}
        for fact in ("checkpoint", "launches"):
            if self._manifest.get(fact) != asked[fact]:
                raise UserError(f"{self.options.out} was begun with another {fact}; choose another --out")

    def _is_measured(self, arm: Arm, launch: int) -> bool:
        """Whether nothing of this launch is left; an arm that stopped early is found out by its sweep."""
        done = {cell.key for cell in self._run.cells() if not cell.facts["aborted"]}
        wanted = {CellKey(arm.name, rate, launch) for rate in self._manifest["rates"]}
        return bool(self._manifest["frozen"]) and wanted <= done

    # One arm

    async def _start(self, arm: Arm, launch: int, model: Path) -> Engine:
        port = free_port()
        proof_dir = self._folder("proof", arm.name)
        # Of what a trace can hold, not of what this one happens to: the baseline has a trace of its own.
        longest = max(
            math.ceil(SOURCE_TOKENS[1] * self.options.scale) + self.options.output_tokens,
            *(length + parity.OUTPUT_TOKENS for length in self.options.parity_lengths),
        )
        argv = [*self.options.program, "serve", "--profile", "cpu", "--topology", arm.name]
        argv += ["--model", str(model), "--host", HOST, "--port", str(port), "--proof-dir", str(proof_dir)]
        argv += ["--kv-cache-memory-bytes", str(self.options.kv_cache_memory_bytes)]
        argv += ["--", "--max-model-len", str(longest + 1)]
        engine = await self.options.start_engine(
            arm.name,
            argv,
            url=f"http://{HOST}:{port}",
            log_path=self._run.path / self._log(arm.name, launch),
            proof_dir=proof_dir,
            progress=self.steps.progress,
        )
        try:
            entry = self._arm_entry(arm.name)
            entry["url"] = engine.url
            entry["kv_tokens"], entry["kv_bytes"] = engine.proofs[0].kv_tokens, engine.proofs[0].kv_bytes
            entry["engine"] = {
                **engine.started_as(),
                "ranks": [proof.raw for proof in engine.proofs],
                "log": self._log(arm.name, launch),
                "digest": self._manifest["checkpoint"]["sha256"],
                "packages": {"vllm": engine.proofs[0].vllm},
                "flags": flags_of(argv),
            }
            self._save()
            arm.require_proof(engine.proofs)
            self._require_equal_bytes()
        except BaseException:
            engine.stop()
            raise
        return engine

    def _log(self, arm: str, launch: int) -> str:
        self._folder("logs")
        return f"logs/{arm}.log" if self.options.launches == 1 else f"logs/{arm}-launch{launch + 1}.log"

    def _require_equal_bytes(self) -> None:
        known = {
            arm["name"]: arm["kv_bytes"] for arm in self._manifest["arms"] if arm["kv_bytes"] is not None
        }
        if len(set(known.values())) > 1:
            sizes = ", ".join(f"{name} {size:,}" for name, size in known.items())
            raise UserError(f"the arms' KV caches differ in bytes ({sizes}); compare them at equal bytes")

    def _judge(
        self,
        arm: Arm,
        prompts: Sequence[parity.Prompt],
        reference: parity.Answers,
        answers: Mapping[str, parity.ArmAnswers],
    ) -> None:
        """Keeps what was answered and the verdict so far; UserError where the pair must not be timed."""
        verdict = parity.compare(prompts, reference, answers)
        record = {**asdict(verdict), "refusal": verdict.refusal()}
        self._manifest["parity"] = record
        write_bytes(
            self._folder("parity") / f"{arm.name}.json.gz",
            gzip.compress(json.dumps(asdict(answers[arm.name])).encode(), mtime=0),
        )
        beside = {name: answer.prefills_beside for name, answer in answers.items()}
        write_json(self._run.path / "parity.json", {**record, "prefills_beside": beside})
        proofs = read_proofs(self._folder("proof", arm.name))
        self._arm_entry(arm.name)["engine"]["ranks"] = [proof.raw for proof in proofs]
        self._save()
        for pair in verdict.pairs:
            self.steps.say(
                f"  {pair.pair}: {pair.positions} positions, {pair.token_differences} other tokens,"
                f" max |Δlogprob| {_number(pair.max_logprob_difference)}"
            )
        if refusal := verdict.refusal():
            raise UserError(refusal)
        arm.require_proof(proofs, used=True)

    async def _baseline(self, engine: Engine, target: Target, trace: Trace) -> None:
        """Limits and rates (requests a second) of the sweep are frozen in the manifest here."""
        options = self.options
        baseline = await engine.guard(measure_baseline(target, trace), "measuring its baseline")
        write_json(self._run.path / "baseline.json", baseline.as_record())
        if options.limits_s is None:
            limits = baseline.limits(target.name)
            self._manifest["limits"] |= {"applied": limits.applied, "rule": limits.rule}
        rates = options.rates if options.absolute_rates else baseline.rates(options.rates)
        self._manifest |= {"rates": list(rates), "frozen": True}
        self._save()
        self.steps.say(
            f"  unloaded P50 TTFT {baseline.unloaded_ttft_p50_s:.3f} s,"
            f" capacity {baseline.capacity_qps:.3g} QPS;"
            f" limits {', '.join(map(_number, self._manifest['limits']['applied'].values()))} s,"
            f" rates {', '.join(map(_number, rates))} QPS"
        )

    async def _sweep(self, engine: Engine, target: Target, trace: Trace, launch: int) -> None:
        """Cells one by one; an engine that dies, or an interruption, ends its cell, which is kept, marked."""
        rates = self._manifest["rates"]
        order = [(arm.name, n) for arm, n in launch_order(self.options.arms, self.options.launches)]
        before = order.index((target.name, launch)) * len(rates)
        entry = self._arm_entry(target.name)["engine"]
        facts = {name: entry[name] for name in ("digest", "packages", "flags", "log")}
        for index, rate in enumerate(rates, start=1):
            key = CellKey(target.name, rate, launch)
            position = Position(key, before + index, len(order) * len(rates))
            self._stop = stop = asyncio.Event()
            watching = asyncio.ensure_future(_set_at_end(engine, stop))
            plan = Plan((rate,), first_repeat=launch, request_timeout_s=600.0, drain_timeout_s=120.0)
            try:
                with ProgressLine(self._stream) as line:

                    def show(
                        _: Position, progress: Progress, line: ProgressLine = line, at: Position = position
                    ) -> None:
                        line(at, progress)

                    await measure(
                        self._run,
                        [target],
                        trace,
                        plan,
                        engines={target.name: facts},
                        launch=launch,
                        on_progress=show,
                        stop=stop,
                    )
            except UserError:
                if not await engine.dying():
                    raise
            finally:
                self._stop = None
                watching.cancel()
            if self._interrupted:
                raise asyncio.CancelledError
            if not engine.alive() or (self._has_failures(key) and await engine.dying()):
                self._mark_aborted(key)
                raise engine.death(f"measuring at {rate:g} QPS")

    def _has_failures(self, key: CellKey) -> bool:
        return any(r.status != "ok" for cell in self._run.cells() if cell.key == key for r in cell.records)

    def _mark_aborted(self, key: CellKey) -> None:
        """For an engine that outlived its last answer by a moment: its cell looked complete when written."""
        for cell in self._run.cells():
            if cell.key == key:
                write_json(self._run.path / "cells" / f"{key}.json", {**cell.facts, "aborted": True})

    def _note_missing(self) -> None:
        measured = {cell.key.arm for cell in self._run.cells()}
        if missing := [arm.name for arm in self.options.arms if arm.name not in measured]:
            self._manifest["notes"].append(
                f"{', '.join(missing)} was not measured: this run compares nothing."
            )

    def _note_what_bound(self, arm: Arm, rate: float) -> None:
        for cell in self._run.cells():
            if cell.key == CellKey(arm.name, rate, 0):
                self._manifest["notes"].append(what_bound(arm.name, rate, cell.facts["metrics"]))

    # The run's folder

    @property
    def _run(self) -> RunStore:
        assert self.store is not None, "the run's folder is made before anything is kept in it"
        return self.store

    def _folder(self, *names: str) -> Path:
        folder = self._run.path.joinpath(*names)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _arm_entry(self, name: str) -> dict[str, Any]:
        entry: dict[str, Any] = next(arm for arm in self._manifest["arms"] if arm["name"] == name)
        return entry

    def _save(self) -> None:
        self._manifest["steps_s"] = self.steps.seconds
        self._run.write_manifest(self._manifest)


async def _set_at_end(engine: Engine, event: asyncio.Event) -> None:
    await engine.watch()
    event.set()


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
