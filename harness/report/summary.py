# SPDX-License-Identifier: Apache-2.0
"""summary.json: every verdict of a run, as pure functions of its manifest and its recorded cells."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness.checks import parity_of
from harness.client import CANCELLED, OK, RequestRecord
from harness.report.differences import (
    as_json,
    boundary_section,
    launch_of,
    noise_floors,
    paired_section,
)
from harness.report.kv_waits import kv_waits
from harness.report.notes import notes_of
from harness.report.scatter import answer_s, far_off, tpot_s, tpot_scatter
from harness.saturation import independent_requests
from harness.sla import CellVerdict, Rule, first_failing, first_miss, highest_passing, misses
from harness.stats import Interval, percentile, percentile_interval, quantile, share_interval, supports
from harness.store import Cell, CellKey
from harness.validity import (
    Evidence,
    backlog_growth,
    backlog_slope_rps,
    evidence_by_cell,
    judge,
    slip_limit_s,
    slip_s,
    ttft_s,
    unchecked,
    waited_s,
)

SCHEMA = 1
PERCENTS = (50, 90, 99)


def build_summary(manifest: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """The whole of summary.json; see docs/results.md and the documentation of each part below."""
    limits: dict[str, float] = manifest["limits"]["applied"]
    rules = [Rule(**rule) for rule in manifest["limits"].get("rules", ())]
    names = [arm["name"] for arm in manifest["arms"]]
    evidence = evidence_by_cell(manifest, cells)
    kv_tokens = {arm["name"]: arm["kv_tokens"] for arm in manifest["arms"]}
    judged = {
        cell.key: summarise_cell(cell, evidence[cell.key], limits, rules, kv_tokens.get(cell.key.arm))
        for cell in cells
    }
    valid = [cell for cell in cells if judged[cell.key]["valid"]]
    unstable_keys = {key for key, cell in judged.items() if cell["unstable"]}
    parity = parity_of(manifest, valid)
    comparable = (
        [] if parity and not parity["ok"] else names
    )  # arms that compute other things are not compared
    common = _common_rates(cells, valid)
    cohort_rate = common[0] if common else None
    told = [cell for cell in cells if judged[cell.key]["valid"] or judged[cell.key]["unstable"]]
    busiest = max(common or _common_rates(cells, told), default=None)
    return {
        "schema": SCHEMA,
        "trace_sha256": manifest["trace"]["sha256"],
        "workload": manifest["trace"].get("header", {}).get("generator", {}),
        "scale": manifest["scale"],
        "limits": limits,
        "limits_source": manifest["limits"]["source"],
        "limits_rule": manifest["limits"]["rule"],
        "limit_rules": {rule.name: str(rule) for rule in rules},
        "shared_cores": manifest["shared_cores"],
        "no_preemption": manifest.get("no_preemption", False),
        "arrived_over_offered": _arrived_over_offered(cells),
        "arms": [
            {
                "name": arm["name"],
                "topology": arm["topology"],
                "kv_tokens": arm["kv_tokens"],
                "kv_bytes": arm["kv_bytes"],
                "shared_cores": arm.get("declared", manifest)["shared_cores"],
                **_rate_verdicts([judged[cell.key] for cell in cells if cell.key.arm == arm["name"]], limits),
                "rules": _rule_verdicts(
                    [cell for cell in cells if cell.key.arm == arm["name"]], valid, unstable_keys, rules
                ),
                "launches": len({launch_of(cell) for cell in cells if cell.key.arm == arm["name"]}),
                "fixed_cohort": _fixed_cohort(manifest["fixed_cohort"], cohort_rate, arm["name"], valid),
                "at_load": _at_load(busiest, arm["name"], told, unstable_keys),
                "cells": [judged[cell.key] for cell in cells if cell.key.arm == arm["name"]],
            }
            for arm in manifest["arms"]
        ],
        "paired": paired_section(comparable, valid, limits),
        "other_lengths": _other_lengths(valid),
        "noise_floor": noise_floors(names, valid),
        "far_off": far_off(valid),
        "tpot_scatter": tpot_scatter(valid, busiest),
        "boundary_difference": boundary_section(comparable, cells, valid, limits, unstable_keys),
        "parity": parity,
        "left_out": manifest.get("left_out", {}),
        "ranks_share_cores": [arm["name"] for arm in manifest["arms"] if _ranks_share_cores(arm)],
        "client_calibration": manifest.get("client_calibration"),
        # Older runs did not record them.
        **({"timeouts": manifest["timeouts"]} if "timeouts" in manifest else {}),
        "notes": notes_of(manifest, cells),
    }


def _ranks_share_cores(arm: Mapping[str, Any]) -> bool:
    """Whether an engine without GPUs computed several ranks on one core, as vLLM was told to bind them."""
    environment = (arm["engine"] or {}).get("environment", {})
    cores = environment.get("VLLM_CPU_OMP_THREADS_BIND", "").split("|")
    return len(set(cores)) < len(cores)


def summarise_cell(
    cell: Cell,
    evidence: Evidence,
    limits: Mapping[str, float],
    rules: Sequence[Rule],
    kv_tokens: int | None = None,
) -> dict[str, Any]:
    """One cell's numbers.

    Percentiles of TTFT are null where n is too small, where they fall on a failure, and in an unstable cell:
    there TTFT depends on how long the cell lasted. `ttft_at_least_s` bounds those that fall on a request that
    was cancelled while it waited. Intervals count requests that waited for one another as fewer
    (`independent_requests`); where too few are left for one, `ttft_no_interval` says so.
    """
    records, lag_ms = cell.records, cell.facts["loop_lag_ms"]["p99"]
    ttft = [ttft_s(record) for record in records]
    slip = slip_s(records)
    verdict = judge(evidence)
    overloaded = verdict.unstable
    growth = backlog_growth(records)
    waits = kv_waits(cell.samples, records, kv_tokens)
    independent = independent_requests(records)
    intervals = {f"p{p}": _interval(ttft, p, independent, overloaded) for p in PERCENTS}
    return {
        "offered_qps": cell.key.offered_qps,
        "repeat": cell.key.repeat,
        "launch": launch_of(cell),
        "valid": verdict.valid,
        "unstable": overloaded,
        "invalid_reasons": list(verdict.reasons),
        "unchecked": unchecked(evidence),
        "n": len(records),
        "failed": sum(record.status != OK for record in records),
        "resent": sum(record.reconnects for record in records),
        "censored": sum(record.status == CANCELLED for record in records),
        "arrived_qps": arrived_qps(records),
        "achieved_qps": achieved_qps(records),
        "ttft_s": {f"p{p}": None if overloaded else percentile(ttft, p) for p in PERCENTS},
        "independent_requests": independent,
        "ttft_interval_s": {name: as_json(interval) for name, (interval, _) in intervals.items()},
        "ttft_no_interval": {name: reason for name, (_, reason) in intervals.items()},
        "ttft_at_least_s": _at_least(records, ttft),
        "ttft_from_send_s": {
            f"p{p}": None if overloaded else percentile(_from_send(records), p) for p in PERCENTS
        },
        "ttft_split_p50_s": _ttft_split(records),
        "tpot_s": {f"p{p}": percentile(_tpot(records), p) for p in PERCENTS},
        "answer_s": {
            f"p{p}": None if overloaded else percentile([*map(answer_s, records)], p) for p in PERCENTS
        },
        "miss": {name: misses(ttft, limit) / len(ttft) for name, limit in limits.items()},
        "miss_interval": {
            name: as_json(share_interval(misses(ttft, limit), len(ttft), independent))
            for name, limit in limits.items()
        },
        "rules": {
            rule.name: vars(rule.judge([t for r, t in zip(records, ttft, strict=True) if _covers(rule, r)]))
            for rule in rules
        },
        "slip_p99_ms": 1e3 * quantile(slip, 99) if slip else None,
        "slip_limit_ms": 1e3 * slip_limit_s(quantile(ttft, 50), evidence.shared_cores),
        "loop_lag_p99_ms": lag_ms,
        "backlog_slope_rps": backlog_slope_rps(records),
        "backlog_growth_per_arrival": growth.per_arrival if growth else None,
        "stability_known": growth is not None,
        "kv_waits": asdict(waits) if waits else None,
        "metrics": cell.facts["metrics"],
    }


def _interval(
    ttft: Sequence[float], percent: int, independent: float, overloaded: bool
) -> tuple[Interval | None, str | None]:
    """A percentile's interval, or why there is none."""
    if overloaded:
        return None, "unstable"
    if percentile_interval(ttft, percent) is None:
        return None, "n too small"
    if found := percentile_interval(ttft, percent, independent):
        return found, None
    return None, f"n too small: waiting for one another, {len(ttft)} requests count as {independent:.1f}"


def _at_least(records: Sequence[RequestRecord], ttft: Sequence[float]) -> dict[str, float]:
    """Right-censoring: where a percentile falls on a request that was still waiting, it is at least so long."""
    waited = [waited_s(record) for record in records]
    return {
        f"p{p}": bound
        for p in PERCENTS
        if supports(len(ttft), p) and percentile(ttft, p) is None
        if (bound := percentile(waited, p)) is not None
    }


def _from_send(records: Sequence[RequestRecord]) -> list[float]:
    """What a client that counts from its own send would report; failures infinite."""
    return [
        ttft_s(r) - (r.dispatched_s - r.due_s) if r.dispatched_s is not None else math.inf for r in records
    ]


def _tpot(records: Sequence[RequestRecord]) -> list[float]:
    """Of all that have one; see `tpot_s`."""
    return [value for record in records if (value := tpot_s(record)) is not None]


def _covers(rule: Rule, record: RequestRecord) -> bool:
    return rule.covers(record.prompt_tokens, record.limit_class)


def arrived_qps(records: Sequence[RequestRecord]) -> float | None:
    """The rate at which the requests were due: gaps over their span. None where there is no gap.

    A short trace that was drawn at random has a rate of its own, beside the one that it is offered at.
    """
    due_s = [record.due_s for record in records]
    span_s = max(due_s, default=0.0) - min(due_s, default=0.0)
    return (len(due_s) - 1) / span_s if span_s > 0 else None


def _arrived_over_offered(cells: Sequence[Cell]) -> float | None:
    """The trace's own rate over the nominal one, the same in every cell."""
    rate = arrived_qps(cells[0].records) if cells else None
    return None if rate is None else float(f"{rate / cells[0].key.offered_qps:.4g}")


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
            CellVerdict(
                cell["offered_qps"], cell["valid"], round(cell["miss"][name] * cell["n"]), cell["unstable"]
            )
            for cell in judged
        ]
        for name in limits
    }
    return {
        "highest_passing_qps": {name: highest_passing(cells) for name, cells in verdicts.items()},
        "first_miss_qps": {name: first_miss(cells) for name, cells in verdicts.items()},
        "first_failing_qps": {name: first_failing(cells) for name, cells in verdicts.items()},
        "first_unstable_qps": min((cell["offered_qps"] for cell in judged if cell["unstable"]), default=None),
    }


def _rule_verdicts(
    cells: Sequence[Cell], valid: Sequence[Cell], unstable_keys: Collection[CellKey], rules: Sequence[Rule]
) -> dict[str, dict[str, float | None]]:
    """Highest passing and first failing rate of each rule, over all repeats of a rate together.

    A rate whose requests are too few to tell neither passes nor fails.
    """
    counted = {cell.key for cell in valid}
    rates = sorted({cell.key.offered_qps for cell in cells})
    found = {}
    for rule in rules:
        verdicts = []
        for rate in rates:
            mine = [cell for cell in cells if cell.key.offered_qps == rate]
            ttft = [ttft_s(r) for cell in mine for r in cell.records if _covers(rule, r)]
            verdict = rule.judge(ttft, repeats=len(mine))
            known = all(cell.key in counted for cell in mine) and verdict.holds is not None
            overloaded = any(cell.key in unstable_keys for cell in mine)
            verdicts.append(CellVerdict(rate, known, 0 if verdict.holds else verdict.misses, overloaded))
        found[rule.name] = {
            "highest_passing_qps": highest_passing(verdicts),
            "first_miss_qps": first_miss(verdicts),
            "first_failing_qps": first_failing(verdicts),
        }
    return found


def _other_lengths(valid: Sequence[Cell]) -> int:
    """How many requests of the trace were answered with different numbers of tokens, in any two cells."""
    lengths: dict[str, set[int]] = {}
    for cell in valid:
        for r in cell.records:
            if r.status == OK:
                lengths.setdefault(r.id, set()).add(r.completion_tokens)
    return sum(len(found) > 1 for found in lengths.values())


def _common_rates(cells: Sequence[Cell], valid: Sequence[Cell]) -> list[float]:
    """Upward: the offered rates whose cells are valid in every arm that was measured, all repeats included."""
    arms = {cell.key.arm for cell in cells}
    found = []
    for rate in sorted({cell.key.offered_qps for cell in cells}):
        tested = {cell.key for cell in cells if cell.key.offered_qps == rate}
        good = {cell.key for cell in valid if cell.key.offered_qps == rate}
        if tested == good and {key.arm for key in good} == arms:
            found.append(rate)
    return found


def _at_load(
    rate: float | None, arm: str, told: Sequence[Cell], unstable_keys: Collection[CellKey]
) -> dict[str, Any]:
    """What follows the first token, at the highest rate that is valid in every arm, repeats pooled.

    Where no rate is, at the highest that is valid or unstable in each; an answer's time then is null where it
    depends on how long the cell lasted.
    """
    mine = [cell for cell in told if cell.key.arm == arm and cell.key.offered_qps == rate]
    records = [record for cell in mine for record in cell.records]
    overloaded = any(cell.key in unstable_keys for cell in mine)
    return {
        "offered_qps": rate,
        "n": len(records),
        "unstable": overloaded,
        "tpot_p50_s": percentile(_tpot(records), 50),
        "answer_p50_s": None if overloaded else percentile([*map(answer_s, records)], 50),
    }


def _fixed_cohort(cohort: int, rate: float | None, arm: str, valid: Sequence[Cell]) -> dict[str, Any]:
    """P50 TTFT over one named cohort at one rate, the same in every arm, repeats pooled."""
    records = [
        record
        for cell in valid
        if cell.key.arm == arm and cell.key.offered_qps == rate
        for record in cell.records
        if record.cohort == cohort
    ]
    return {
        "name": str(cohort),
        "n": len(records),
        "requests": len({record.id for record in records}),
        "ttft_p50_s": percentile([*map(ttft_s, records)], 50),
        "offered_qps": rate,
    }
