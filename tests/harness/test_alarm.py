# SPDX-License-Identifier: Apache-2.0
import asyncio
import time

import pytest
import uvloop

from harness.alarm import Alarm


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
@pytest.mark.parametrize("poll", [True, False])
def test_it_never_rings_early_and_a_past_time_is_now(run: object, poll: bool) -> None:
    async def ring() -> list[float]:
        early = []
        with Alarm() as alarm:
            for delay_s in (0.0101, 0.00005, 0.0033, -1.0, 1e-9):
                at_s = time.monotonic() + delay_s
                await alarm.until(at_s, poll=poll)
                early.append(at_s - time.monotonic())
        return early

    assert callable(run)
    assert max(run(ring())) <= 0
