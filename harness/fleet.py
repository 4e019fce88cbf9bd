# SPDX-License-Identifier: Apache-2.0
"""Engines that run beside each other, one for each arm: started together, watched, replaced when one dies."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

from harness.arms import Arm
from harness.engines.endpoint import ask_model
from harness.engines.process import Engine, free_port, healthy, start
from harness.errors import UserError
from harness.load import Target
from harness.run_folder import RunFolder
from harness.serving import HOST, Serving, kv_tokens_of
from harness.steps import Steps

ANSWERS_WITHIN_S = 60.0
"""A live engine that does not answer /health in so long hangs; one that is only busy does."""


class GivenUpError(UserError):
    """Not a fault of its own."""


class Fleet:
    """Of `arms`, those that started. Leaving the context ends every engine."""

    def __init__(self, serving: Serving, folder: RunFolder, steps: Steps, session: int) -> None:
        self.serving, self.folder, self.steps = serving, folder, steps
        self.engines: dict[str, Engine] = {}
        self._models: dict[str, str] = {}
        self._session = session
        self._starts: dict[str, int] = {}

    @property
    def targets(self) -> dict[str, Target]:
        """The arms that run, in the run's order, whichever was up first or came back last."""
        names = [arm["name"] for arm in self.folder.manifest["arms"]]
        return {
            name: Target(name, self.engines[name].url, self._models[name])
            for name in names
            if name in self.engines
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(list(self.engines))

    async def start(self, arms: Sequence[Arm]) -> dict[str, UserError]:
        """Starts all of them at once; returns why some did not start, by arm.

        When those that fail leave no pair, the others are given up at once.
        """
        running = len(self.engines)

        def hopeless(failed: int) -> bool:
            return running + len(arms) - failed < 2

        ports = _distinct_ports(len(arms))
        starting = [self._start_one(arm, port) for arm, port in zip(arms, ports, strict=True)]
        failed = {}
        for arm, outcome in zip(arms, await gather_all(starting, hopeless), strict=True):
            if isinstance(outcome, UserError):
                failed[arm.name] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        self.folder.require_equal_bytes()
        return dict(sorted(failed.items(), key=lambda item: isinstance(item[1], GivenUpError)))

    async def _start_one(self, arm: Arm, port: int) -> None:
        serving, folder = self.serving, self.folder
        count = self._starts[arm.name] = self._starts.get(arm.name, 0) + 1
        folder.folder("logs")
        log = f"logs/{arm.name}-launch{self._session + 1}" + (f"-start{count}.log" if count > 1 else ".log")
        proof_dir = folder.folder("proof", arm.name)
        argv = serving.argv(arm, port, proof_dir)
        engine = await start(
            arm.name,
            argv,
            url=f"http://{HOST}:{port}",
            log_path=folder.path / log,
            proof_dir=proof_dir,
            env=serving.environment(arm),
            ready_timeout_s=serving.ready_timeout_s,
            nice=serving.nice,
            progress=lambda state: self.steps.progress(f"{arm.name} {state}"),
        )
        try:
            entry = folder.arm(arm.name)
            entry["starts"] = entry.get("starts", self._session) + 1
            folder.record_engine(arm, engine, argv, engine.proofs, log)
            if serving.gpu:  # the engine core knows, not its workers (gpu_worker.py)
                folder.arm(arm.name)["kv_tokens"] = kv_tokens_of(engine.log_path)
                folder.save()
            arm.require_proof(engine.proofs, gpu=serving.gpu)
            model = await engine.guard(ask_model(engine.url, None), "starting")
        except BaseException:
            engine.stop()
            raise
        self._models[arm.name] = model
        self.engines[arm.name] = engine
        self.steps.say(f"  {arm.name} is up")

    def stop(self, names: Sequence[str]) -> None:
        """Ends these engines; they go at the same time, and are waited for."""
        ending = [self.engines.pop(name) for name in names]
        for engine in ending:
            if engine.process.stdin is not None:
                engine.process.stdin.close()
        for engine in ending:
            engine.stop()

    async def ask_each(
        self, asking: Callable[[Target], Coroutine[Any, Any, Any]], doing: str, *, together: bool = False
    ) -> tuple[dict[str, Any], dict[str, UserError]]:
        """Asks one arm after the other; by arm what it answered, and why it did not.

        Not `together`: a rank that waits for another on the GPU holds up every engine beside it, and what kernels
        are tuned by would be the neighbours' load.
        """
        answers: dict[str, Any] = {}
        failed: dict[str, UserError] = {}

        async def ask(target: Target) -> None:
            try:
                answers[target.name] = await self.engines[target.name].guard(asking(target), doing)
            except UserError as error:
                failed[target.name] = error

        if together:
            await gather_all([ask(target) for target in self.targets.values()])
        else:
            for target in self.targets.values():
                await ask(target)
        return answers, failed

    @asynccontextmanager
    async def watched(self, stop: asyncio.Event) -> AsyncIterator[None]:
        """Sets `stop` when any engine ends."""

        async def watch(engine: Engine) -> None:
            await engine.watch()
            stop.set()

        watching = [asyncio.ensure_future(watch(engine)) for engine in self.engines.values()]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()

    async def dead(self, suspects: Collection[str] = ()) -> list[str]:
        """Arms whose engine has ended; of `suspects` also those that end soon, and those that hang."""
        found = [name for name, engine in self.engines.items() if not engine.alive()]
        for name in suspects:
            engine = self.engines[name]
            if name not in found and (
                await engine.dying() or not await healthy(engine.url, ANSWERS_WITHIN_S)
            ):
                found.append(name)
        return found

    def kill_worker(self, name: str) -> int:
        """SIGKILL for the arm's last rank, as a fault would end it; returns its process id."""
        pid = self.engines[name].proofs[-1].pid
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return pid


async def gather_all(
    work: Sequence[Coroutine[Any, Any, Any]], hopeless: Callable[[int], bool] = lambda failed: False
) -> list[Any]:
    """Every outcome, errors among them.

    A cancellation of ours reaches all of the work before it is passed on. When so many have failed that it is
    `hopeless`, what still runs is cancelled; its outcome is a GivenUpError.
    """
    tasks = [asyncio.ensure_future(part) for part in work]
    pending = set(tasks)
    try:
        while pending and not hopeless(sum(task.done() and task.exception() is not None for task in tasks)):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in pending:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    given_up = GivenUpError("given up, since too few others were left")
    return [given_up if isinstance(outcome, asyncio.CancelledError) else outcome for outcome in outcomes]


def _distinct_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return sorted(ports)
