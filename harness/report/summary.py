# SPDX-License-Identifier: Apache-2.0
"""summary.json: every verdict of a run, as pure functions of its manifest and its recorded cells."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.client import OK, RequestRecord
from harness.sla import CellVerdict, first_miss, highest_passing, misses
from harness.stats import order_statistic, paired_delta, percentile
from harness.store import Cell
from harness.validity import Evidence, backlog_slope_rps, invalid_reasons, slip_limit_s, slip_s, ttft_s

SCHEMA = 1


def build_summary(manifest: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """The whole of summary.json; see the documentation of each part below."""
    shared_cores = manifest["shared_cores"]
    limits: dict[str, float] = manifest["limits"]["applied"]
    names = [arm["name"] for arm in manifest["arms"]]
    judged = {cell.key: summarise_cell(cell, limits, shared_cores) for cell in cells}
    valid = [cell for cell in cells if judged[cell.key]["valid"]]
    cohort_rate = _fixed_cohort_rate(names, cells, valid)
    return {
        "schema": SCHEMA,
        "trace_sha256": manifest["trace"]["sha256"],
        "scale": manifest["scale"],
        "limits": limits,
        "limits_source": manifest["limits"]["source"],
        "limits_rule": manifest["limits"]["rule"],
        "shared_cores": shared_cores,
        "arms": [
            {
                "name": arm["name"],
                "topology": arm["topology"],
                "kv_tokens": arm["kv_tokens"],
                "kv_bytes": arm["kv_bytes"],
                **_rate_verdicts([judged[cell.key] for cell in cells if cell.key.arm == arm["name"]], limits),
                "fixed_cohort": _fixed_cohort(manifest["fixed_cohort"], cohort_rate, arm["name"], valid),
                "cells": [judged[cell.key] for cell in cells if cell.key.arm == arm["name"]],
            }
            for arm in manifest["arms"]
        ],
        "paired": [
            pair
            for rate in sorted({cell.key.offered_qps for cell in valid})
            for other in names[1:]
            if (pair := _pair(names[0], other, rate, valid))
        ],
        "parity": manifest.get("parity"),
        "notes": manifest["notes"],
    }


def summarise_cell(cell: Cell, limits: Mapping[str, float], shared_cores: bool) -> dict[str, Any]:
    """One cell's numbers. Percentiles of TTFT are null where n is too small or they fall on a failure."""
    records, lag_ms = cell.records, cell.facts["loop_lag_ms"]["p99"]
    ttft = [ttft_s(record) for record in records]
    slip = slip_s(records)
    evidence = Evidence(
        records=records,
        loop_lag_p99_s=None if lag_ms is None else lag_ms / 1e3,
        metrics=cell.facts["metrics"],
        aborted=cell.facts["aborted"],
        shared_cores=shared_cores,
    )
    reasons = invalid_reasons(evidence)
    return {
        "offered_qps": cell.key.offered_qps,
        "repeat": cell.key.repeat,
        "valid": not reasons,
        "invalid_reasons": reasons,
        "n": len(records),
        "failed": sum(record.status != OK for record in records),
        "achieved_qps": achieved_qps(records),
        "ttft_s": {f"p{percent}": percentile(ttft, percent) for percent in (50, 90, 99)},
        "ttft_split_p50_s": _ttft_split(records),
        "miss": {name: misses(ttft, limit) / len(ttft) for name, limit in limits.items()},
        "slip_p99_ms": 1e3 * order_statistic(slip, 99) if slip else None,
        "slip_limit_ms": 1e3 * slip_limit_s(order_statistic(ttft, 50), shared_cores),
        "loop_lag_p99_ms": lag_ms,
        "backlog_slope_rps": backlog_slope_rps(records),
        "metrics": cell.facts["metrics"],
    }


def achieved_qps(records: Sequence[RequestRecord]) -> float | None:
    """Requests that succeeded over the time from the first due time to the end of the last of them."""
    ended = [record.done_s for record in records if record.status == OK and record.done_s is not None]
    if not ended:
        return None
    return len(ended) / (max(ended) - min(record.due_s for record in records))


def _ttft_split(records: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Medians over the successful requests of the three parts of a TTFT; their sum is not the median TTFT."""
    timelines = [
        (r.dispatched_s - r.due_s, r.sent_s - r.dispatched_s, r.first_token_s - r.sent_s)
        for r in records
        if r.status == OK
        and r.dispatched_s is not None
        and r.sent_s is not None
        and r.first_token_s is not None
    ]
    return {
        name: percentile([parts[index] for parts in timelines], 50)
        for index, name in enumerate(("slip", "connect_upload", "server"))
    }


def _rate_verdicts(judged: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> dict[str, Any]:
    verdicts = {
        name: [
            CellVerdict(cell["offered_qps"], cell["valid"], round(cell["miss"][name] * cell["n"]))
            for cell in judged
        ]
        for name in limits
    }
    return {
        "highest_passing_qps": {name: highest_passing(cells) for name, cells in verdicts.items()},
        "first_miss_qps": {name: first_miss(cells) for name, cells in verdicts.items()},
    }


def _fixed_cohort_rate(arms: Sequence[str], cells: Sequence[Cell], valid: Sequence[Cell]) -> float | None:
    """The lowest offered rate whose cells are valid in every arm, all repeats included."""
    for rate in sorted({cell.key.offered_qps for cell in cells}):
        tested = [cell.key for cell in cells if cell.key.offered_qps == rate]
        good = [cell.key for cell in valid if cell.key.offered_qps == rate]
        if tested == good and {key.arm for key in good} == set(arms):
            return rate
    return None


def _fixed_cohort(cohort: int, rate: float | None, arm: str, valid: Sequence[Cell]) -> dict[str, Any]:
    """P50 TTFT over one named cohort at one rate, the same in every arm, repeats pooled."""
    ttft = [
        ttft_s(record)
        for cell in valid
        if cell.key.arm == arm and cell.key.offered_qps == rate
        for record in cell.records
        if record.cohort == cohort
    ]
    return {"name": str(cohort), "n": len(ttft), "ttft_p50_s": percentile(ttft, 50), "offered_qps": rate}


def _pair(first: str, other: str, rate: float, valid: Sequence[Cell]) -> dict[str, Any] | None:
    """TTFT differences of the same request, other - first; None where no repeat is valid in both arms."""
    deltas = paired_ttft(first, other, rate, valid)
    if not deltas:
        return None
    delta = paired_delta(
        {key: a for key, (_, a, _) in deltas.items()}, {key: b for key, (_, _, b) in deltas.items()}
    )
    return {"arms": [first, other], "offered_qps": rate, "n": delta.n, "ttft_delta_p50_s": delta.median_s}


def paired_ttft(
    first: str, other: str, rate: float, valid: Sequence[Cell]
) -> dict[tuple[int, str], tuple[int, float, float]]:
    """(repeat, id) -> (prompt tokens, TTFT in `first`, TTFT in `other`), of repeats valid in both arms."""
    by_arm = {
        arm: {
            (cell.key.repeat, record.id): record
            for cell in valid
            if cell.key.arm == arm and cell.key.offered_qps == rate
            for record in cell.records
        }
        for arm in (first, other)
    }
    return {
        key: (record.prompt_tokens, ttft_s(record), ttft_s(by_arm[other][key]))
        for key, record in by_arm[first].items()
        if key in by_arm[other]
    }


def finite(values: Sequence[float]) -> list[float]:
    """Without the failures."""
    return [value for value in values if math.isfinite(value)]
