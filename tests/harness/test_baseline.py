# SPDX-License-Identifier: Apache-2.0
"""How a baseline is asked for; what follows from it is tested with the pair (test_bench.py)."""

import pytest
from builders import record, small_trace

from harness.baseline import measure_baseline
from harness.load import CellRun, CellSpec, Target
from harness.trace import Trace


@pytest.mark.parametrize(("answer_s", "timeout_s"), [(0.1, 120.0), (10.0, 480.0)])
async def test_a_long_traces_burst_is_short_and_has_time(
    answer_s: float, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 of 60 requests at once, over the whole range of lengths, in twice the time of one after the other."""
    asked: list[tuple[int, float]] = []

    async def answers(target: Target, trace: Trace, spec: CellSpec) -> CellRun:
        asked.append((len(trace.requests), spec.request_timeout_s))
        arrivals = [request.arrival for request in trace.requests]
        assert arrivals == sorted(arrivals) and arrivals[0] == 0
        records = [
            record(due_s=0.0, done_s=answer_s, prompt_tokens=request.prompt_tokens)
            for request in trace.requests
        ]
        return CellRun(records=records, loop_lag_s=[], started_unix_s=0.0, aborted=False)

    monkeypatch.setattr("harness.baseline.run_cell", answers)
    trace = small_trace(requests=60)
    found = await measure_baseline(Target("tp2", "http://127.0.0.1:1", "m"), trace)
    assert asked == [(1, 120.0)] * 8 + [(24, timeout_s)]
    lengths = sorted(record.prompt_tokens for record in found.burst)
    assert lengths[0] < 6 and lengths[-1] > 38 and found.capacity_qps == pytest.approx(24 / answer_s)
