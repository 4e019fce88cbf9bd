# SPDX-License-Identifier: Apache-2.0
"""The cells of a resident run: alternating between engines that all run, and going on when one of them dies.

A death ends the cell that runs. What it touched is set aside, the engine is started, warmed up and checked again, and
the cell is measured from its beginning. Cells whose requests failed of the load alone stand: overload gets no second
chance. The manifest's `deaths` say what died of what, and how long its return took.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from harness.arms import Arm
from harness.client import CANCELLED, OK
from harness.errors import UserError
from harness.fleet import Fleet
from harness.load import Progress
from harness.progress import display, tell_plan
from harness.run_folder import RunFolder
from harness.steps import Steps
from harness.store import Cell, CellKey
from harness.sweep import Plan, Position, measure
from harness.trace import Trace

MAX_RESTARTS = 2
PLAN = Plan((), request_timeout_s=600.0, drain_timeout_s=180.0)
"""Of any session; its rates come with it."""


class ResidentSweep:
    """`admit` prepares an engine that came back, and raises UserError where it must not be timed. `kill`: the arm
    whose last rank is to get SIGKILL, once, in the middle of a cell."""

    def __init__(
        self,
        fleet: Fleet,
        arms: Mapping[str, Arm],
        folder: RunFolder,
        steps: Steps,
        stream: TextIO,
        *,
        session: int,
        admit: Callable[[str], Awaitable[None]],
        kill: str | None = None,
        bisect_qps: float | None = None,
        json: bool = False,
    ) -> None:
        self.left_out: dict[str, str] = {}
        self._fleet, self._arms, self._run, self._steps, self._stream = fleet, arms, folder, steps, stream
        self._session, self._admit, self._kill = session, admit, kill
        self._bisect_qps, self._json = bisect_qps, json
        self._told = False
        self._killed = False
        self._restarts: dict[str, int] = {}
        self._interrupted = False
        self._stop: asyncio.Event | None = None
        self._at: CellKey | None = None

    def interrupt(self) -> bool:
        """Ends the cell that runs, which is kept; says whether there was one to end."""
        if self._stop is None or self._interrupted:
            return False
        self._interrupted = True
        self._stop.set()
        return True

    async def measure(self, trace: Trace, left_s: Callable[[], float]) -> bool:
        """Every cell that is left, while there is time; False when that was up.

        Raises UserError where an engine dies too often or refuses requests, CancelledError when interrupted.
        """
        while True:
            began_unix_s = time.time()
            error: UserError | None = None
            finished = False
            self._stop, self._at = asyncio.Event(), None
            try:
                with display(self._stream, json=self._json) as line:
                    finished = await self._measure_cells(trace, left_s(), line, self._stop)
            except UserError as raised:
                error = raised
            finally:
                self._stop = None
            if self._interrupted:
                raise asyncio.CancelledError
            cells = self._cells_since(began_unix_s)
            suspects = {cell.key.arm for cell in cells if _failed(cell)} | (
                {self._at.arm} if error and self._at else set()
            )
            dead = await self._fleet.dead(suspects)
            if not dead:
                if error:
                    raise error
                if self._kill and not self._killed:
                    self._run.note(
                        f"No rank of {self._kill} was killed, as asked: no cell of it ran long enough."
                    )
                return finished
            hit = touched(cells, dead)
            for key in hit:
                self._run.mark_aborted(key)
                self._run.store.set_aside(key)
            for name in dead:
                await self._replace(name, [str(key) for key in hit if key.arm == name])

    async def _measure_cells(
        self, trace: Trace, left_s: float, line: Callable[[Position, Progress], None], stop: asyncio.Event
    ) -> bool:
        manifest, targets = self._run.manifest, self._fleet.targets

        def show(position: Position, progress: Progress) -> None:
            self._at = position.key
            line(position, progress)
            self._kill_in_the_middle(position.key, progress)

        plan = replace(
            PLAN,
            rates=tuple(manifest["rates"]),
            repeats=manifest["repeats"],
            budget_s=left_s if math.isfinite(left_s) else None,
            grid_qps=self._bisect_qps,
        )
        if not self._told:
            self._told = True
            tell_plan(plan, len(targets), trace.span, self._stream, json=self._json)
        async with self._fleet.watched(stop):
            return await measure(
                self._run.store,
                list(targets.values()),
                trace,
                plan,
                engines={name: self._run.engine_facts(name) for name in targets},
                launches=self._run.launches(),
                on_progress=show,
                stop=stop,
                warmed=list(targets),
                resumed=self._session > 0,
            )

    def _cells_since(self, unix_s: float) -> list[Cell]:
        """Of arms that run."""
        return [
            cell
            for cell in self._run.store.cells()
            if cell.key.arm in self._fleet.engines and cell.facts["started_unix_s"] >= unix_s
        ]

    async def _replace(self, name: str, cells: list[str]) -> None:
        """Records a death and starts the arm's engine again; an arm that does not come back is left out."""
        death = self._fleet.engines[name].death("measuring" + (f" {', '.join(cells)}" if cells else ""))
        self._steps.say(f"  {death}")
        restarts = self._restarts[name] = self._restarts.get(name, 0) + 1
        if restarts > MAX_RESTARTS:
            raise death
        record: dict[str, Any] = {
            "arm": name,
            "unix_s": time.time(),
            "session": self._session + 1,
            "cells": cells,
            "cause": str(death).partition(";")[0],
            "rehearsed": self._killed and name == self._kill and restarts == 1,
            "restart_s": None,
        }
        self._run.manifest["deaths"].append(record)
        self._run.save()
        self._fleet.stop([name])
        began = time.monotonic()
        with self._steps.step(f"{name} restart {restarts}"):
            try:
                if failed := await self._fleet.start([self._arms[name]]):
                    raise failed[name]
                await self._admit(name)
            except UserError as error:
                self._steps.say(f"  {name} is left out: {error}")
                self.left_out[name] = str(error)
                if name in self._fleet.engines:
                    self._fleet.stop([name])
                if len(self._fleet.engines) < 2:
                    raise
                return
        record["restart_s"] = round(time.monotonic() - began, 1)
        self._run.save()

    def _kill_in_the_middle(self, key: CellKey, progress: Progress) -> None:
        """The rehearsal of a death that was asked for, when half of a cell's requests are sent."""
        in_the_middle = (
            2 * progress.sent >= progress.total and progress.done < progress.total and not progress.ended
        )
        if key.arm == self._kill and in_the_middle and not self._killed:
            self._killed = True
            pid = self._fleet.kill_worker(key.arm)
            self._steps.say(f"  SIGKILL for the last rank of {key.arm} (process {pid}), as asked")


def touched(cells: Sequence[Cell], dead: Collection[str]) -> list[CellKey]:
    """Of the cells of one pass those that an engine's death spoiled: cut short by it, or answered no more.

    A dead engine answers nothing any longer: its death lies after its arm's last success. Failures before that, and
    requests that the client itself cancelled at the drain limit, are what the load did.
    """
    last_s = {
        arm: max(
            (end_s for cell in cells if cell.key.arm == arm for end_s in _ends(cell, {OK})), default=-math.inf
        )
        for arm in dead
    }

    def spoiled(cell: Cell) -> bool:
        failures = {record.status for record in cell.records} - {OK, CANCELLED}
        return cell.key.arm in dead and any(end_s > last_s[cell.key.arm] for end_s in _ends(cell, failures))

    return [cell.key for cell in cells if cell.facts["aborted"] or spoiled(cell)]


def _failed(cell: Cell) -> bool:
    return cell.facts["aborted"] or any(record.status != OK for record in cell.records)


def _ends(cell: Cell, statuses: Collection[str]) -> list[float]:
    """When the cell's requests of these outcomes ended, on the wall clock."""
    began_s = cell.facts["started_unix_s"]
    return [
        began_s + record.done_s
        for record in cell.records
        if record.status in statuses and record.done_s is not None
    ]


def death_text(death: Mapping[str, Any]) -> str:
    """A death and what followed, in one sentence for the report."""
    again = (
        "it did not come back"
        if death["restart_s"] is None
        else f"it was started again in {death['restart_s']:g} s"
    )
    then = "set aside" if death["restart_s"] is None else "measured again"
    cells = f", and {', '.join(death['cells'])} {then}" if death["cells"] else ""
    how = " (SIGKILL for one rank, a rehearsal)" if death["rehearsed"] else ""
    return f"Session {death['session']}: {death['cause']}{how}; {again}{cells}."
