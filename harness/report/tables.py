# SPDX-License-Identifier: Apache-2.0
"""The tables of a run, as Markdown and HTML. Pure functions of summary.json."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.calibrate import error_bar
from harness.report.verdict import findings, other_tokens

LIMITS = ("15", "25")


@dataclass(frozen=True)
class Table:
    """Cells as text. `flagged` are the rows that do not count."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    flagged: frozenset[int] = frozenset()

    def markdown(self) -> str:
        """Columns also line up on a terminal."""
        widths = [max(len(row[i]) for row in (self.head, *self.rows)) for i in range(len(self.head))]
        lines = [self.head, ["-" * width for width in widths], *self.rows]
        return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)

    def html(self) -> str:
        """In a frame that scrolls where the screen is narrow; the first column names the row."""
        head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in self.head)
        body = []
        for index, (first, *rest) in enumerate(self.rows):
            cells = "".join(
                f'<td data-label="{html.escape(name)}">{html.escape(cell)}</td>'
                for name, cell in zip(self.head[1:], rest, strict=True)
            )
            flag = ' class="flagged"' if index in self.flagged else ""
            body.append(f'<tr{flag}><th scope="row">{html.escape(first)}</th>{cells}</tr>')
        return (
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{''.join(body)}</tbody></table></div>"
        )


def markdown_report(summary: Mapping[str, Any]) -> str:
    """Verdict, headline, cells, engines and paired differences, with the definitions beside the numbers."""
    sections = ["# Result", basis(summary)]
    sections += ["\n".join(f"- {finding.text}" for finding in findings(summary))]
    if not refused(summary):
        sections += [headline_table(summary).markdown(), fixed_cohort_note(summary)]
    sections += ["## Cells", cell_table(summary).markdown(), "## Engines", engine_table(summary).markdown()]
    if summary["limit_rules"]:
        sections += ["## Limits by rule", rule_table(summary).markdown()]
    if summary["paired"]:
        sections += ["## Paired differences in TTFT", paired_table(summary).markdown(), PAIRED_NOTE]
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
            _number(arm["at_load"]["tpot_p50_s"], ".1f", 1e3, " ms"),
            _seconds(arm["at_load"]["answer_p50_s"]),
            "unknown" if arm["kv_tokens"] is None else f"{arm['kv_tokens']:,}",
            *([_rate(arm["first_unstable_qps"])] if unstable else []),
        ]
        for arm in summary["arms"]
    ]
    return Table(head + (["unstable from QPS"] if unstable else []), rows)


def cell_table(summary: Mapping[str, Any]) -> Table:
    """One line a cell: load, TTFT, what follows it, misses, and whether it counts."""
    head = ["arm", "QPS", "arrived QPS", "repeat", "n", "failed", "resent", "achieved QPS"]
    head += ["P50 TTFT s", "P90 s", "P99 s", "P50 per later token ms", "P50 answer s"]
    head += [f"miss {name} s" for name in LIMITS]
    head += ["slip P99 ms", "backlog /s", "counts"]
    rows = [
        [
            arm["name"],
            f"{cell['offered_qps']:g}",
            _number(cell["arrived_qps"], ".3g"),
            str(cell["repeat"]),
            str(cell["n"]),
            str(cell["failed"]),
            str(cell["resent"]),
            _number(cell["achieved_qps"], ".3f"),
            *(percentile_text(cell, percent) for percent in (50, 90, 99)),
            _number(cell["tpot_s"]["p50"], ".1f", 1e3),
            _number(cell["answer_s"]["p50"], ".3f"),
            *(f"{cell['miss'][name]:.1%}" for name in LIMITS),
            _number(cell["slip_p99_ms"], ".2f"),
            _number(cell["backlog_slope_rps"], "+.3f"),
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
            _number(cell["ttft_from_send_s"]["p50"], ".3f"),
            *(_between(cell["miss_interval"][name], ".1%") for name in LIMITS),
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
        + [_number(cell["metrics"].get(name), ".3g") for name in columns + counters]
        + [_kv_waits(cell["kv_waits"])]
        for arm, cell in each_cell(summary)
    ]
    return Table(head, rows, _flagged(summary))


def _kv_waits(waits: Mapping[str, int] | None) -> str:
    if waits is None:
        return "unknown"
    return f"{waits['kv']} / {waits['waiting'] - waits['kv']} of {waits['samples']}"


PAIRED_NOTE = (
    "Medians over requests of the same request's TTFT in two arms, over all pairs of launches. Intervals: 95 %, "
    "cohorts drawn in runs, launches as random effects. Resolved: the interval excludes 0 and the median is larger "
    "than any between launches of one arm. McNemar: requests that missed the limit in more repeats of one arm than "
    "of the other, and the exact two-sided p, which takes requests as independent and knows nothing of launches: a "
    "small p of many requests may come of chance alone (docs/statistics.md)."
)


def paired_table(summary: Mapping[str, Any]) -> Table:
    """Median difference of the same request's TTFT, the later arm minus the first."""
    head = ["difference", "QPS", "pairs", "median TTFT difference s", "95 % interval s", "noise floor s"]
    head += ["resolved", *(f"missed {name} s more often: first / other" for name in LIMITS)]
    rows = [
        [
            f"{pair['arms'][1]} - {pair['arms'][0]}",
            f"{pair['offered_qps']:g}",
            str(pair["n"]),
            _number(pair["ttft_delta_p50_s"], "+.4f"),
            _between(pair["interval_s"], "+.4f") if pair["interval_s"] else f"none: {pair['no_interval']}",
            _number(pair["noise_floor_s"], ".4f") if pair["noise_floor_s"] is not None else "one launch",
            "yes" if pair["resolved"] else "not resolved",
            *(_mcnemar(pair["mcnemar"][name]) for name in LIMITS),
        ]
        for pair in summary["paired"]
    ]
    return Table(head, rows)


def noise_table(summary: Mapping[str, Any]) -> Table:
    """Median paired difference between launches of one arm."""
    rows = [
        [
            floor["arm"],
            f"{floor['offered_qps']:g}",
            ", ".join(f"{1e3 * value:+.1f}" for value in floor["differences_s"]),
        ]
        for floor in summary["noise_floor"]
    ]
    return Table(["arm", "QPS", "later launch minus earlier, ms"], rows)


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


def fixed_cohort_note(summary: Mapping[str, Any]) -> str:
    if not summary["arms"]:
        return "No arm was measured."
    cohort = summary["arms"][0]["fixed_cohort"]
    if cohort["offered_qps"] is None:
        return f"Fixed cohort {cohort['name']}: no offered rate has valid cells in every measured arm."
    return (
        f"Fixed cohort: cohort {cohort['name']} of the trace (n = {cohort['n']}, repeats pooled) at "
        f"{cohort['offered_qps']:g} QPS, the lowest offered rate whose cells are valid in every measured arm."
        " Later tokens and whole answers: medians over all requests at the highest such rate."
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
    return _between(interval, ".3f") if interval else str(cell["ttft_no_interval"][percent])


def _between(interval: Mapping[str, float | None], form: str) -> str:
    low, high = interval["low"], interval["high"]
    return f"{'-inf' if low is None else format(low, form)} to {'failures' if high is None else format(high, form)}"


def _mcnemar(test: Mapping[str, Any]) -> str:
    return f"{test['more_first']} / {test['more_other']}, p {test['p']:.2g}"


def _number(value: float | None, form: str, factor: float = 1.0, unit: str = "") -> str:
    return "-" if value is None else format(factor * value, form) + unit


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
