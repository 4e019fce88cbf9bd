# SPDX-License-Identifier: Apache-2.0
"""One HTML page that holds all of a run: no script, style, font or picture is loaded from anywhere.

Headline first: the verdict in words, then the table, the plots, and everything that it takes to check them.
"""

import html
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from harness.report.pair_tables import (
    LAUNCH_NOTE,
    LAUNCH_TITLE,
    PAIRED_NOTE,
    launch_table,
    noise_table,
    paired_table,
)
from harness.report.plots import Drawn
from harness.report.style import CSS, SCRIPT
from harness.report.tables import (
    INTERVAL_NOTE,
    basis,
    cell_table,
    client_note,
    each_cell,
    engine_table,
    headline_note,
    headline_table,
    interval_table,
    refused,
    rule_table,
)
from harness.report.verdict import STATES, findings

Summary = Mapping[str, Any]


def page(summary: Summary, manifest: Mapping[str, Any], plots: Sequence[Drawn]) -> str:
    """The whole page; the same records give the same bytes."""
    arms = [arm["name"] for arm in summary["arms"]]
    title = " against ".join(arms) or "No arm"
    body = [
        _header(title, summary, manifest),
        _verdict(summary),
        _headline(summary),
        _not_counted(summary),
        _plots(plots),
        _comparison(summary),
        _section(
            "Cells",
            cell_table(summary).html(),
            "A cell is one arm at one offered rate, once. One that does not count is in no headline number.",
        ),
        _details("Intervals of each cell (95 %), and more", interval_table(summary).html(), INTERVAL_NOTE),
        _details("What the engines reported", engine_table(summary).html()),
        _method(summary),
        _provenance(summary, manifest),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + f"\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _header(title: str, summary: Summary, manifest: Mapping[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(manifest["created_unix_s"]))
    cells = list(each_cell(summary))
    facts = [when, f"{len(cells)} cells", f"trace {summary['trace_sha256'][:12]}"]
    scale = summary["scale"]
    badge = "" if scale == 1 else f' <span class="badge">scale {scale:g}</span>'
    return f"<header><h1>{_text(title)}{badge}</h1><p>{_text(' · '.join(facts))}</p></header>"


def _verdict(summary: Summary) -> str:
    cards = "".join(
        f'<article class="{finding.state}"><h2>{_text(finding.title)}'
        f'<span class="state">{_text(STATES[finding.state])}</span></h2><p>{_emphasis(finding.text)}</p></article>'
        for finding in findings(summary)
    )
    return f'<section class="verdict" aria-label="Verdict">{cards}</section>'


def _headline(summary: Summary) -> str:
    if refused(summary):
        return ""
    table = f'<div class="headline">{headline_table(summary).html()}</div>'
    return _section("Result", table, headline_note(summary))


def _not_counted(summary: Summary) -> str:
    items = "".join(
        f"<li><b>{_text(arm['name'])} at {cell['offered_qps']:g} QPS, repeat {cell['repeat']}</b>: "
        f"{_text('; '.join(cell['invalid_reasons']))}</li>"
        for arm, cell in each_cell(summary)
        if not cell["valid"]
    )
    return _section("Cells that do not count", f"<ul>{items}</ul>") if items else ""


def _plots(plots: Sequence[Drawn]) -> str:
    figures = "".join(
        f"<figure><h3>{_text(plot.title)}</h3>{plot.svg}<figcaption>{_text(plot.caption)}</figcaption></figure>"
        for plot in plots
    )
    return f'<section><h2>Plots</h2><div class="plots">{figures}</div></section>' if figures else ""


def _comparison(summary: Summary) -> str:
    parts = []
    if summary["paired"]:
        parts += [paired_table(summary).html(), f'<p class="note">{_text(PAIRED_NOTE)}</p>']
    if (alone := launch_table(summary)).rows:
        parts += [f"<h3>{LAUNCH_TITLE}</h3>", alone.html(), f'<p class="note">{_text(LAUNCH_NOTE)}</p>']
    if summary["noise_floor"]:
        parts += ["<h3>Noise floor: launches of the same arm</h3>", noise_table(summary).html()]
    if summary["limit_rules"]:
        parts += ["<h3>Limits by rule</h3>", rule_table(summary).html()]
    return _section("Differences between the arms", "".join(parts)) if parts else ""


def _method(summary: Summary) -> str:
    definitions = (
        (
            "TTFT",
            "from the time at which the schedule wanted the request sent, to the first chunk with a token",
        ),
        ("Miss", "a request later than the limit, or one that failed, was refused or did not finish"),
        (
            "Highest passing rate",
            "the highest tested rate at and below which every tested rate counts and no request missed",
        ),
        ("First miss", "the lowest tested rate with a cell that counts in which a request missed"),
        (
            "Unstable",
            "requests arrive faster than they are served: TTFT then depends on how long the cell lasts",
        ),
        (
            "Percentile",
            "of all requests, failures counted as infinite; P50 is the usual median; P90 needs 20 requests, P99 200",
        ),
        ("Parity", "both arms' greedy tokens and top-20 logprobs on the same prompts, before any timing"),
    )
    listed = "".join(f"<dt>{_text(term)}</dt><dd>{_text(text)}</dd>" for term, text in definitions)
    notes = "".join(f"<li>{_text(note)}</li>" for note in summary["notes"])
    client = f"<p>{_text(client_note(summary))}</p>"
    return _section(
        "How it was measured",
        f"<p>{_text(basis(summary))}</p>{client}<dl>{listed}</dl>{f'<ul>{notes}</ul>' if notes else ''}",
    )


def _provenance(summary: Summary, manifest: Mapping[str, Any]) -> str:
    facts = {
        "command": manifest["command"],
        "trace": summary["trace_sha256"],
        "workload": _compact(summary["workload"]),
        "harness": manifest["harness_version"],
        "host": _compact(manifest["host"]),
        "packages": _compact(manifest["packages"]),
    }
    facts |= {f"arm {arm['name']}": _engine(arm) for arm in manifest["arms"]}
    rows = "".join(
        f"<dt>{_text(name)}</dt><dd><code>{_text(value)}</code></dd>" for name, value in facts.items()
    )
    files = (
        "Every number is recomputed from <code>cells/</code> (a Parquet row for each request) and "
        "<code>manifest.json</code> by <code>python -m harness report DIR</code>; <code>summary.json</code>, "
        "<code>cells.csv</code>, <code>paired.csv</code> and <code>plots/</code> hold the same numbers."
    )
    return _details("Where it comes from", f"<p>{files}</p><dl class='facts'>{rows}</dl>")


def _engine(arm: Mapping[str, Any]) -> str:
    engine = arm["engine"] or {}
    argv = engine.get("argv")
    return f"{arm['url']} {' '.join(argv) if argv else _compact(engine)}"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(", ", ": ")).replace('"', "")


def _section(title: str, content: str, note: str = "") -> str:
    return f"<section><h2>{_text(title)}</h2>{content}{_below(note)}</section>"


def _details(title: str, content: str, note: str = "") -> str:
    return f"<details><summary>{_text(title)}</summary>{content}{_below(note)}</details>"


def _below(note: str) -> str:
    return f'<p class="note">{_text(note)}</p>' if note else ""


def _text(text: str) -> str:
    return html.escape(text)


def _emphasis(text: str) -> str:
    """`**so**` is the one mark that findings use."""
    parts = _text(text).split("**")
    return "".join(f"<strong>{part}</strong>" if index % 2 else part for index, part in enumerate(parts))
