# SPDX-License-Identifier: Apache-2.0
"""The tables of a run, as Markdown and as CSV. Pure functions of summary.json."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LIMITS = ("15", "25")


def markdown_report(summary: Mapping[str, Any]) -> str:
    """Headline, cells, engines and paired differences, with the definitions beside the numbers."""
    limits = ", ".join(f"source {name} s applied as {summary['limits'][name]:.4g} s" for name in LIMITS)
    sections = [
        "# Result",
        f"Scale {summary['scale']:g}, trace {summary['trace_sha256'][:12]}. Limits on TTFT: {limits} "
        f"({summary['limits_rule']}). TTFT counts from the time at which the request was due; a failed "
        "request is a miss. " + _client_rule(summary["shared_cores"]),
        _headline(summary),
        _fixed_cohort_note(summary),
        "## Cells",
        cell_table(summary),
        "## Engines",
        engine_table(summary),
    ]
    if summary["paired"]:
        sections += ["## Paired differences in TTFT", paired_table(summary)]
    sections.append(_parity_note(summary["parity"]))
    sections += [f"Note: {note}" for note in summary["notes"]]
    return "\n\n".join(sections) + "\n"


def _headline(summary: Mapping[str, Any]) -> str:
    parity = summary["parity"]
    if parity is None or parity["ok"]:
        return headline_table(summary)
    return f"**{parity['refusal']}**\n\nNothing below is a result of this pair: its arms do not compute the same."


def headline_table(summary: Mapping[str, Any]) -> str:
    """The source's own form: one line an arm."""
    applied = summary["limits"]
    head = ["arm", "topology", "fixed-cohort P50 TTFT"]
    head += [f"highest passing QPS, {name} s (applied {applied[name]:.3g} s)" for name in LIMITS]
    head += [f"first {name} s miss (applied {applied[name]:.3g} s)" for name in LIMITS]
    head += ["KV tokens"]
    rows = [
        [
            arm["name"],
            topology_text(arm["topology"]),
            _seconds(arm["fixed_cohort"]["ttft_p50_s"]),
            *(_rate(arm["highest_passing_qps"][name]) for name in LIMITS),
            *(_rate(arm["first_miss_qps"][name]) for name in LIMITS),
            "unknown" if arm["kv_tokens"] is None else f"{arm['kv_tokens']:,}",
        ]
        for arm in summary["arms"]
    ]
    return _markdown(head, rows)


def cell_table(summary: Mapping[str, Any]) -> str:
    """One line a cell: load, TTFT, misses, and whether it counts."""
    head = ["arm", "QPS", "repeat", "n", "failed", "achieved QPS", "P50 s", "P90 s", "P99 s"]
    head += [f"miss {name} s" for name in LIMITS]
    head += ["slip P99 ms", "backlog /s", "counts"]
    rows = [
        [
            arm["name"],
            f"{cell['offered_qps']:g}",
            str(cell["repeat"]),
            str(cell["n"]),
            str(cell["failed"]),
            _number(cell["achieved_qps"], ".3f"),
            *(percentile_text(cell, percent) for percent in (50, 90, 99)),
            *(f"{cell['miss'][name]:.1%}" for name in LIMITS),
            _number(cell["slip_p99_ms"], ".2f"),
            _number(cell["backlog_slope_rps"], "+.3f"),
            "yes" if cell["valid"] else "no: " + "; ".join(cell["invalid_reasons"]),
        ]
        for arm, cell in _cells(summary)
    ]
    return _markdown(head, rows)


def engine_table(summary: Mapping[str, Any]) -> str:
    """What bound each cell: KV usage, requests waiting, preemptions, prefix hits."""
    head = ["arm", "QPS", "repeat", "running max", "waiting max", "waiting for KV capacity, mean", "max"]
    head += ["KV usage max", "preemptions", "prefix hits"]
    columns = ("running_max", "waiting_max", "waiting_capacity_mean", "waiting_capacity_max", "kv_usage_max")
    counters = ("preemptions_delta", "prefix_hits_delta")
    rows = [
        [arm["name"], f"{cell['offered_qps']:g}", str(cell["repeat"])]
        + [_number(cell["metrics"][name], ".3g") for name in columns + counters]
        for arm, cell in _cells(summary)
    ]
    return _markdown(head, rows)


def paired_table(summary: Mapping[str, Any]) -> str:
    """Median difference of the same request's TTFT, the later arm minus the first."""
    head = ["difference", "QPS", "pairs", "median TTFT difference s"]
    rows = [
        [
            f"{pair['arms'][1]} - {pair['arms'][0]}",
            f"{pair['offered_qps']:g}",
            str(pair["n"]),
            _number(pair["ttft_delta_p50_s"], "+.4f"),
        ]
        for pair in summary["paired"]
    ]
    return _markdown(head, rows)


def cells_csv(summary: Mapping[str, Any]) -> str:
    """One line a cell for a spreadsheet; empty where there is no number."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    metrics = ["running_max", "waiting_max", "waiting_capacity_mean", "waiting_capacity_max", "kv_usage_max"]
    metrics += ["preemptions_delta"]
    writer.writerow(
        [
            "arm",
            "offered_qps",
            "repeat",
            "n",
            "failed",
            "achieved_qps",
            "ttft_p50_s",
            "ttft_p90_s",
            "ttft_p99_s",
        ]
        + [f"miss_{name}" for name in LIMITS]
        + ["slip_p99_ms", "loop_lag_p99_ms", "backlog_slope_rps", *metrics, "valid", "invalid_reasons"]
    )
    for arm, cell in _cells(summary):
        writer.writerow(
            [
                arm["name"],
                cell["offered_qps"],
                cell["repeat"],
                cell["n"],
                cell["failed"],
                cell["achieved_qps"],
            ]
            + [cell["ttft_s"][f"p{percent}"] for percent in (50, 90, 99)]
            + [cell["miss"][name] for name in LIMITS]
            + [cell["slip_p99_ms"], cell["loop_lag_p99_ms"], cell["backlog_slope_rps"]]
            + [cell["metrics"][name] for name in metrics]
            + [str(cell["valid"]).lower(), "; ".join(cell["invalid_reasons"])]
        )
    return out.getvalue()


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
    return "n too small" if percent > 50 and cell["n"] * (100 - percent) < 200 else "failures"


def _cells(summary: Mapping[str, Any]) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return ((arm, cell) for arm in summary["arms"] for cell in arm["cells"])


def _client_rule(shared_cores: bool) -> str:
    bound = "max(50 ms, 5 %)" if shared_cores else "max(10 ms, 1 %)"
    where = "shares its cores with the engine" if shared_cores else "has its own cores"
    return f"The client {where}: its slip and loop lag P99 must stay under {bound} of the median TTFT."


def _fixed_cohort_note(summary: Mapping[str, Any]) -> str:
    if not summary["arms"]:
        return "No arm was measured."
    cohort = summary["arms"][0]["fixed_cohort"]
    if cohort["offered_qps"] is None:
        return f"Fixed cohort {cohort['name']}: no offered rate has valid cells in every arm."
    return (
        f"Fixed cohort: cohort {cohort['name']} of the trace (n = {cohort['n']}, repeats pooled) at "
        f"{cohort['offered_qps']:g} QPS, the lowest offered rate whose cells are valid in every arm."
    )


def _parity_note(parity: Mapping[str, Any] | None) -> str:
    if parity is None:
        return "Parity: not checked."
    verdict = "passed" if parity["ok"] else "FAILED"
    return f"Parity: {verdict}, {parity['compared']} compared, {len(parity['diverged'])} diverged."


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up on a terminal."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
