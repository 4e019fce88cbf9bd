# SPDX-License-Identifier: Apache-2.0
"""Runs a pair to its end, an interruption or an error, and in every case reports what was kept."""

import asyncio
from pathlib import Path
from typing import Protocol

import uvloop

from harness.errors import UserError
from harness.report import write_report
from harness.signals import on_ending
from harness.store import RunStore


class Run(Protocol):
    """`store` is None until there is a folder to keep anything in."""

    @property
    def store(self) -> RunStore | None: ...

    def interrupt(self) -> None: ...

    async def run(self) -> None: ...


def carry_out(run: Run, out: Path) -> None:
    """Raises the run's UserError, and one for an interruption, after the report is written."""
    try:
        uvloop.run(_until_done_or_interrupted(run))
    except asyncio.CancelledError:
        raise UserError(f"interrupted; {_kept(run.store)}") from None
    finally:
        if run.store:
            print(write_report(run.store), end="")
    print(f"\nresults are in {out}")


async def _until_done_or_interrupted(run: Run) -> None:
    on_ending(run.interrupt)
    await run.run()


def _kept(store: RunStore | None) -> str:
    return (
        f"{sum(1 for _ in store.cells())} cells kept in {store.path}" if store else "nothing was measured yet"
    )
