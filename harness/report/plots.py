# SPDX-License-Identifier: Apache-2.0
"""The plots of a run: PNG and SVG for slides, and SVG for the page, whose marks tell their values.

The same records give the same files where the same fonts are installed. Filled marks are cells that count, hollow
ones do not. Colours are Okabe and Ito's, told apart by colour-blind readers; every arm has a marker and a line of its
own as well.
"""

import html
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

from harness.files import whole
from harness.report.differences import paired_ttft
from harness.store import Cell
from harness.validity import ttft_s

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
LIMIT_LINES = {"15": "--", "25": ":"}
PANELS = 4
STYLE: dict[Any, Any] = {
    "figure.figsize": (5.6, 4.4),  # fits a phone's width with text that can be read
    "figure.constrained_layout.use": True,
    "font.size": 10.5,
    "axes.titlesize": 10.5,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "svg.hashsalt": "harness",
}
SLIDE_DPI = 180

Summary = Mapping[str, Any]


class Plot:
    """A figure that is being drawn, and what each of its marks says when it is pointed at."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.figure = Figure()
        self.tips: dict[str, str] = {}

    def mark(self, axes: Axes, x: float, y: float, tip: str, **style: Any) -> None:
        """One mark of its own, so that the page can tell its values."""
        (line,) = axes.plot([x], [y], linestyle="none", **style)
        name = f"tip{len(self.tips)}"
        line.set_gid(name)
        self.tips[name] = tip


Draw = Callable[[Plot, Summary, Sequence[Cell]], None]


@dataclass(frozen=True)
class Drawn:
    """A plot for the page: its SVG, and how to read it."""

    name: str
    title: str
    caption: str
    svg: str


def write_plots(folder: Path, summary: Summary, cells: Sequence[Cell]) -> None:
    """Write every plot as PNG and SVG, text as outlines; where there is no cell, remove what an earlier report drew."""
    if not cells:
        for name, *_ in PLOTS:
            for suffix in (".png", ".svg"):
                (folder / f"{name}{suffix}").unlink(missing_ok=True)
        return
    folder.mkdir(exist_ok=True)
    suffix = f"scale {summary['scale']:g}, trace {summary['trace_sha256'][:12]}"
    for name, title, _, draw in PLOTS:
        with matplotlib.rc_context(STYLE):
            plot = Plot(name)
            draw(plot, summary, cells)
            plot.figure.suptitle(f"{title}\n{suffix}", fontsize=11)
            with whole(folder / f"{name}.png") as path:
                plot.figure.savefig(path, format="png", dpi=SLIDE_DPI, metadata={"Software": None})
            with whole(folder / f"{name}.svg") as path:
                plot.figure.savefig(path, format="svg", metadata={"Date": None})


def drawn_plots(summary: Summary, cells: Sequence[Cell]) -> Iterator[Drawn]:
    """Every plot for the page that has something to show."""
    measured = any(cell.samples for cell in cells)
    for name, title, caption, draw in PLOTS if cells else ():
        if name == "engine" and not measured:
            continue
        with matplotlib.rc_context(STYLE | {"svg.fonttype": "none"}):
            plot = Plot(name)
            draw(plot, summary, cells)
            out = io.StringIO()
            plot.figure.savefig(out, format="svg", metadata={"Date": None})
        yield Drawn(name, title, caption, _inline(out.getvalue(), plot, title))


def _inline(svg: str, plot: Plot, title: str) -> str:
    """The `<svg>` element alone, with names of its own, scaled by the page, a title at each mark."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for name, tip in plot.tips.items():
        text = html.escape(tip)
        svg = svg.replace(
            f'<g id="{name}">', f'<g id="{name}" class="tip" data-tip="{text}"><title>{text}</title>'
        )
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{plot.name}-", svg)
    svg = re.sub(r"(\d+\.\d{3})\d+", r"\1", svg)  # a thousandth of a point is enough
    return re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        rf'<svg viewBox="\1" role="img" aria-label="{html.escape(title)}" xmlns:xlink="http://www.w3.org/1999/xlink">',
        svg,
        count=1,
    )


def draw_ttft(plot: Plot, summary: Summary, _cells: Sequence[Cell]) -> None:
    axes = plot.figure.subplots()
    for index, arm in enumerate(summary["arms"]):
        for percent, line in (("p50", "-"), ("p90", "-.")):
            points = [
                (
                    cell,
                    cell["ttft_s"][percent],
                    cell["ttft_interval_s"][percent] if percent == "p50" else None,
                )
                for cell in arm["cells"]
            ]
            _draw_cells(plot, axes, index, points, line, f"{arm['name']} {percent.upper()}", " s")
    for name, applied in summary["limits"].items():
        label = f"limit {name} s" + ("" if applied == float(name) else f", applied {applied:.3g} s")
        axes.axhline(applied, color="black", linewidth=1.2, linestyle=LIMIT_LINES[name], label=label)
    axes.set(xlabel="offered rate (requests / s)", ylabel="TTFT from the due time (s)", yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    plot.figure.legend(loc="outside lower center", ncols=2)


def draw_miss(plot: Plot, summary: Summary, _cells: Sequence[Cell]) -> None:
    panels = plot.figure.subplots(len(summary["limits"]), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, applied) in zip(panels, summary["limits"].items(), strict=True):
        for index, arm in enumerate(summary["arms"]):
            points = [(c, 100 * c["miss"][name], _percent(c["miss_interval"][name])) for c in arm["cells"]]
            _draw_cells(plot, axes, index, points, "-", arm["name"], " %")
        axes.set(ylabel=f"over {name} s (%)\napplied {applied:.3g} s", ylim=(-8, 108))
    panels[-1].set(xlabel="offered rate (requests / s)")
    plot.figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def draw_paired(plot: Plot, summary: Summary, cells: Sequence[Cell]) -> None:
    axes = plot.figure.subplots()
    valid = valid_cells(summary, cells)
    against_first = [pair for pair in summary["paired"] if pair["arms"][0] == summary["arms"][0]["name"]]
    for index, pair in enumerate(against_first):
        first, other = pair["arms"]
        label = f"{other} - {first} @ {pair['offered_qps']:g} QPS"
        style: dict[str, Any] = {"marker": _of(MARKERS, index), "color": _of(COLOURS, index)}
        axes.plot([], [], linestyle="none", label=label, **style)
        for (_, name), (tokens, a, b) in paired_ttft(first, other, pair["offered_qps"], valid).items():
            if math.isfinite(a) and math.isfinite(b):
                tip = f"{name}, {tokens:,} tokens, {label}: {b - a:+.3f} s ({a:.3f} s, {b:.3f} s)"
                plot.mark(axes, tokens, b - a, tip, alpha=0.8, markersize=5, **style)
    axes.axhline(0, color="black", linewidth=1)
    axes.set(xlabel="prompt length (tokens)", ylabel="TTFT difference (s)")
    if against_first:
        plot.figure.legend(loc="outside lower center", ncols=2)
    else:
        _say(axes, "no rate has valid cells in two arms")


def draw_distribution(plot: Plot, summary: Summary, cells: Sequence[Cell]) -> None:
    rates = _spread(sorted({cell.key.offered_qps for cell in cells}), PANELS)
    columns = min(2, len(rates))
    grid = plot.figure.subplots(-(-len(rates) // columns), columns, sharex=True, sharey=True, squeeze=False)
    counted = {cell.key for cell in valid_cells(summary, cells)}
    for axes in grid.flat[len(rates) :]:
        axes.set_visible(False)
    for axes, rate in zip(grid.flat, rates, strict=False):
        for index, arm in enumerate(summary["arms"]):
            mine = [c for c in cells if c.key.arm == arm["name"] and c.key.offered_qps == rate]
            ttft = sorted(ttft_s(record) for cell in mine for record in cell.records)
            served = [value for value in ttft if math.isfinite(value)]
            counts = bool(mine) and all(cell.key in counted for cell in mine)
            steps = [100 * (rank + 1) / len(ttft) for rank in range(len(served))]
            axes.step(
                served, steps, where="post", color=_of(COLOURS, index), label=arm["name"],
                linestyle=("-", "-.")[index % 2] if counts else (0, (1, 2)),
            )  # fmt: skip
        for name, applied in summary["limits"].items():
            axes.axvline(applied, color="black", linewidth=1, linestyle=LIMIT_LINES[name])
        axes.set(xscale="log", ylim=(0, 103), title=f"{rate:g} QPS")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", labelsize=8.5)
    for axes in grid[-1]:
        axes.set_xlabel("TTFT (s)")
    for axes in grid[:, 0]:
        axes.set_ylabel("at or below (%)")
    plot.figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


def draw_engine(plot: Plot, summary: Summary, cells: Sequence[Cell]) -> None:
    queue, usage = plot.figure.subplots(2, 1, sharex=True)
    top = max(cell.key.offered_qps for cell in cells)
    shown = [cell for cell in cells if cell.key.offered_qps == top and cell.key.repeat == 0]
    samples = {cell.key.arm: cell.samples for cell in shown if cell.samples}
    for index, arm in enumerate(summary["arms"]):
        seen, colour = samples.get(arm["name"], []), _of(COLOURS, index)
        for name, line in (("running", "-"), ("waiting", "--")):
            known = [(s["t_s"], s[name]) for s in seen if s[name] is not None]
            queue.plot(*_columns(known), line, color=colour, label=f"{arm['name']} {name}")
        known = [(s["t_s"], 100 * s["kv_usage"]) for s in seen if s["kv_usage"] is not None]
        usage.plot(*_columns(known), ("-", "-.")[index % 2], color=colour)
    queue.set(ylabel=f"requests\n@ {top:g} QPS")
    queue.yaxis.set_major_locator(MaxNLocator(integer=True))
    usage.set(xlabel="time from the cell's start (s)", ylabel="KV usage (%)", ylim=(-8, 108))
    if samples:
        plot.figure.legend(*queue.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    else:
        _say(queue, "no engine metrics were recorded")


PLOTS: tuple[tuple[str, str, str, Draw], ...] = (
    (
        "ttft",
        "TTFT over offered rate",
        "Median with its 95 % interval, and P90, of each cell. The more requests wait for one another, the fewer they"
        " count as: then the interval is wide, or there is none. Hollow marks do not count. Black lines: the limits.",
        draw_ttft,
    ),
    (
        "miss",
        "Share of requests over the limit",
        "With 95 % intervals, the wider the more requests wait for one another. A failed request is over every limit.",
        draw_miss,
    ),
    (
        "paired",
        "Paired TTFT difference over prompt length",
        "A mark is one request: its TTFT in the other arm minus that in the first. Below zero, the other is faster."
        " Requests that failed in an arm are not drawn.",
        draw_paired,
    ),
    (
        "distribution",
        "Distribution of TTFT",
        "Repeats together; failures keep a curve below 100 %. Dotted curves do not count. Black lines: the limits.",
        draw_distribution,
    ),
    (
        "engine",
        "Queue and KV usage over time",
        "What the engines said once a second, at the highest rate measured.",
        draw_engine,
    ),
)

Interval = Mapping[str, float | None] | None


def _draw_cells(
    plot: Plot,
    axes: Axes,
    index: int,
    points: Sequence[tuple[Mapping[str, Any], float | None, Interval]],
    line: str,
    label: str,
    unit: str,
) -> None:
    """A mark for each cell that has a value, hollow if it does not count; a line through those that do.

    Later arms are drawn a little aside, so that no interval hides another.
    """
    tested = [cell["offered_qps"] for cell, _, _ in points]
    aside = 0.012 * index * (max(tested, default=0) - min(tested, default=0))
    colour, marker = _of(COLOURS, index), _of(MARKERS, index)
    known = [(cell, value, interval) for cell, value, interval in points if value is not None]
    counted = [(cell["offered_qps"], value) for cell, value, _ in known if cell["valid"]]
    rates = sorted({rate for rate, _ in counted})
    middle = [(rate + aside, median(value for r, value in counted if r == rate)) for rate in rates]
    axes.plot(*_columns(middle), line, color=colour, marker=marker, markevery=[], label=label)
    for cell, value, interval in known:
        rate, span = cell["offered_qps"], ""
        if interval is not None and interval["low"] is not None:
            high = interval["high"]
            span = f" (95 % {interval['low']:.3g} to {'failures' if high is None else f'{high:.3g}'}{unit})"
            if high is not None:
                errors = [[max(0.0, value - interval["low"])], [max(0.0, high - value)]]
                axes.errorbar(
                    [rate + aside], [value], errors, color=colour, elinewidth=1, capsize=3, alpha=0.7
                )
        verdict = "" if cell["valid"] else "; does not count: " + "; ".join(cell["invalid_reasons"])
        tip = f"{label} at {rate:g} QPS, repeat {cell['repeat']}: {value:.3g}{unit}{span}, n {cell['n']}{verdict}"
        face = colour if cell["valid"] else "white"
        plot.mark(axes, rate + aside, value, tip, color=colour, marker=marker, markerfacecolor=face)


def valid_cells(summary: Summary, cells: Sequence[Cell]) -> list[Cell]:
    """The cells that count."""
    counts = {
        (arm["name"], cell["offered_qps"], cell["repeat"])
        for arm in summary["arms"]
        for cell in arm["cells"]
        if cell["valid"]
    }
    return [cell for cell in cells if (cell.key.arm, cell.key.offered_qps, cell.key.repeat) in counts]


def _spread(values: Sequence[float], count: int) -> list[float]:
    """At most `count` of the values, the first and the last among them."""
    if len(values) <= count:
        return list(values)
    return [values[round(index * (len(values) - 1) / (count - 1))] for index in range(count)]


def _percent(interval: Interval) -> Interval:
    return interval and {name: None if end is None else 100 * end for name, end in interval.items()}


def _columns(rows: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [x for x, _ in rows], [y for _, y in rows]


def _of(choices: Sequence[str], index: int) -> str:
    return choices[index % len(choices)]


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes)
