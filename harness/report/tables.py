# SPDX-License-Identifier: Apache-2.0
"""The tables of a run, as Markdown and HTML. Pure functions of summary.json."""

from collections.abc import Iterable, Mapping
from typing import Any

from harness.calibrate import error_bar
from harness.report.pair_tables import (
    LAUNCH_NOTE,
    LAUNCH_TITLE,
    PAIRED_NOTE,
    launch_table,
    noise_table,
    paired_table,
)
from harness.report.table import LIMITS, Table, between_text, number_text
from harness.report.verdict import findings, other_tokens


def markdown_report(summary: Mapping[str, Any]) -> str:
    """Verdict, headline, cells, engines and paired differences, with the definitions beside the numbers."""
    sections = ["# Result", basis(summary)]
    sections += ["\n".join(f"- {finding.text}" for finding in findings(summary))]
    if not refused(summary):
        sections += [headline_table(summary).markdown(), headline_note(summary)]
    sections += ["## Cells", cell_table(summary).markdown(), "## Engines", engine_table(summary).markdown()]
    if summary["limit_rules"]:
        sections += ["## Limits by rule", rule_table(summary).markdown()]
    if summary["paired"]:
        sections += ["## Paired differences", paired_table(summary).markdown(), PAIRED_NOTE]
    if (alone := launch_table(summary)).rows:
        sections += [f"## {LAUNCH_TITLE}", alone.markdown(), LAUNCH_NOTE]
    if summary["noise_floor"]:
        sections += ["## Noise floor: launches of the same arm", noise_table(summary).markdown()]
    sections += [_parity_note(summary["parity"]), client_note(summary)]
    sections += [f"Note: {note}" for note in summary["notes"]]
    return "\n\n".join(sections) + "\n"


def basis(summary: Mapping[str, Any]) -> str:
    """What every number below rests on."""
    limits = ", ".join(f"source {name} s applied as {summary['limits'][name]:.4g} s" for name in LIMITS)
    factor = summary["arrived_over_offered"]
    arrivals = (
        "" if factor is None else f" Its requests arrive at {factor:.3g} times the offered rate (as drawn)."
    )
    left = ""
    if "timeouts" in summary:
        left = (
            f", and so is one unfinished {summary['timeouts']['drain_s']:g} s after the cell's last was due"
        )
    return (
        f"Scale {summary['scale']:g}, trace {summary['trace_sha256'][:12]}.{arrivals} Limits on TTFT: {limits} "
        f"({summary['limits_rule']}). TTFT counts from the time at which the request was due; a failed "
        f"request is a miss{left}. {_client_rule(summary)}"
    )


def client_note(summary: Mapping[str, Any]) -> str:
    """The harness's own error bar."""
    point = summary["client_calibration"]
    return error_bar(point) if point else "The client's own error was not measured in this run."


def refused(summary: Mapping[str, Any]) -> bool:
    """Whether the arms were not shown to compute the same, so that there is no headline."""
    return summary["parity"] is not None and not summary["parity"]["ok"]


def headline_table(summary: Mapping[str, Any]) -> Table:
    """The source's own form: one line an arm."""
    applied = summary["limits"]
    head = ["arm", "topology", "fixed-cohort P50 TTFT"]
    same = applied == summary["limits_source"]
    scaled = {name: "" if same else f" (applied {applied[name]:.3g} s)" for name in LIMITS}
    head += [f"highest passing QPS, {name} s{scaled[name]}" for name in LIMITS]
    head += [f"first {name} s miss{scaled[name]}" for name in LIMITS]
    busiest = summary["arms"][0]["at_load"]["offered_qps"] if summary["arms"] else None
    at = "" if busiest is None else f" at {busiest:g} QPS"
    head += [f"P50 per later token{at}", f"P50 whole answer{at}", "KV tokens"]
    unstable = any(arm["first_unstable_qps"] is not None for arm in summary["arms"])
    rows = [
        [
            arm["name"],
            topology_text(arm["topology"]),
            _seconds(arm["fixed_cohort"]["ttft_p50_s"]),
            *(_passing(arm["highest_passing_qps"][name], arm["first_failing_qps"][name]) for name in LIMITS),
            *(_first_miss(arm, name) for name in LIMITS),
            number_text(arm["at_load"]["tpot_p50_s"], ".1f", 1e3, " ms"),
            _seconds(arm["at_load"]["answer_p50_s"]),
            "unknown" if arm["kv_tokens"] is None else f"{arm['kv_tokens']:,}",
            *([_rate(arm["first_unstable_qps"])] if unstable else []),
        ]
        for arm in summary["arms"]
    ]
    return Table(head + (["unstable from QPS"] if unstable else []), rows)


def cell_table(summary: Mapping[str, Any]) -> Table:
    """One line a cell: load, TTFT, what follows it, misses, and whether it counts."""
    head = ["arm", "QPS", "arrived QPS", "repeat", "launch", "n", "failed", "resent", "achieved QPS"]
    head += ["P50 TTFT s", "P90 s", "P99 s", "P50 per later token ms", "P50 answer s"]
    head += [f"miss {name} s" for name in LIMITS]
    head += ["slip P99 ms", "backlog /s", "counts"]
    rows = [
        [
            arm["name"],
            f"{cell['offered_qps']:g}",
            number_text(cell["arrived_qps"], ".3g"),
            str(cell["repeat"]),
            cell["launch"],
            str(cell["n"]),
            str(cell["failed"]),
            str(cell["resent"]),
            number_text(cell["achieved_qps"], ".3f"),
            *(percentile_text(cell, percent) for percent in (50, 90, 99)),
            number_text(cell["tpot_s"]["p50"], ".1f", 1e3),
            number_text(cell["answer_s"]["p50"], ".3f"),
            *(f"{cell['miss'][name]:.1%}" for name in LIMITS),
            number_text(cell["slip_p99_ms"], ".2f"),
            number_text(cell["backlog_slope_rps"], "+.3f"),
            "yes" if cell["valid"] else "no: " + "; ".join(cell["invalid_reasons"]),
        ]
        for arm, cell in each_cell(summary)
    ]
    return Table(head, rows, _flagged(summary))


INTERVAL_NOTE = (
    "Requests that wait in one queue are alike, so n of them tell no more than the independent ones of the column "
    "beside it, of which the intervals are made: percentiles by order statistics, shares by Clopper and Pearson. They "
    "say what other requests of this kind would have met; whether arms differ is judged request by request, above."
)


def interval_table(summary: Mapping[str, Any]) -> Table:
    """95 % intervals of each cell; see `INTERVAL_NOTE`."""
    head = ["arm", "QPS", "repeat", "n", "independent", "P50 s", "P90 s", "P50 from send s"]
    head += [f"miss {name} s" for name in LIMITS]
    rows = [
        [
            arm["name"],
            f"{cell['offered_qps']:g}",
            str(cell["repeat"]),
            str(cell["n"]),
            f"{cell['independent_requests']:.1f}",
            *(_interval(cell, name) for name in ("p50", "p90")),
            number_text(cell["ttft_from_send_s"]["p50"], ".3f"),
            *(between_text(cell["miss_interval"][name], ".1%") for name in LIMITS),
        ]
        for arm, cell in each_cell(summary)
    ]
    return Table(head, rows, _flagged(summary))


def engine_table(summary: Mapping[str, Any]) -> Table:
    """What bound each cell: KV usage, requests waiting and for what (see kv_waits.py), preemptions, prefix hits."""
    head = ["arm", "QPS", "repeat", "running max", "waiting max", "waiting to be scheduled, mean", "max"]
    head += ["KV usage max", "preemptions", "prefix hits", "waiting for KV / otherwise, of samples"]
    columns = ("running_max", "waiting_max", "waiting_capacity_mean", "waiting_capacity_max", "kv_usage_max")
    counters = ("preemptions_delta", "prefix_hits_delta")
    rows = [
        [arm["name"], f"{cell['offered_qps']:g}", str(cell["repeat"])]
        + [number_text(cell["metrics"].get(name), ".3g") for name in columns + counters]
        + [_kv_waits(cell["kv_waits"])]
        for arm, cell in each_cell(summary)
    ]
    return Table(head, rows, _flagged(summary))


def _kv_waits(waits: Mapping[str, int] | None) -> str:
    if waits is None:
        return "unknown"
    return f"{waits['kv']} / {waits['waiting'] - waits['kv']} of {waits['samples']}"


def rule_table(summary: Mapping[str, Any]) -> Table:
    """Highest passing and first failing rate of each further limit."""
    rows = [
        [
            text,
            arm["name"],
            _passing(arm["rules"][name]["highest_passing_qps"], arm["rules"][name]["first_failing_qps"]),
            _rate(arm["rules"][name]["first_failing_qps"]),
        ]
        for name, text in summary["limit_rules"].items()
        for arm in summary["arms"]
    ]
    return Table(["limit", "arm", "highest passing QPS", "first failing QPS"], rows)


def topology_text(topology: Mapping[str, int] | None) -> str:
    """`TP2 DCP2`; sizes of 1 are left out, except that TP is always named."""
    if topology is None:
        return "unknown"
    parts = [f"TP{topology['tp']}"]
    parts += [f"{name.upper()}{topology[name]}" for name in ("dcp", "ep") if topology[name] > 1]
    if topology["nodes"] > 1:
        parts.append(f"{topology['nodes']} nodes")
    return " ".join(parts)


def percentile_text(cell: Mapping[str, Any], percent: int) -> str:
    """A percentile in seconds, or why there is none."""
    value: float | None = cell["ttft_s"][f"p{percent}"]
    if value is not None:
        return f"{value:.3f}"
    if cell.get("unstable"):
        return "unstable"
    if (bound := cell.get("ttft_at_least_s", {}).get(f"p{percent}")) is not None:
        return f">= {bound:.3f}"
    return "n too small" if percent > 50 and cell["n"] * (100 - percent) < 200 else "failures"


def each_cell(summary: Mapping[str, Any]) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return ((arm, cell) for arm in summary["arms"] for cell in arm["cells"])


def _client_rule(summary: Mapping[str, Any]) -> str:
    """One sentence; where arms of two runs stand together and differ in it, one for each kind."""
    shared = {arm["name"]: arm["shared_cores"] for arm in summary["arms"]}
    kinds = sorted({*shared.values()}) or [summary["shared_cores"]]
    sentences = []
    for kind in kinds:
        of = f" of {', '.join(name for name in shared if shared[name] == kind)}" if len(kinds) > 1 else ""
        bound = "max(50 ms, 5 %)" if kind else "max(10 ms, 1 %)"
        where = "shares its cores with the engine" if kind else "has its own cores"
        sentences.append(
            f"The client{of} {where}: its slip and loop lag P99 must stay under {bound} of the median TTFT."
        )
    return " ".join(sentences)


def headline_note(summary: Mapping[str, Any]) -> str:
    """What the headline's medians are of, and how noisy the time per later token is."""
    if not summary["arms"]:
        return "No arm was measured."
    cohort = summary["arms"][0]["fixed_cohort"]
    if cohort["offered_qps"] is None:
        return f"Fixed cohort {cohort['name']}: no offered rate has valid cells in every measured arm."
    counts = {arm["name"]: arm["fixed_cohort"]["n"] for arm in summary["arms"] if arm["cells"]}
    same = len({*counts.values()}) == 1
    n = str(cohort["n"]) if same else ", ".join(f"{count} of {name}" for name, count in counts.items())
    one = "; it is one request, no P50 of several" if cohort["requests"] == 1 else ""
    return (
        f"Fixed cohort: cohort {cohort['name']} of the trace (n = {n}, repeats pooled{one}) at "
        f"{cohort['offered_qps']:g} QPS, the lowest offered rate whose cells are valid in every measured arm."
        " Later tokens and whole answers: medians over all requests at the highest such rate, not paired;"
        f" paired differences stand below. {_tpot_note(summary['tpot_scatter'])}"
    )


def _tpot_note(scatter: Mapping[str, Any] | None) -> str:
    if scatter is None:
        return (
            "How far chance moves the time per later token is not known (no arm was measured twice at this rate):"
            " no difference in it is resolved."
        )
    return (
        f"The time per later token is noisy: one request ({scatter['id']}) took {1e3 * scatter['low_s']:.2f} and"
        f" {1e3 * scatter['high_s']:.2f} ms in cells of the same arm ({scatter['arm']}) at this rate; arms that differ"
        " by less are not told apart by it."
    )


def _parity_note(parity: Mapping[str, Any] | None) -> str:
    if parity is None:
        return "Parity: not checked."
    if parity["ok"]:
        return f"Parity: passed, {parity['compared']} compared, {other_tokens(parity)}."
    return f"Parity: FAILED, {parity['compared']} compared, {len(parity['diverged'])} diverged."


def _flagged(summary: Mapping[str, Any]) -> frozenset[int]:
    return frozenset(index for index, (_, cell) in enumerate(each_cell(summary)) if not cell["valid"])


def _interval(cell: Mapping[str, Any], percent: str) -> str:
    interval = cell["ttft_interval_s"][percent]
    return between_text(interval, ".3f") if interval else str(cell["ttft_no_interval"][percent])


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _passing(passed: float | None, failing: float | None) -> str:
    """A highest passing rate; `>=` where no higher one was shown not to pass."""
    if passed is None:
        return "unknown" if failing is None else "none"
    return f"{'>= ' if failing is None else ''}{passed:g}"


def _first_miss(arm: Mapping[str, Any], limit: str) -> str:
    """Of the cells that count; one that did not pass for being unstable is named."""
    missed, failing = arm["first_miss_qps"][limit], arm["first_failing_qps"][limit]
    return f"none, unstable at {failing:g}" if missed is None and failing is not None else _rate(missed)


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
