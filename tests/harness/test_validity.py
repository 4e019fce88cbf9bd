# SPDX-License-Identifier: Apache-2.0
"""Each reason for which a cell must not count, tripped alone."""

import math
from dataclasses import replace
from typing import Any

import pytest
from builders import record

from harness.client import RequestRecord
from harness.validity import Evidence, Verdict, backlog_slope_rps, judge, slip_limit_s, ttft_s, unchecked

SERVED = [record(index) for index in range(24)]


def verdict(records: list[RequestRecord] = SERVED, **changes: Any) -> Verdict:
    evidence = Evidence(records=records, loop_lag_p99_s=0.001, metrics={}, aborted=False, shared_cores=False)
    return judge(replace(evidence, **changes))


def reasons(records: list[RequestRecord] = SERVED, **changes: Any) -> list[str]:
    return list(verdict(records, **changes).reasons)


def slipped(slip_s: float) -> list[RequestRecord]:
    """Every request is dispatched late by the same time, so that the span is right."""
    return [replace(r, dispatched_s=r.due_s + slip_s) for r in SERVED]


def test_a_clean_cell_counts() -> None:
    assert reasons() == []
    assert reasons(loop_lag_p99_s=None) == []
    assert (
        reasons(metrics={"prefix_hits_delta": 0.0, "engine_restarted": False, "preemptions_delta": 5.0}) == []
    )


def test_failures_and_misses_do_not_make_a_cell_invalid() -> None:
    assert reasons([*SERVED[:-2], record(22, None), record(23, 100.0)]) == []


@pytest.mark.parametrize(
    ("slip_s", "shared", "ok"),
    [(0.009, False, True), (0.011, False, False), (0.049, True, True), (0.051, True, False)],
)
def test_slip(slip_s: float, shared: bool, ok: bool) -> None:
    found = reasons(slipped(slip_s), shared_cores=shared)
    assert (found == []) == ok
    assert ok or found == [f"client slip p99 {slip_s * 1e3:.1f} ms is over {50 if shared else 10}.0 ms"]


def test_loop_lag() -> None:
    assert reasons(loop_lag_p99_s=0.011) == ["client loop lag p99 11.0 ms is over 10.0 ms"]
    assert reasons(loop_lag_p99_s=0.011, shared_cores=True) == []


def test_slow_servers_allow_more_slip() -> None:
    assert slip_limit_s(5.0, shared_cores=False) == pytest.approx(0.05)
    assert slip_limit_s(5.0, shared_cores=True) == pytest.approx(0.25)
    assert slip_limit_s(math.inf, shared_cores=False) == 0.010


def test_dispatch_span() -> None:
    """23 s by the trace; the last request slips by 0.3 s, over 1 %."""
    late = [*SERVED[:-1], replace(SERVED[-1], dispatched_s=SERVED[-1].due_s + 0.3)]
    assert "requests were dispatched over 23.299 s, the trace spans 23.000 s" in reasons(late)


def test_a_rate_that_makes_one_burst_of_the_trace() -> None:
    burst = [replace(r, due_s=1e-6 * i, dispatched_s=1e-6 * i) for i, r in enumerate(SERVED)]
    assert any("no schedule but one burst" in reason for reason in reasons(burst))
    assert not any("burst" in reason for reason in reasons(SERVED[:1]))
    late = [replace(r, dispatched_s=r.due_s + 0.1 * i) for i, r in enumerate(burst)]
    assert not verdict(late).spoiled  # at this rate it will be a burst again


def test_prompt_tokens() -> None:
    wrong = [replace(SERVED[0], server_prompt_tokens=11), *SERVED[1:]]
    assert reasons(wrong) == ["server counted other prompt tokens in 1 requests (r0000: 11, trace 10)"]
    assert reasons([replace(r, server_prompt_tokens=None) for r in SERVED]) == []


def test_prefix_hits() -> None:
    assert reasons(metrics={"prefix_hits_delta": 16.0}) == ["prefix cache hits rose by 16 tokens"]


def test_requests_of_others() -> None:
    assert reasons(metrics={"requests_before": 0.0}) == []
    assert reasons(metrics={"requests_before": 45.0}) == [
        "45 requests were in the engine before the cell began"
    ]


def test_preemptions_that_nobody_counts() -> None:
    assert reasons(metrics={}, no_preemption=True) == [
        "preemptions are unknown in a run declared --no-preemption: the server does not count them"
    ]
    assert reasons(metrics={"preemptions_delta": 0.0}, no_preemption=True) == []


def test_a_server_that_sheds_load_by_closing_connections() -> None:
    resent = [replace(r, reconnects=1) for r in SERVED]
    assert reasons([resent[0], *SERVED[1:]]) == []  # a race
    assert reasons([*resent[:2], *SERVED[2:]]) == [
        "2 requests were sent twice: the server had closed their connections unanswered"
    ]
    assert reasons([*resent[:2], *(record(index) for index in range(2, 200))]) == []


def test_what_nobody_could_check() -> None:
    def of(records: list[RequestRecord], metrics: dict[str, Any]) -> list[str]:
        return unchecked(Evidence(records, 0.001, metrics, aborted=False, shared_cores=False))

    silent = [replace(r, server_prompt_tokens=None) for r in SERVED]
    assert of(SERVED, {"available": True}) == []
    assert of([SERVED[0], *silent[1:]], {"available": True}) == []
    assert [what.split(" (")[0] for what in of(silent, {"available": False})] == [
        "prompt lengths",
        "prefix hits, preemptions, restarts and other load",
    ]


def test_restart() -> None:
    assert reasons(metrics={"engine_restarted": True}) == ["engine restarted during the cell"]


def test_an_engine_that_is_gone_when_the_cell_ends() -> None:
    assert reasons(metrics={"answered_at_end": False}) == [
        "the engine had stopped answering /metrics when the cell ended"
    ]
    assert reasons(metrics={"answered_at_end": False, "engine_restarted": True}) == [
        "engine restarted during the cell"
    ]


LEFT = [*SERVED[:-1], replace(SERVED[-1], status="cancelled")]


@pytest.mark.parametrize(
    ("records", "changes", "unstable", "spoiled"),
    [
        (SERVED, {}, False, False),
        (LEFT, {}, True, False),
        (SERVED, {"loop_lag_p99_s": 1.0}, False, True),
        (LEFT, {"loop_lag_p99_s": 1.0}, True, False),  # overload makes the client late too
        (LEFT, {"metrics": {"requests_before": 45.0}}, False, True),
        (LEFT, {"metrics": {"engine_restarted": True}}, False, True),
        (SERVED, {"metrics": {"answered_at_end": False}}, False, True),
        (LEFT, {"metrics": {"answered_at_end": False}}, True, False),  # too busy to answer
        (LEFT, {"engine_change": "digest differ"}, False, False),
        ([replace(r, server_prompt_tokens=11) for r in LEFT], {}, False, False),
        (LEFT, {"metrics": {"prefix_hits_delta": 1.0}}, True, False),
        (LEFT, {"aborted": True, "loop_lag_p99_s": 1.0}, False, False),
    ],
)
def test_what_an_invalid_cell_still_says(
    records: list[RequestRecord], changes: dict[str, Any], unstable: bool, spoiled: bool
) -> None:
    """Only the trace's own load proves an engine unstable; only what says nothing of that load spoils a cell."""
    found = verdict(records, **changes)
    assert (found.unstable, found.spoiled) == (unstable, spoiled)
    assert any(reason.startswith("unstable") for reason in found.reasons) == unstable


def test_unfinished() -> None:
    left = [*SERVED[:-1], replace(SERVED[-1], status="cancelled")]
    assert reasons(left) == ["unstable: 1 of 24 requests unfinished at the drain limit"]


def test_aborted() -> None:
    assert reasons(aborted=True) == ["interrupted"]
    refused = [record(i, None, status="http_error", http_status=400, error="HTTP 400: no") for i in range(3)]
    assert reasons(refused, aborted=True) == ["stopped: HTTP 400: no"]


@pytest.mark.parametrize(
    "status", ["http_error", "connect_error", "stream_error", "timeout", "incomplete", "cancelled"]
)
def test_a_failed_request_has_an_infinite_ttft_even_after_its_first_token(status: str) -> None:
    assert ttft_s(record(0, 0.5)) == 0.5
    assert ttft_s(record(0, 0.5, status=status)) == math.inf


def test_ttft_counts_from_the_due_time() -> None:
    assert ttft_s(record(3, 0.5, dispatched_s=3.4)) == 0.5


def test_backlog_slope() -> None:
    """Nothing ever ends: one more in flight a second. Then: each ends before the next begins."""
    growing = [replace(record(index), done_s=None) for index in range(10)]
    assert backlog_slope_rps(growing) == pytest.approx(1.0)
    assert backlog_slope_rps(SERVED) == pytest.approx(0.0)
    assert backlog_slope_rps([]) is None
