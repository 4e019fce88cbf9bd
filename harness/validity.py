# SPDX-License-Identifier: Apache-2.0
"""Reasons why a cell must not count. Pure functions of what was recorded: `report` judges old runs alike."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.client import CANCELLED, RequestRecord
from harness.load import refusal
from harness.stats import order_statistic, slope

SPAN_TOLERANCE = 0.01
SPAN_FLOOR_S = 0.010


@dataclass(frozen=True)
class Evidence:
    """All that a verdict about a cell rests on; `metrics` as `store.summarise_samples` gives them."""

    records: Sequence[RequestRecord]
    loop_lag_p99_s: float | None
    metrics: Mapping[str, Any]
    aborted: bool
    shared_cores: bool


def ttft_s(record: RequestRecord) -> float:
    """First token minus due time; infinite for a request that failed in any way."""
    if record.status != "ok" or record.first_token_s is None:
        return math.inf
    return record.first_token_s - record.due_s


def slip_s(records: Sequence[RequestRecord]) -> list[float]:
    """How long after its due time each sent request was dispatched."""
    return [r.dispatched_s - r.due_s for r in records if r.dispatched_s is not None]


def slip_limit_s(median_ttft_s: float, shared_cores: bool) -> float:
    """How late the client may be: max(10 ms, 1 % of the median TTFT), or max(50 ms, 5 %) on shared cores."""
    floor_s, share = (0.050, 0.05) if shared_cores else (0.010, 0.01)
    return max(floor_s, share * median_ttft_s) if math.isfinite(median_ttft_s) else floor_s


def invalid_reasons(evidence: Evidence) -> list[str]:
    """Every reason, one sentence each; none means that the cell counts."""
    if evidence.aborted:
        cause = refusal(evidence.records)
        return [f"stopped: {cause}" if cause else "interrupted"]
    return [reason for check in _CHECKS for reason in check(evidence)]


def backlog_slope_rps(records: Sequence[RequestRecord]) -> float | None:
    """Least-squares slope of the requests in flight at each dispatch, over time; requests per second."""
    sent = [
        (r.dispatched_s, math.inf if r.done_s is None else r.done_s)
        for r in records
        if r.dispatched_s is not None
    ]
    times = [start for start, _ in sent]
    in_flight = [float(sum(start <= t < end for start, end in sent)) for t in times]
    return slope(times, in_flight)


def _late_client(evidence: Evidence) -> Iterator[str]:
    median = order_statistic([ttft_s(r) for r in evidence.records], 50)
    limit = slip_limit_s(median, evidence.shared_cores)
    slip = slip_s(evidence.records)
    for name, p99 in (
        ("slip", order_statistic(slip, 99) if slip else None),
        ("loop lag", evidence.loop_lag_p99_s),
    ):
        if p99 is not None and p99 > limit:
            yield f"client {name} p99 {p99 * 1e3:.1f} ms is over {limit * 1e3:.1f} ms"


def _wrong_span(evidence: Evidence) -> Iterator[str]:
    sent = [(r.due_s, r.dispatched_s) for r in evidence.records if r.dispatched_s is not None]
    if not sent:
        return
    due, dispatched = zip(*sent, strict=True)
    wanted, found = max(due) - min(due), max(dispatched) - min(dispatched)
    if abs(found - wanted) > max(SPAN_FLOOR_S, SPAN_TOLERANCE * wanted):
        yield f"requests were dispatched over {found:.3f} s, the trace spans {wanted:.3f} s"


def _wrong_prompts(evidence: Evidence) -> Iterator[str]:
    counts = [
        (r.id, r.server_prompt_tokens, r.prompt_tokens) for r in evidence.records if r.server_prompt_tokens
    ]
    wrong = [(name, server, ours) for name, server, ours in counts if server != ours]
    if wrong:
        name, server, ours = wrong[0]
        yield f"server counted other prompt tokens in {len(wrong)} requests ({name}: {server}, trace {ours})"


def _prefix_hits(evidence: Evidence) -> Iterator[str]:
    hits = evidence.metrics.get("prefix_hits_delta")
    if hits:
        yield f"prefix cache hits rose by {hits:g} tokens"


def _restarted(evidence: Evidence) -> Iterator[str]:
    if evidence.metrics.get("engine_restarted"):
        yield "engine restarted during the cell"


def _unfinished(evidence: Evidence) -> Iterator[str]:
    left = sum(r.status == CANCELLED for r in evidence.records)
    if left:
        yield f"unstable: {left} of {len(evidence.records)} requests unfinished at the drain limit"


_CHECKS: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    _late_client,
    _wrong_span,
    _wrong_prompts,
    _prefix_hits,
    _restarted,
    _unfinished,
)
