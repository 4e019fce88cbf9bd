# SPDX-License-Identifier: Apache-2.0
"""What an engine does unloaded and at its limit, from which a run's limits and offered rates are derived.

Both measurements use a trace of their own: the same distribution as the run's, another seed.
"""

import dataclasses
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import UserError
from harness.load import CellSpec, RequestRecord, Target, run_cell
from harness.sla import SOURCE_LIMITS_S, Limits
from harness.stats import quantile
from harness.trace import Request, Trace
from harness.validity import ttft_s

UNLOADED_REQUESTS = 8
BURST_REQUESTS = 24
"""A capacity needs no more, however long the trace is."""
SOURCE_UNLOADED_P50_S = 3.13
LIMIT_FACTORS = (4.8, 8.0)
"""The source's 15 s and 25 s over its unloaded P50 TTFT of 3.13 s."""
LEAST_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Baseline:
    """Records of the requests sent one by one, and of those sent all at once."""

    trace_sha256: str
    unloaded: tuple[RequestRecord, ...]
    burst: tuple[RequestRecord, ...]

    @property
    def unloaded_ttft_p50_s(self) -> float:
        return quantile([ttft_s(record) for record in self.unloaded], 50)

    @property
    def capacity_qps(self) -> float:
        """Requests over the time from their common due time to the end of the last one."""
        return len(self.burst) / max(record.done_s or math.inf for record in self.burst)

    def limits(self, arm: str) -> Limits:
        first_s, second_s = (factor * self.unloaded_ttft_p50_s for factor in LIMIT_FACTORS)
        low, high = SOURCE_LIMITS_S
        return Limits.of(
            first_s,
            second_s,
            rule=(
                f"{LIMIT_FACTORS[0]:g}x and {LIMIT_FACTORS[1]:g}x the unloaded P50 TTFT of {arm},"
                f" {self.unloaded_ttft_p50_s:.4g} s over {len(self.unloaded)} requests sent one by one,"
                f" as the source's {low} s and {high} s are of its {SOURCE_UNLOADED_P50_S:g} s;"
                " frozen before the sweep"
            ),
        )

    def rates(self, fractions: Sequence[float]) -> tuple[float, ...]:
        """Offered rates in requests a second: fractions of the capacity, to three significant digits."""
        rates = tuple(float(f"{fraction * self.capacity_qps:.3g}") for fraction in fractions)
        if len(set(rates)) < len(rates):
            raise UserError(
                f"fractions of {self.capacity_qps:.3g} QPS give a rate twice; set them further apart"
            )
        return rates

    def as_record(self) -> dict[str, Any]:
        """For baseline.json: what was derived, and each request it was derived from."""
        kept = ("id", "prompt_tokens", "due_s", "dispatched_s", "first_token_s", "done_s", "status")
        return {
            "trace_sha256": self.trace_sha256,
            "unloaded_ttft_p50_s": self.unloaded_ttft_p50_s,
            "capacity_qps": self.capacity_qps,
            "unloaded": [_columns(record, kept) for record in self.unloaded],
            "burst": [_columns(record, kept) for record in self.burst],
        }


async def measure_baseline(target: Target, trace: Trace) -> Baseline:
    """Sends a few requests of the trace one by one, then up to 24 of it at once. UserError where one fails.

    These get twice the time that they would take one by one.
    """
    unloaded = [
        (await _send(target, trace, [request], 1.0, LEAST_TIMEOUT_S))[0]
        for request in spread(trace.requests, UNLOADED_REQUESTS)
    ]
    at_once = sorted(spread(trace.requests, BURST_REQUESTS), key=lambda request: request.arrival)
    one_s = max((record.done_s or 0.0) - record.due_s for record in unloaded)
    timeout_s = max(LEAST_TIMEOUT_S, 2 * one_s * len(at_once))
    burst = await _send(target, trace, at_once, math.inf, timeout_s)
    return Baseline(trace.sha256, tuple(unloaded), tuple(burst))


def spread(requests: Sequence[Request], count: int) -> list[Request]:
    """At most `count` requests, evenly over the range of prompt lengths."""
    by_length = sorted(requests, key=lambda request: len(request.prompt))
    count = min(count, len(by_length))
    return [by_length[(2 * index + 1) * len(by_length) // (2 * count)] for index in range(count)]


async def _send(
    target: Target, trace: Trace, requests: Sequence[Request], qps: float, timeout_s: float
) -> list[RequestRecord]:
    first = requests[0].arrival
    due_now = tuple(dataclasses.replace(request, arrival=request.arrival - first) for request in requests)
    part = dataclasses.replace(trace, requests=due_now)
    salt = f"baseline-{secrets.token_hex(8)}"
    run = await run_cell(
        target, part, CellSpec(qps, 0, salt, drain_timeout_s=timeout_s, request_timeout_s=timeout_s)
    )
    for record in run.records:
        if record.status != "ok":
            raise UserError(
                f"arm {target.name}: request {record.id} of the baseline failed"
                f" ({record.status}: {record.error}); see the engine's log"
            )
    return run.records


def _columns(record: RequestRecord, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}
