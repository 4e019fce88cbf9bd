# SPDX-License-Identifier: Apache-2.0
"""The tables of differences: between arms, and between launches of one arm. Pure functions of summary.json."""

from collections.abc import Mapping
from typing import Any

from harness.report.table import LIMITS, Table, between_text, number_text

PAIRED_NOTE = (
    "Medians over requests of the difference between the same request's times in two arms, over all pairs of "
    "launches: TTFT, and the whole answer, both from the due time. Intervals: 95 %, cohorts drawn in runs, launches as "
    "random effects. Resolved: the interval excludes 0 and the median is larger than any between launches of one arm. "
    "McNemar: requests that missed the limit in more repeats of one arm than of the other, and the exact two-sided p, "
    "which takes requests as independent and knows nothing of launches: a small p of many requests may come of chance "
    "alone (docs/statistics.md)."
)


def paired_table(summary: Mapping[str, Any]) -> Table:
    """Median difference of the same request's times, the later arm minus the earlier one."""
    head = ["difference", "QPS", "of", "pairs", "median difference s", "95 % interval s", "noise floor s"]
    head += ["resolved", *(f"missed {name} s more often: first / other" for name in LIMITS)]
    rows = [
        [
            f"{pair['arms'][1]} - {pair['arms'][0]}",
            f"{pair['offered_qps']:g}",
            of,
            str(found["n"]),
            number_text(median_s, "+.4f"),
            between_text(found["interval_s"], "+.4f")
            if found["interval_s"]
            else f"none: {found['no_interval']}",
            number_text(found["noise_floor_s"], ".4f")
            if found["noise_floor_s"] is not None
            else "one launch",
            "yes" if found["resolved"] else "not resolved",
            *(_mcnemar(pair["mcnemar"][name]) if found is pair else "-" for name in LIMITS),
        ]
        for pair in summary["paired"]
        for of, found, median_s in (
            ("TTFT", pair, pair["ttft_delta_p50_s"]),
            ("answer", pair["answer"], pair["answer"]["delta_p50_s"]),
        )
    ]
    return Table(head, rows)


LAUNCH_TITLE = "One launch of each arm: what their requests alone say"
LAUNCH_NOTE = (
    "Where cohorts are too few for an interval over launches: the median over requests and its 95 % interval by order "
    "statistics, requests that waited for one another counted as fewer. It speaks of these two launches alone: another "
    "launch of the same arm may differ by more (noise floor), so it resolves nothing between the arms."
)


def launch_table(summary: Mapping[str, Any]) -> Table:
    """Each pair of one launch each, where there is no interval over launches for want of cohorts."""
    head = ["difference", "QPS", "of", "launches", "pairs", "median difference s", "95 % over requests s"]
    rows = [
        [
            f"{pair['arms'][1]} - {pair['arms'][0]}",
            f"{pair['offered_qps']:g}",
            of,
            f"{alone['launches'][1]} - {alone['launches'][0]}",
            str(alone["n"]),
            number_text(alone["delta_p50_s"], "+.4f"),
            between_text(alone["interval_s"], "+.4f"),
        ]
        for pair in summary["paired"]
        for of, found in (("TTFT", pair), ("answer", pair["answer"]))
        for alone in found["launch_pairs"]
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


def _mcnemar(test: Mapping[str, Any]) -> str:
    return f"{test['more_first']} / {test['more_other']}, p {test['p']:.2g}"
