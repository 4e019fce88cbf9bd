# SPDX-License-Identifier: Apache-2.0
"""A pair whose engines all run at once: for engines that take minutes to start and fit beside each other.

    start        every arm at once; each proves what it is
    parity       arms against each other; each alone against concurrently, beside long prefills
    long         TTFT and time between tokens of lone long prompts, and of several contexts at once
    sweep        cells alternate between the arms (A B B A); an idle engine beside them has nothing to do
    residency    the first arm again with the others idle, then with the others stopped: what does idleness cost?

An engine that dies is recorded and started again, checked like the first as another launch of its arm, and its cell
measured again. An arm that does not start, or does not answer, is left out, and the others go on. Each command that
goes on with a run (`resume`) is a session: its engines are another launch of each arm. What is in the run's folder:
run_folder.py, and

    long_context-<session>.json    what the long prompts took, each
    parity-<arm>-launch<n>.json    the verdict on an engine that died and came back, n from 1
    residency-<session>.json       the same prompts beside idle engines and without them
"""

import asyncio
import time
from collections.abc import Mapping
from typing import TextIO

from harness import long_context
from harness.baseline import measure_baseline
from harness.calibrate import brief, error_bar
from harness.errors import UserError
from harness.fleet import Fleet
from harness.load import Target
from harness.manifest import add_session
from harness.nvidia import gpu_facts
from harness.pair import Options
from harness.prepare import sha256_of
from harness.resident_long import LongPrompts
from harness.resident_options import ResidentOptions
from harness.resident_parity import ResidentParity
from harness.resident_sweep import PLAN, ResidentSweep, death_text
from harness.run_folder import RunFolder
from harness.steps import Steps
from harness.store import RunStore
from harness.trace import Trace

WARM_UP_TOKENS = 4
TIME_WAS_UP = "Not every cell was measured: the time was up; go on with --resume."


class ResidentRun:
    """One session of a run. `store` is None until there is a folder to keep anything in."""

    def __init__(self, options: Options, resident: ResidentOptions, stream: TextIO) -> None:
        self.options, self.resident = options, resident
        self.steps = Steps(stream)
        self._stream = stream
        self._folder: RunFolder | None = None
        self._session = 0
        self._left_out: dict[str, str] = {}
        self._cells: ResidentSweep | None = None
        self._task: asyncio.Task[None] | None = None
        self._longest = 0

    @property
    def store(self) -> RunStore | None:
        return self._folder.store if self._folder else None

    def interrupt(self) -> None:
        """For a signal handler: ends the cell that runs and keeps it, or cancels whatever else is done."""
        in_a_cell = self._cells is not None and self._cells.interrupt()
        if not in_a_cell and self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Raises UserError where the run cannot go on or an arm was left out, CancelledError when interrupted."""
        self._task = asyncio.current_task()
        try:
            await self._measure()
        finally:
            if self._folder:
                self._close()
        if self._left_out:
            raise UserError("; ".join(f"{arm} was left out: {why}" for arm, why in self._left_out.items()))

    async def _measure(self) -> None:
        options, resident, step = self.options, self.resident, self.steps.step
        with step("trace"):
            trace = options.trace(options.seed, resident.vocab_size, resident.arrivals)
            self._folder = self._open(trace)
            self._longest = max(request.prompt_tokens for request in trace.requests)
        with Fleet(resident.serving, self._run, self.steps, self._session) as fleet:
            with step("start"):
                self._leave_out(fleet, await fleet.start(options.arms))
            with step("warm-up"):
                self._leave_out(fleet, await self._warm_up(fleet, list(fleet.targets)))
            gate = ResidentParity(
                fleet, self._run, self.steps, options, resident, lambda failed: self._leave_out(fleet, failed)
            )
            with step("parity"):
                await gate.check()
            prompts = LongPrompts(
                fleet,
                self._run,
                self.steps,
                self._find,
                session=self._session + 1,
                tokens=resident.context_tokens,
                vocab_size=resident.vocab_size,
                seed=options.seed,
            )
            if resident.lone_prompts or resident.contexts:
                with step("long contexts"):
                    await self._long_prompts(fleet, prompts)
            if not self._run.manifest["frozen"]:
                with step("baseline"):
                    await self._baseline(fleet)
            with step("calibration"):
                point = await brief(trace, min(self._run.manifest["rates"]))
                self._run.keep_calibration(point)
                self.steps.say(f"  {error_bar(point)}")
            with step("sweep"):
                await self._sweep(fleet, gate, trace)
            if resident.lone_prompts and len(fleet.engines) > 1 and self._left_s() > prompts.idle_cost_s():
                with step("residency"):
                    await prompts.idle_cost()

    # The run's folder

    @property
    def _run(self) -> RunFolder:
        assert self._folder is not None, "the run's folder is made before anything is kept in it"
        return self._folder

    def _open(self, trace: Trace) -> RunFolder:
        options, resident = self.options, self.resident
        model = resident.serving.model
        folder = RunFolder.open(
            options.out,
            trace,
            options.arms,
            rates=options.rates if options.absolute_rates else (),
            limits=options.limits,
            repeats=resident.repeats,
            shared_cores=not resident.serving.gpu,
            facts={
                "checkpoint": {"path": str(model), "sha256": sha256_of(model)},
                "resident": True,
                "timeouts": PLAN.timeouts,
            },
            resume=options.resume,
        )
        manifest = folder.manifest
        manifest["repeats"] = max(manifest["repeats"], resident.repeats)
        if options.absolute_rates:
            manifest["rates"] = sorted({*manifest["rates"], *options.rates})
        self._session = add_session(manifest, gpus=gpu_facts())
        manifest.setdefault("deaths", [])
        known = {arm["name"] for arm in manifest["arms"]}
        if unknown := [arm.name for arm in options.arms if arm.name not in known]:
            raise UserError(f"{options.out} was begun without {', '.join(unknown)}; choose another --out")
        folder.save()
        return folder

    def _close(self) -> None:
        run = self._run
        run.manifest["sessions"][self._session] |= {"steps_s": self.steps.seconds, "gpus_at_end": gpu_facts()}
        run.note("All arms' engines ran at once, one of them loaded at a time.")
        run.note_launches()
        run.manifest["left_out"] = {arm: why.splitlines()[0] for arm, why in self._left_out.items()}
        for arm, why in run.manifest["left_out"].items():
            run.note(f"{arm} was left out: {why}")
        for death in run.manifest["deaths"]:
            run.note(death_text(death))
        run.note_missing(self.options.arms)
        for text in run.manifest.get("findings", ()):
            run.note(text)
        run.save()

    def _find(self, text: str) -> None:
        """A finding: said now, and noted at the end of this session and of every later one."""
        self._run.manifest.setdefault("findings", []).append(text)
        self._run.save()
        self.steps.say(f"  {text}")

    def _leave_out(self, fleet: Fleet, failed: Mapping[str, UserError]) -> None:
        """Goes on without arms that failed, if there is still a pair; raises the first one's error if not."""
        for name, error in failed.items():
            self.steps.say(f"  {name} is left out: {error}")
            self._left_out[name] = str(error)
            if name in fleet.engines:
                fleet.stop([name])
        if failed and (len(fleet.engines) < 2 or self.options.arms[0].name in failed):
            raise next(iter(failed.values()))

    # Time

    def _left_s(self) -> float:
        deadline = self.resident.deadline_s
        return float("inf") if deadline is None else deadline - time.monotonic()

    # Steps

    async def _warm_up(self, fleet: Fleet, names: list[str]) -> dict[str, UserError]:
        """Compiles kernels: no timed request is an engine's first, nor the first so long.

        Returns why some did not answer, by arm.
        """
        resident = self.resident
        longest = max(
            self._longest, resident.context_tokens if resident.lone_prompts or resident.contexts else 0
        )
        (prompt,) = long_context.prompts(self.options.seed + 1, 1, longest, resident.vocab_size)

        async def ask(target: Target) -> None:
            if target.name in names:
                async with long_context.session() as session:
                    asked = long_context.question(target, prompt, WARM_UP_TOKENS)
                    await long_context.stream(session, asked)

        together = resident.warm_up_together
        _, failed = await fleet.ask_each(ask, "answering its first request", together=together)
        return failed

    async def _long_prompts(self, fleet: Fleet, prompts: LongPrompts) -> None:
        """An arm whose engine dies of them is left out; whatever else goes wrong is noted, and the sweep goes on."""
        try:
            if self.resident.lone_prompts:
                await prompts.lone(self.resident.lone_prompts)
            if self.resident.contexts:
                await prompts.together(self.resident.contexts)
        except UserError as error:
            dead = await fleet.dead(list(fleet.targets))
            self._leave_out(fleet, dict.fromkeys(dead, error))
            self._find(f"Not every long prompt was measured: {error}")

    async def _baseline(self, fleet: Fleet) -> None:
        """Limits and rates of the sweep are frozen in the manifest here, as asked for or from the first arm."""
        options = self.options
        name = options.arms[0].name
        baseline = None
        if not (options.absolute_rates and options.limits_s):
            trace = options.trace(options.seed + 1, self.resident.vocab_size)
            asking = measure_baseline(fleet.targets[name], trace)
            baseline = await fleet.engines[name].guard(asking, "measuring its baseline")
        self._run.freeze(baseline, name, options.rates, options.limits_s, options.absolute_rates)

    async def _sweep(self, fleet: Fleet, gate: ResidentParity, trace: Trace) -> None:
        async def admit(name: str) -> None:
            if failed := await self._warm_up(fleet, [name]):
                raise failed[name]
            await gate.admit(name)

        self._cells = ResidentSweep(
            fleet,
            {arm.name: arm for arm in self.options.arms},
            self._run,
            self.steps,
            self._stream,
            session=self._session,
            admit=admit,
            kill=self.resident.kill,
            bisect_qps=self.options.bisect_qps,
            json=self.options.json,
        )
        try:
            finished = await self._cells.measure(trace, self._left_s)
        finally:
            self._left_out |= self._cells.left_out
        if not finished:
            self._run.note(TIME_WAS_UP)
            self.steps.say(f"  {TIME_WAS_UP}")
