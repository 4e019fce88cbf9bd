# SPDX-License-Identifier: Apache-2.0
"""From recorded cells to summary.json, tables and plots; needs no server."""

from harness.report.plots import write_plots
from harness.report.summary import build_summary
from harness.report.tables import cells_csv, markdown_report
from harness.store import RunStore, write_bytes, write_json


def write_report(store: RunStore) -> str:
    """Rebuild every output of a run from its records; returns the tables as Markdown text.

    Writes summary.json, table.md, cells.csv and plots/*.png, *.svg. The same records give the same bytes.
    """
    cells = list(store.cells())
    summary = build_summary(store.manifest, cells)
    table = markdown_report(summary)
    write_json(store.path / "summary.json", summary)
    write_bytes(store.path / "table.md", table.encode())
    write_bytes(store.path / "cells.csv", cells_csv(summary).encode())
    write_plots(store.path / "plots", summary, cells)
    return table
