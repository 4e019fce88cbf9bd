# SPDX-License-Identifier: Apache-2.0
"""The page, its words, and the plots on it, from recorded cells."""

import csv
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from builders import cell_run, manifest, record, small_trace

from harness.load import CellRun
from harness.manifest import new_arm
from harness.report import build_summary, write_report
from harness.report.pair_tables import LAUNCH_NOTE, launch_table
from harness.report.plots import Plot, draw_ttft
from harness.report.tables import INTERVAL_NOTE, markdown_report, rule_table
from harness.report.verdict import findings, other_tokens
from harness.sla import Rule
from harness.store import CellKey, RunStore

TRACE = small_trace(requests=72, cohort_size=6, max_tokens=40)


def run_of(seed: int, shift_s: float, launch_s: float = 0.0, grow_s: float = 0.0) -> CellRun:
    """72 requests a second apart; TTFT of 0.3 s + shifts + noise; `grow_s` later with each request."""
    noise = np.random.default_rng(seed).normal(0, 0.01, len(TRACE.requests))
    records = [
        record(
            index, 0.3 + shift_s + launch_s + float(noise[index]) + grow_s * index,
            id=request.id, cohort=request.cohort, prompt_tokens=request.prompt_tokens,
            server_prompt_tokens=request.prompt_tokens,
        )
        for index, request in enumerate(TRACE.requests)
    ]  # fmt: skip
    return replace(cell_run([0.1]), records=records)


def written(folder: Path, cells: dict[CellKey, CellRun], launches: bool = True, **changes: Any) -> RunStore:
    sizes = (("tp8", 1000, 1), ("dcp8", 7500, 8))
    arms = [
        new_arm(
            name,
            "http://h:1",
            kv_tokens=tokens,
            kv_bytes=1 << 30,
            topology={"tp": 8, "dcp": dcp, "ep": 1, "nodes": 1},
        )
        for name, tokens, dcp in sizes
    ]
    described = {**manifest(TRACE), "arms": arms, **changes}
    store = RunStore.create(folder / "run", described, TRACE)
    for key, run in cells.items():
        launch = key.repeat if launches else 0
        store.write_cell(key, run, trace_sha256=TRACE.sha256, cache_salt="s", launch=launch)
    return store


def pair(shift_s: float, spread_s: float, repeats: int = 4) -> dict[CellKey, CellRun]:
    luck = np.random.default_rng(9).normal(0, spread_s, (2, repeats))
    return {
        CellKey(arm, 1.0, repeat): run_of(10 * side + repeat, side * shift_s, float(luck[side, repeat]))
        for side, arm in enumerate(("tp8", "dcp8"))
        for repeat in range(repeats)
    }


def text_of(store: RunStore) -> str:
    write_report(store)
    return (store.path / "report.html").read_text()


def said(store: RunStore) -> dict[str, tuple[str, str]]:
    summary = build_summary(store.manifest, list(store.cells()))
    return {finding.title: (finding.state, finding.text) for finding in findings(summary)}


def test_a_clear_difference_is_told_with_its_interval(tmp_path: Path) -> None:
    found = said(written(tmp_path, pair(0.05, 0.001)))
    state, text = found["Speed"]
    assert state == "sure" and "the first token of dcp8 comes 50" in text and "ms later" in text
    assert "95 % interval +4" in text and "48 cohorts, 4 launches an arm" in text
    assert found["Capacity"] == (
        "sure",
        "dcp8 holds 7.5x the KV tokens of tp8 at equal bytes (7,500 against 1,000).",
    )


def test_a_difference_that_launches_explain_is_not_resolved(tmp_path: Path) -> None:
    state, text = said(written(tmp_path, pair(0.02, 0.05)))["Speed"]
    assert state == "open" and "Not resolved: the interval holds zero" in text


def test_one_launch_an_arm_never_resolves(tmp_path: Path) -> None:
    state, text = said(written(tmp_path, pair(0.05, 0.0), launches=False))["Speed"]
    assert state == "open" and "for these launches alone" in text and "one launch of an arm" in text


def test_too_few_cohorts_give_no_interval(tmp_path: Path) -> None:
    store = written(tmp_path, pair(0.05, 0.0, repeats=2))
    state, text = said(store)["Speed"]
    assert state == "open" and "24 cohorts over all repeats, an interval needs 30" in text
    # Each pair of launches alone has one, over its 72 requests, and resolves nothing.
    alone = r"Of one launch of each alone, over requests: (\+[45]\d(\.\d)? ms \(95 % [^)]*\)[;.] ){4}Not resolved\."
    assert re.search(alone, text)
    page = text_of(store)
    assert LAUNCH_NOTE in page and LAUNCH_NOTE in (store.path / "table.md").read_text()
    rows = launch_table(build_summary(store.manifest, list(store.cells()))).rows
    assert [row[:5] for row in rows[:4]] == [
        ["dcp8 - tp8", "1", "TTFT", launches, "72"] for launches in ("0 - 0", "1 - 0", "0 - 1", "1 - 1")
    ]
    assert LAUNCH_NOTE not in text_of(written(tmp_path / "more", pair(0.05, 0.0)))


def test_the_headline_stands_at_the_fixed_cohorts_rate(tmp_path: Path) -> None:
    """The lowest with valid cells in every arm, whatever was found there; the range elsewhere stands beside it."""
    shifts = {0.5: 0.02, 1.0: -0.05, 2.0: 0.3}
    cells = {
        CellKey(key.arm, rate, key.repeat): run
        for rate, shift_s in shifts.items()
        for key, run in pair(shift_s, 0.0, repeats=1).items()
    }
    text = said(written(tmp_path / "a", cells))["Speed"][1]
    assert (
        text.startswith("At 0.5 QPS the first token of dcp8 comes ") and "ms later than that of tp8" in text
    )
    assert re.search(
        r"At the 2 other rates, up to 2 QPS: from [45]\d(\.\d)? ms sooner to [23]\d\d ms later\.", text
    )
    del cells[CellKey("tp8", 0.5, 0)], cells[CellKey("tp8", 2.0, 0)]
    text = said(written(tmp_path / "b", cells))["Speed"][1]
    assert text.startswith("At 1 QPS") and "other rates" not in text


def test_rates_need_three_repeats(tmp_path: Path) -> None:
    assert "3 repeats needed" in said(written(tmp_path / "a", pair(0.0, 0.0, repeats=2)))["Load"][1]
    text = said(written(tmp_path / "b", pair(0.0, 0.0)))["Load"][1]
    assert "both arms pass at least 1 QPS (nothing higher was shown not to pass)" in text
    assert "unbounded to unbounded" in text and "backlog grows" not in text


def test_repeats_are_counted_where_an_arm_has_fewest_at_its_boundary(tmp_path: Path) -> None:
    """Three repeats of tp8 at 1 QPS, three of dcp8 at 0.5: but dcp8 was measured once at its boundary, 1 QPS."""
    cells = {
        key: run for key, run in pair(0.0, 0.0, repeats=3).items() if key.arm == "tp8" or key.repeat == 0
    }
    cells |= {CellKey("dcp8", 0.5, repeat): run_of(repeat, 0.0) for repeat in range(3)}
    state, text = said(written(tmp_path / "a", cells))["Load"]
    assert state == "open" and "1 repeat at a boundary" in text
    state, text = said(written(tmp_path / "b", pair(0.0, 0.0, repeats=3)))["Load"]
    assert state == "open" and "at a boundary" not in text  # what both pass was not found
    alone = {key: run for key, run in pair(0.0, 0.0, repeats=3).items() if key.arm == "tp8"}
    assert "tp8 passes at least 1 QPS" in said(written(tmp_path / "c", alone))["Load"][1]


@pytest.mark.parametrize(
    ("launches", "dcp8_misses_at", "state"), [(True, 4.0, "sure"), (True, 2.0, "open"), (False, 4.0, "open")]
)
def test_a_difference_of_rates_is_measured_over_launches_and_without_zero(
    tmp_path: Path, launches: bool, dcp8_misses_at: float, state: str
) -> None:
    """Limits of 1 and 2 s, three repeats: tp8 passes 1 QPS and not 2, dcp8 passes twice as much, or as much."""
    cells = {
        CellKey(arm, rate, repeat): run_of(repeat, 3.0 if rate >= misses_at else 0.0)
        for arm, misses_at in (("tp8", 2.0), ("dcp8", dcp8_misses_at))
        for rate in (1.0, 2.0, 3.0, 4.0)
        for repeat in range(3)
    }
    found, text = said(written(tmp_path, cells, launches=launches))["Load"]
    assert found == state and "at least" not in text


def test_other_tokens_that_margins_explain_do_not_read_as_failure(tmp_path: Path) -> None:
    parity = {"ok": True, "compared": 640, "diverged": [{}] * 18}
    state, text = said(written(tmp_path, pair(0.0, 0.0), parity=parity))["Trust"]
    assert state == "sure"
    assert "640 positions compared, 18 other tokens, all explained by their margin." in text
    assert other_tokens({"diverged": [{}]}) == "1 other token, explained by its margin"


def test_an_arm_that_was_left_out_is_named(tmp_path: Path) -> None:
    parity = {"ok": True, "compared": 640, "diverged": []}
    left_out = {"dcp8-stock": "it did not start"}
    state, text = said(written(tmp_path, pair(0.0, 0.0), parity=parity, left_out=left_out))["Trust"]
    assert state == "open" and "Left out: dcp8-stock (reasons below)." in text


def test_unstable_cells_are_shown_and_explained(tmp_path: Path) -> None:
    """Served one in two seconds while one arrives each second."""
    cells = pair(0.0, 0.001) | {CellKey("tp8", 2.0, 0): run_of(3, 0.0, grow_s=1.0)}
    store = written(tmp_path, cells)
    page = text_of(store)
    assert "Cells that do not count" in page and "unstable: the backlog grows by" in page
    assert said(store)["Trust"][1].startswith("1 of 9 cells do not count (tp8 at 2 QPS; reasons below).")
    assert "tp8 from 2 QPS" in said(store)["Load"][1]
    assert "| unstable | unstable " in (store.path / "table.md").read_text()


def test_where_no_rate_counts_in_both_arms_the_busiest_is_told(tmp_path: Path) -> None:
    """tp8 falls behind at the one rate that was measured; its later tokens are told all the same."""
    cells = {CellKey("tp8", 2.0, 0): run_of(3, 0.0, grow_s=1.0), CellKey("dcp8", 2.0, 0): run_of(4, 0.0)}
    store = written(tmp_path, cells)
    text = said(store)["Whole answers"][1]
    assert text.startswith("At 2 QPS, the highest rate measured in every arm, medians: a later token takes")
    assert "tp8 100.0 ms, dcp8 100.0 ms; a whole answer tp8 (unstable), dcp8 399 ms." in text
    assert "1 repeat at a boundary" in said(store)["Load"][1]
    assert "none, unstable at 2" in markdown_report(build_summary(store.manifest, list(store.cells())))


def test_a_failed_parity_leaves_no_headline(tmp_path: Path) -> None:
    parity = {"ok": False, "compared": 3, "diverged": [], "refusal": "parity refused: prompt p0 <b>"}
    store = written(tmp_path, pair(0.05, 0.001), parity=parity)
    page = text_of(store)
    assert "<h2>Result</h2>" not in page and "highest passing QPS" not in page
    assert "<strong>parity refused: prompt p0 &lt;b&gt;</strong>" in page
    assert list(said(store)) == ["No comparison"]
    assert "Paired differences" not in (store.path / "table.md").read_text() and "dcp8 - tp8" not in page
    assert len((store.path / "paired.csv").read_text().splitlines()) == 1


def test_limits_by_rule(tmp_path: Path) -> None:
    rules = [vars(Rule.parse("short=0.34@p90:0-20")), vars(Rule.parse("long=0.1:21-99"))]
    limits = manifest(TRACE)["limits"] | {"rules": rules}
    store = written(tmp_path, pair(0.05, 0.001), limits=limits)
    table = markdown_report(build_summary(store.manifest, list(store.cells())))
    assert "short: 90 % of requests of 0 to 20 prompt tokens within 0.34 s | tp8  | >= 1 " in table
    assert "short: 90 % of requests of 0 to 20 prompt tokens within 0.34 s | dcp8 | none " in table
    assert "long: every request of 21 to 99 prompt tokens within 0.1 s " in table


def test_a_request_that_misses_in_every_repeat_is_one_request(tmp_path: Path) -> None:
    """Its limit is missed by r0000 in both repeats of tp8, by it in one and by r0001 in one of dcp8's; dcp8's third
    repeat has none beside it."""

    def missing(*late: int) -> CellRun:
        run = run_of(0, 0.0)
        records = [
            replace(r, first_token_s=r.due_s + 0.9) if index in late else r
            for index, r in enumerate(run.records)
        ]
        return replace(run, records=records)

    late = {("tp8", 0): (0,), ("tp8", 1): (0,), ("dcp8", 0): (0,), ("dcp8", 1): (1,), ("dcp8", 2): (2, 3, 4)}
    cells = {CellKey(arm, 1.0, repeat): missing(*found) for (arm, repeat), found in late.items()}
    limits = manifest(TRACE)["limits"] | {"applied": {"15": 0.8, "25": 2.0}}
    store = written(tmp_path, cells, limits=limits)
    (found,) = build_summary(store.manifest, list(store.cells()))["paired"]
    assert found["mcnemar"]["15"] == {"more_first": 1, "more_other": 1, "p": 1.0}
    assert found["mcnemar"]["25"]["p"] == 1.0


def rules_told(folder: Path, cells: dict[CellKey, CellRun], *rules: str) -> dict[str, list[str]]:
    """Of each rule what its table says of tp8: highest passing and first failing rate."""
    limits = manifest(TRACE)["limits"] | {"rules": [vars(Rule.parse(rule)) for rule in rules]}
    store = written(folder, cells, limits=limits)
    rows = rule_table(build_summary(store.manifest, list(store.cells()))).rows
    return {text.partition(":")[0]: list(told) for text, arm, *told in rows if arm == "tp8"}


def test_a_rule_that_too_few_requests_can_tell_is_unknown(tmp_path: Path) -> None:
    """P99 needs 200 requests, and 72 sent four times are 72; "none" would read as passing nowhere."""
    told = rules_told(tmp_path, pair(0.05, 0.0), "tail=1@p99", "most=1@p95", "never=0.1")
    assert told == {"tail": ["unknown", "none"], "most": [">= 1", "none"], "never": ["none", "1"]}


def test_an_unstable_cell_bounds_a_rule_as_well(tmp_path: Path) -> None:
    cells = {CellKey("tp8", 1.0, 0): run_of(0, 0.0), CellKey("tp8", 2.0, 0): run_of(1, 0.0, grow_s=1.5)}
    assert rules_told(tmp_path, cells, "all=200") == {"all": ["1", "2"]}


def test_an_interval_of_a_cell_counts_requests_that_wait_for_one_another_as_fewer(tmp_path: Path) -> None:
    """A request a second: of tp8 each is answered before the next comes, of dcp8 after that."""
    cells = {CellKey("tp8", 1.0, 0): run_of(0, 0.0), CellKey("dcp8", 1.0, 0): run_of(0, 1.0)}
    store = written(tmp_path, cells)
    summary = build_summary(store.manifest, list(store.cells()))
    idle, queued = (arm["cells"][0] for arm in summary["arms"])
    assert idle["independent_requests"] == 72 and queued["independent_requests"] == 0
    assert idle["ttft_interval_s"]["p50"]["low"] == pytest.approx(0.3, abs=0.01)
    assert queued["ttft_interval_s"]["p50"] is None and queued["ttft_s"]["p50"] is not None
    assert idle["miss_interval"]["25"]["high"] < 0.06 and queued["miss_interval"]["25"]["high"] == 1.0
    page = text_of(store)
    assert "n too small: waiting for one another, 72 requests count as 0" in page and INTERVAL_NOTE in page


class Checker(HTMLParser):
    """Every tag closed in order, ids unique, nothing loaded from elsewhere."""

    VOID = frozenset(("meta", "br", "link", "img"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.loaded += [
            value or "" for name, value in attrs if name in ("src", "href") or name.endswith(":href")
        ]

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()


def test_the_page_is_whole_and_alone(tmp_path: Path) -> None:
    page = text_of(written(tmp_path, pair(0.05, 0.001)))
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert all(link.startswith("#") for link in checker.loaded)
    assert "@import" not in page and "url(http" not in page
    assert len(page) < 1_000_000


def test_every_mark_tells_its_value(tmp_path: Path) -> None:
    page = text_of(written(tmp_path, pair(0.05, 0.001)))
    start = page.index("<svg")
    svg = ElementTree.fromstring(page[start : page.index("</svg>", start) + len("</svg>")])
    tips = [node.attrib["data-tip"] for node in svg.iter() if node.get("class") == "tip"]
    assert len(tips) == 2 * 2 * 4  # arms, P50 and P90, repeats
    assert any(tip.startswith("dcp8 P50 at 1 QPS, repeat 3: 0.3") and "n 72" in tip for tip in tips)


def test_an_interval_stands_at_its_mark(tmp_path: Path) -> None:
    """Marks of the second arm stand aside, and their intervals with them."""
    cells = {CellKey(arm, rate, 0): run_of(3, 0.0) for arm in ("tp8", "dcp8") for rate in (1.0, 2.0)}
    store = written(tmp_path, cells)
    kept = list(store.cells())
    draw_ttft(plot := Plot("ttft"), build_summary(store.manifest, kept), kept)
    (axes,) = plot.figure.axes
    marks = {float(line.get_xdata()[0]) for line in axes.lines if line.get_gid()}
    intervals = {float(bar.get_segments()[0][0][0]) for bar in axes.collections}
    assert len(marks) == 4 and intervals == marks


def test_names_from_a_run_cannot_break_the_page(tmp_path: Path) -> None:
    page = text_of(written(tmp_path, pair(0.0, 0.0), notes=["</main><script>alert(1)</script>"]))
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_pairs_for_a_spreadsheet(tmp_path: Path) -> None:
    write_report(store := written(tmp_path, pair(0.05, 0.001)))
    rows = list(csv.DictReader(io.StringIO((store.path / "paired.csv").read_text())))
    assert len(rows) == 4 * 72
    deltas = [float(row["ttft_other_s"]) - float(row["ttft_first_s"]) for row in rows]
    assert np.median(deltas) == pytest.approx(0.05, abs=0.01)
