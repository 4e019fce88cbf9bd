# SPDX-License-Identifier: Apache-2.0
"""The plots of a run, as PNG and SVG; the same records give the same files.

Filled marks are cells that count, hollow ones do not. Colours are Okabe and Ito's, told apart by colour-blind
readers; every arm has a marker of its own as well.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

from harness.report.pairs import paired_ttft
from harness.store import Cell

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
LIMIT_LINES = {"15": "--", "25": ":"}
STYLE: dict[Any, Any] = {
    "figure.figsize": (8.0, 5.0),
    "figure.dpi": 100,
    "figure.constrained_layout.use": True,
    "font.size": 12,
    "axes.titlesize": 12,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 10,
    "svg.hashsalt": "harness",
}

Summary = Mapping[str, Any]
Draw = Callable[[Figure, Summary, Sequence[Cell]], None]


def write_plots(folder: Path, summary: Summary, cells: Sequence[Cell]) -> None:
    """Write every plot; none where there is no cell."""
    if not cells:
        return
    folder.mkdir(exist_ok=True)
    suffix = f"scale {summary['scale']:g}, trace {summary['trace_sha256'][:12]}"
    for name, title, draw in PLOTS:
        with matplotlib.rc_context(STYLE):
            figure = Figure()
            draw(figure, summary, cells)
            figure.suptitle(f"{title}\n{suffix}")
            figure.savefig(folder / f"{name}.png", metadata={"Software": None})
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


def draw_ttft(figure: Figure, summary: Summary, _cells: Sequence[Cell]) -> None:
    """P50 and P90 of each arm over offered rate, with the applied limits."""
    axes = figure.subplots()
    for index, arm in enumerate(summary["arms"]):
        for percent, line in (("p50", "-"), ("p90", "-.")):
            points = [(cell, cell["ttft_s"][percent]) for cell in arm["cells"]]
            _draw_cells(axes, index, points, line, f"{arm['name']} {percent.upper()}")
    for name, applied in summary["limits"].items():
        label = f"limit {name} s, applied {applied:.3g} s"
        axes.axhline(applied, color="black", linewidth=1.2, linestyle=LIMIT_LINES[name], label=label)
    axes.set(xlabel="offered rate (requests / s)", ylabel="TTFT from the due time (s)", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside lower center", ncols=3)


def draw_miss(figure: Figure, summary: Summary, _cells: Sequence[Cell]) -> None:
    """Share of requests over each limit, one panel a limit."""
    panels = figure.subplots(len(summary["limits"]), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, applied) in zip(panels, summary["limits"].items(), strict=True):
        for index, arm in enumerate(summary["arms"]):
            points = [(cell, 100 * cell["miss"][name]) for cell in arm["cells"]]
            _draw_cells(axes, index, points, "-", arm["name"])
        axes.set(ylabel=f"over {name} s (%)\napplied {applied:.3g} s", ylim=(-8, 108))
    panels[-1].set(xlabel="offered rate (requests / s)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def draw_paired(figure: Figure, summary: Summary, cells: Sequence[Cell]) -> None:
    """Difference in TTFT of each request between two arms, over its prompt length, one series a rate."""
    axes = figure.subplots()
    counts = {
        (arm["name"], cell["offered_qps"], cell["repeat"]): cell["valid"]
        for arm in summary["arms"]
        for cell in arm["cells"]
    }
    valid = [cell for cell in cells if counts[cell.key.arm, cell.key.offered_qps, cell.key.repeat]]
    for index, pair in enumerate(summary["paired"]):
        first, other = pair["arms"]
        ttft = paired_ttft(first, other, pair["offered_qps"], valid).values()
        points = [(tokens, b - a) for tokens, a, b in ttft if math.isfinite(a) and math.isfinite(b)]
        axes.plot(
            *_columns(points),
            linestyle="none",
            marker=_of(MARKERS, index),
            color=_of(COLOURS, index),
            alpha=0.8,
            label=f"{other} - {first} @ {pair['offered_qps']:g} QPS",
        )
    axes.axhline(0, color="black", linewidth=1)
    axes.set(xlabel="prompt length (tokens)", ylabel="TTFT difference (s)")
    if summary["paired"]:
        figure.legend(loc="outside lower center", ncols=3)
    else:
        _say(axes, "no rate has valid cells in two arms")


def draw_engine(figure: Figure, summary: Summary, cells: Sequence[Cell]) -> None:
    """Running and waiting requests and KV usage over time, at the highest rate measured, repeat 0."""
    queue, usage = figure.subplots(2, 1, sharex=True)
    top = max(cell.key.offered_qps for cell in cells)
    shown = [cell for cell in cells if cell.key.offered_qps == top and cell.key.repeat == 0]
    samples = {cell.key.arm: cell.samples for cell in shown if cell.samples}
    for index, arm in enumerate(summary["arms"]):
        seen, colour = samples.get(arm["name"], []), _of(COLOURS, index)
        for name, line in (("running", "-"), ("waiting", "--")):
            known = [(s["t_s"], s[name]) for s in seen if s[name] is not None]
            queue.plot(*_columns(known), line, color=colour, label=f"{arm['name']} {name}")
        known = [(s["t_s"], 100 * s["kv_usage"]) for s in seen if s["kv_usage"] is not None]
        usage.plot(*_columns(known), color=colour)
    queue.set(ylabel=f"requests\n@ {top:g} QPS")
    usage.set(xlabel="time from the cell's start (s)", ylabel="KV usage (%)", ylim=(-8, 108))
    if samples:
        figure.legend(*queue.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    else:
        _say(queue, "no engine metrics were recorded")


PLOTS: tuple[tuple[str, str, Draw], ...] = (
    ("ttft", "TTFT over offered rate", draw_ttft),
    ("miss", "Share of requests over the limit", draw_miss),
    ("paired", "Paired TTFT difference over prompt length", draw_paired),
    ("engine", "Queue and KV usage over time", draw_engine),
)


def _draw_cells(
    axes: Axes, index: int, points: Sequence[tuple[Mapping[str, Any], float | None]], line: str, label: str
) -> None:
    """A mark for each cell that has a value, hollow if it does not count; a line through those that do."""
    colour, marker = _of(COLOURS, index), _of(MARKERS, index)
    known = [(cell["offered_qps"], value, cell["valid"]) for cell, value in points if value is not None]
    rates = sorted({rate for rate, _, counts in known if counts})
    middle = [(rate, median(value for r, value, counts in known if counts and r == rate)) for rate in rates]
    axes.plot(*_columns(middle), line, color=colour, marker=marker, markevery=[], label=label)
    for counts, face in ((True, colour), (False, "white")):
        marks = [(rate, value) for rate, value, valid in known if valid == counts]
        axes.plot(*_columns(marks), linestyle="none", color=colour, marker=marker, markerfacecolor=face)


def _columns(rows: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [x for x, _ in rows], [y for _, y in rows]


def _of(choices: Sequence[str], index: int) -> str:
    return choices[index % len(choices)]


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
