# SPDX-License-Identifier: Apache-2.0
"""Runs a pair to its end, an interruption or an error, and in every case reports what was kept."""

import asyncio
import sys
from pathlib import Path
from typing import Protocol

import uvloop

from harness.errors import UserError
from harness.progress import JsonEvents
from harness.report import write_report
from harness.signals import on_ending
from harness.steps import put
from harness.store import RunStore


class Run(Protocol):
    """`store` is None until there is a folder to keep anything in."""

    @property
    def store(self) -> RunStore | None: ...

    def interrupt(self) -> None: ...

    async def run(self) -> None: ...


def carry_out(run: Run, out: Path, *, json: bool = False) -> None:
    """Raises the run's UserError, and one for an interruption, after the report is written.

    The report is printed, or with `json` an event in its place.
    """
    try:
        uvloop.run(_until_done_or_interrupted(run))
    except asyncio.CancelledError:
        raise UserError(f"interrupted; {_kept(run.store)}") from None
    finally:
        if run.store:
            report = write_report(run.store)
            if not json:
                put(sys.stdout, report)
    if json and run.store:
        JsonEvents(sys.stdout).tell("done", dir=str(out), cells=sum(1 for _ in run.store.cells()))
    else:
        put(sys.stdout, f"\nresults are in {out}\n")


async def _until_done_or_interrupted(run: Run) -> None:
    on_ending(run.interrupt)
    await run.run()


def _kept(store: RunStore | None) -> str:
    return (
        f"{sum(1 for _ in store.cells())} cells kept in {store.path}" if store else "nothing was measured yet"
    )
