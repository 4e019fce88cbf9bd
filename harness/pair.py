# SPDX-License-Identifier: Apache-2.0
"""A pair of arms on this machine, from a checkpoint to the last cell.

Each arm is started, proves what it is, passes parity, and is swept over the same trace at the same rates; one
engine runs at a time. With several launches an arm these alternate (A B B A ...): a cell's repeat is then the
number of its launch, and launches of one arm differ by the noise that a difference between arms must exceed.
The first arm sets limits and rates, which are frozen in the manifest before its sweep.
What is in the run's folder: run_folder.py. All arms' engines at once: resident.py.
"""

import asyncio
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from harness import parity
from harness.arms import Arm
from harness.baseline import measure_baseline
from harness.calibrate import brief, error_bar
from harness.engines.endpoint import ask_model
from harness.engines.in_image import Start
from harness.engines.process import Engine, free_port, start
from harness.errors import UserError
from harness.launches import kept_answers, launch_order
from harness.load import Progress, Target
from harness.manifest import add_session
from harness.parity_collect import collect
from harness.prepare import ask_reference, make_checkpoint, sha256_of
from harness.progress import display, tell_plan
from harness.run_folder import PROVISIONAL, RunFolder, number
from harness.serving import HOST, longest_context, on_cpu
from harness.sla import GIVEN, SOURCE_LIMITS_S, Limits
from harness.steps import Steps
from harness.store import CellKey, RunStore
from harness.sweep import Plan, Position, due_again, measure
from harness.trace import Trace, make_trace

SOURCE_TOKENS = (60_000, 180_000)
PLAN = Plan((), request_timeout_s=600.0, drain_timeout_s=120.0)
"""Of any cell; its rate and launch come with it."""


@dataclass(frozen=True)
class Options:
    """What a pair is asked to be.

    `rates` are fractions of the first arm's capacity, or requests a second with `absolute_rates`. `limits_s`
    are applied limits in seconds, None to derive them. `program` offers serve, checkpoint and reference.
    Each arm is started `launches` times and swept each time; `resume` goes on with the run in `out`.
    `start_engine` starts an arm's engine: as a process here, or in a container of an image. No cell starts that
    would not end within `budget_s` of the run's begin. `bisect_qps`: boundaries are closed in on down to this step
    (resident.py). `json`: events for programs on stdout.
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
    budget_s: float | None = None
    bisect_qps: float | None = None
    json: bool = False

    @property
    def limits(self) -> Limits:
        """The applied limits as far as they are known before the baseline."""
        if self.limits_s == tuple(SOURCE_LIMITS_S.values()):
            return Limits(SOURCE_LIMITS_S, rule="the source's own")
        if self.limits_s:
            return Limits.of(*self.limits_s, rule=GIVEN)
        return Limits(SOURCE_LIMITS_S, rule=PROVISIONAL)

    def trace(self, seed: int, vocab_size: int, arrivals: str = "poisson") -> Trace:
        low, high = SOURCE_TOKENS
        return make_trace(
            requests=self.requests,
            min_tokens=low,
            max_tokens=high,
            output_tokens=self.output_tokens,
            cohort_size=self.cohort_size,
            arrivals=arrivals,
            seed=seed,
            vocab_size=vocab_size,
            scale=self.scale,
        )

    @property
    def max_model_len(self) -> int:
        """Of what a trace can hold, not of what this one happens to: the baseline has a trace of its own."""
        others = (length + parity.OUTPUT_TOKENS for length in self.parity_lengths)
        return longest_context(SOURCE_TOKENS[1], self.scale, self.output_tokens, *others)


class PairRun:
    """One run of a pair. `store` is None until there is a folder to keep anything in."""

    def __init__(self, options: Options, stream: TextIO) -> None:
        self.options = options
        self.steps = Steps(stream)
        self._stream = stream
        self._folder: RunFolder | None = None
        self._began_s = time.monotonic()
        self._interrupted = False
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def store(self) -> RunStore | None:
        return self._folder.store if self._folder else None

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
            if self._folder:
                self._folder.note_missing(self.options.arms)
                self._save()

    async def _measure(self) -> None:
        options, step = self.options, self.steps.step
        with step("checkpoint"):
            model = await make_checkpoint(
                options.program, options.cache, self.steps.progress, ranks=max(arm.tp for arm in options.arms)
            )
        vocab_size = json.loads((model / "config.json").read_bytes())["vocab_size"]
        with step("trace"):
            trace = options.trace(options.seed, vocab_size)
            self._folder = self._open(trace, model)
        prompts = parity.make_prompts(options.seed, vocab_size, options.parity_lengths)
        with step("reference"):
            reference = await ask_reference(
                options.program,
                model,
                prompts,
                folder=self._run.folder("parity"),
                log_path=self._run.folder("logs") / "reference.log",
                progress=self.steps.progress,
            )

        manifest = self._run.manifest
        answers = kept_answers(self._run.path, manifest) if options.resume else {}
        told = calibrated = False
        for arm, launch in launch_order(options.arms, options.launches):
            if answers.keys() >= {arm.name} and self._is_measured(arm, launch):
                continue
            if self._left_s() <= 0:
                return self._note_budget()
            name = arm.name if options.launches == 1 else f"{arm.name} launch {launch + 1}"
            with step(f"{name} start"):
                engine = await self._start(arm, launch, model)
            with engine:
                model_name = await engine.guard(ask_model(engine.url, None), "starting")
                target = Target(arm.name, engine.url, model_name)
                with step(f"{name} parity"):  # of every launch: a few seconds beside its start
                    continuations = {asked: [p.token for p in answer] for asked, answer in reference.items()}
                    asking = collect(target, prompts, continuations, vocab_size, self.steps.progress)
                    answers[arm.name] = await engine.guard(asking, "answering the parity prompts")
                    proofs = self._run.read_proofs(arm.name)
                    judged = {arm.name: launch}
                    if refusal := self._run.judge(prompts, reference, answers, self.steps, launches=judged):
                        raise UserError(refusal)
                    arm.require_proof(proofs, used=True)
                if not manifest["frozen"]:
                    with step(f"{name} baseline"):
                        await self._baseline(engine, target, options.trace(options.seed + 1, vocab_size))
                if not calibrated:
                    calibrated = True
                    with step("calibration"):
                        point = await brief(trace, min(manifest["rates"]))
                        self._run.keep_calibration(point)
                        self.steps.say(f"  {error_bar(point)}")
                if not told:
                    told = True
                    whole = Plan(
                        tuple(manifest["rates"]), repeats=options.launches, budget_s=options.budget_s
                    )
                    tell_plan(whole, len(options.arms), trace.span, self._stream, json=options.json)
                with step(f"{name} sweep"):
                    finished = await self._sweep(engine, target, trace, launch)
            self._save()
            if not finished:
                return self._note_budget()

    def _left_s(self) -> float:
        budget_s = self.options.budget_s
        return math.inf if budget_s is None else self._began_s + budget_s - time.monotonic()

    def _note_budget(self) -> None:
        note = "The budget ended this run before its last cell; --resume goes on with it."
        self._run.manifest["notes"].append(note)
        self.steps.say(note)

    # Preparation

    def _open(self, trace: Trace, model: Path) -> RunFolder:
        options = self.options
        folder = RunFolder.open(
            options.out,
            trace,
            options.arms,
            rates=options.rates if options.absolute_rates else (),
            limits=options.limits,
            repeats=options.launches,
            shared_cores=True,
            facts={
                "checkpoint": {"path": str(model), "sha256": sha256_of(model)},
                "launches": options.launches,
                "timeouts": PLAN.timeouts,
            },
            resume=options.resume,
        )
        if options.absolute_rates and folder.manifest["rates"] != list(options.rates):
            begun = ", ".join(map("{:g}".format, folder.manifest["rates"])) or "of a baseline"
            raise UserError(
                f"{options.out} was begun with the rates {begun}; resume it with the same, or choose another --out"
            )
        add_session(folder.manifest)
        folder.save()
        return folder

    def _is_measured(self, arm: Arm, launch: int) -> bool:
        """Whether nothing of this launch is left; an arm that stopped early is found out by its sweep."""
        manifest = self._run.manifest
        done = {
            cell.key
            for cell in self._run.store.cells()
            if not (cell.facts["aborted"] or (self.options.resume and due_again(cell, manifest)))
        }
        wanted = {CellKey(arm.name, rate, launch) for rate in manifest["rates"]}
        return bool(manifest["frozen"]) and wanted <= done

    # One arm

    async def _start(self, arm: Arm, launch: int, model: Path) -> Engine:
        options = self.options
        port, proof_dir = free_port(), self._run.folder("proof", arm.name)
        serving = on_cpu(options.program, model, options.kv_cache_memory_bytes, options.max_model_len)
        argv = serving.argv(arm, port, proof_dir)
        self._run.folder("logs")
        log = f"logs/{arm.name}.log" if options.launches == 1 else f"logs/{arm.name}-launch{launch + 1}.log"
        engine = await options.start_engine(
            arm.name,
            argv,
            url=f"http://{HOST}:{port}",
            log_path=self._run.path / log,
            proof_dir=proof_dir,
            progress=self.steps.progress,
        )
        try:
            self._run.record_engine(arm, engine, argv, engine.proofs, log)
            arm.require_proof(engine.proofs)
            self._run.require_equal_bytes()
        except BaseException:
            engine.stop()
            raise
        return engine

    async def _baseline(self, engine: Engine, target: Target, trace: Trace) -> None:
        """Limits and rates (requests a second) of the sweep are frozen in the manifest, as asked for or measured."""
        options = self.options
        if options.absolute_rates and options.limits_s:
            return self._run.freeze(None, target.name, options.rates, options.limits_s, absolute=True)
        baseline = await engine.guard(measure_baseline(target, trace), "measuring its baseline")
        self._run.freeze(baseline, target.name, options.rates, options.limits_s, options.absolute_rates)
        manifest = self._run.manifest
        self.steps.say(
            f"  unloaded P50 TTFT {baseline.unloaded_ttft_p50_s:.3f} s,"
            f" capacity {baseline.capacity_qps:.3g} QPS;"
            f" limits {', '.join(map(number, manifest['limits']['applied'].values()))} s,"
            f" rates {', '.join(map(number, manifest['rates']))} QPS"
        )

    async def _sweep(self, engine: Engine, target: Target, trace: Trace, launch: int) -> bool:
        """Cells one by one; an engine that dies, or an interruption, ends its cell, which is kept, marked.

        False when the budget ended it early.
        """
        finished = True
        rates = self._run.manifest["rates"]
        order = [(arm.name, n) for arm, n in launch_order(self.options.arms, self.options.launches)]
        before = order.index((target.name, launch)) * len(rates)
        facts = self._run.engine_facts(target.name)
        for index, rate in enumerate(rates, start=1):
            key = CellKey(target.name, rate, launch)
            position = Position(key, before + index, len(order) * len(rates))
            self._stop = stop = asyncio.Event()
            watching = asyncio.ensure_future(_set_at_end(engine, stop))
            plan = replace(
                PLAN,
                rates=(rate,),
                first_repeat=launch,
                budget_s=None if self.options.budget_s is None else self._left_s(),
            )
            try:
                with display(self._stream, json=self.options.json) as line:

                    def show(
                        _: Position, progress: Progress, line: Any = line, at: Position = position
                    ) -> None:
                        line(at, progress)

                    finished = await measure(
                        self._run.store,
                        [target],
                        trace,
                        plan,
                        engines={target.name: facts},
                        launches={target.name: launch},
                        on_progress=show,
                        stop=stop,
                        resumed=self.options.resume,
                    )
            except UserError:
                if not await engine.dying():
                    raise
            finally:
                self._stop = None
                watching.cancel()
            if self._interrupted:
                raise asyncio.CancelledError
            if not engine.alive() or (self._run.has_failures(key) and await engine.dying()):
                self._run.mark_aborted(key)
                raise engine.death(f"measuring at {rate:g} QPS")
            if not finished:
                return False
        return True

    # The run's folder

    @property
    def _run(self) -> RunFolder:
        assert self._folder is not None, "the run's folder is made before anything is kept in it"
        return self._folder

    def _save(self) -> None:
        self._run.manifest["steps_s"] = self.steps.seconds
        self._run.save()


async def _set_at_end(engine: Engine, event: asyncio.Event) -> None:
    await engine.watch()
    event.set()
