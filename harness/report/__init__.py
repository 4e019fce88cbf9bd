# SPDX-License-Identifier: Apache-2.0
"""From recorded cells to summary.json, tables, plots and a page; needs no server."""

import math

from harness.files import write_bytes, write_json
from harness.report.differences import paired_ttft
from harness.report.page import page
from harness.report.plots import drawn_plots, valid_cells, write_plots
from harness.report.sheets import cells_csv, paired_csv
from harness.report.summary import build_summary
from harness.report.tables import markdown_report
from harness.signals import deferred
from harness.store import RunStore


def write_report(store: RunStore) -> str:
    """Rebuild every output of a run from its records; returns the tables as Markdown text.

    Writes report.html, summary.json, table.md, cells.csv, paired.csv and plots/*.png, *.svg. The same records
    give the same bytes. A signal that would end the process waits until all are written.
    """
    with deferred():
        return _write_report(store)


def _write_report(store: RunStore) -> str:
    cells = list(store.cells())
    manifest = store.manifest
    summary = build_summary(manifest, cells)
    table = markdown_report(summary)
    valid = valid_cells(summary, cells)
    pairs = (
        (first, other, pair["offered_qps"], repeat, name, tokens, _finite(a), _finite(b))
        for pair in summary["paired"]
        for first, other in [pair["arms"]]
        for (repeat, name), (tokens, a, b) in paired_ttft(first, other, pair["offered_qps"], valid).items()
    )
    write_json(store.path / "summary.json", summary)
    write_bytes(store.path / "table.md", table.encode())
    write_bytes(store.path / "cells.csv", cells_csv(summary).encode())
    write_bytes(store.path / "paired.csv", paired_csv(pairs).encode())
    write_plots(store.path / "plots", summary, cells)
    write_bytes(
        store.path / "report.html", page(summary, manifest, list(drawn_plots(summary, cells))).encode()
    )
    return table


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else "failed"
