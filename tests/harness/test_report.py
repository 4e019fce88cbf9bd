# SPDX-License-Identifier: Apache-2.0
"""From recorded cells to summary.json, tables and plots."""

import csv
import io
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import cell_run, manifest, small_trace

from harness import report
from harness.load import CellRun
from harness.report import build_summary, write_report
from harness.report.tables import markdown_report, percentile_text, topology_text
from harness.scrape import Sample
from harness.store import CellKey, RunStore

TRACE = small_trace()
SAMPLES = [
    Sample(1000.0 + 20 * t, running=float(t), waiting=1.0, kv_usage=t / 10, waiting_capacity=2.0)
    for t in range(5)
]


def store_of(path: Path, cells: dict[CellKey, CellRun], **changes: Any) -> RunStore:
    store = RunStore.create(path, manifest(TRACE, **changes), TRACE)
    for key, run in cells.items():
        store.write_cell(key, run, SAMPLES, trace_sha256=TRACE.sha256, cache_salt="s", engine={"vllm": "0"})
    return store


def summary_of(path: Path, cells: dict[CellKey, CellRun], **changes: Any) -> dict[str, Any]:
    store = store_of(path, cells, **changes)
    return build_summary(store.manifest, list(store.cells()))


FAST = cell_run([0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
SLOW = cell_run([0.6, 0.7, 0.8, 0.9, 1.0, 1.5])
FAILING = cell_run([0.6, 0.7, 0.8, None, None, 2.5])
PAIR = {
    CellKey("tp2", 1.0, 0): FAST,
    CellKey("tp2", 2.0, 0): FAILING,
    CellKey("dcp2", 1.0, 0): SLOW,
    CellKey("dcp2", 2.0, 0): FAST,
}


def test_records_come_back_whole(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run", {CellKey("tp2", 0.25, 1): FAILING})
    (cell,) = store.cells()
    assert cell.key == CellKey("tp2", 0.25, 1)
    assert cell.records == FAILING.records
    assert [sample["running"] for sample in cell.samples] == [0, 1, 2, 3, 4]
    assert cell.samples[0]["preemptions_total"] is None
    assert cell.facts["loop_lag_ms"] == {"p50": 1.0, "p99": 1.0, "max": 1.0}
    assert cell.facts["engine"] == {"vllm": "0"}
    assert (tmp_path / "run" / "cells" / "tp2_q0.25_r1.parquet").exists()


def test_a_rebuilt_report_is_the_same_to_the_byte(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run", PAIR)
    write_report(store)
    outputs = [
        store.path / name for name in ("summary.json", "table.md", "cells.csv", "paired.csv", "report.html")
    ]
    outputs += [
        store.path / "plots" / f"{name}.{kind}"
        for name in ("ttft", "miss", "paired", "distribution", "engine")
        for kind in ("png", "svg")
    ]
    first = {path: path.read_bytes() for path in outputs}
    assert all(first.values())
    for path in outputs:
        path.unlink()
    write_report(RunStore.open(tmp_path / "run"))
    assert {path: path.read_bytes() for path in outputs} == first


def test_the_summary_holds_what_other_programs_rely_on(tmp_path: Path) -> None:
    summary = summary_of(tmp_path / "run", PAIR)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert {"schema", "trace_sha256", "scale", "limits", "arms", "paired", "parity"} <= summary.keys()
    assert (summary["schema"], summary["trace_sha256"], summary["parity"]) == (1, TRACE.sha256, None)
    assert summary["limits"] == {"15": 1.0, "25": 2.0}
    arm = summary["arms"][0]
    assert {"name", "topology", "kv_tokens", "kv_bytes", "fixed_cohort", "cells"} <= arm.keys()
    assert arm["topology"] is arm["kv_tokens"] is arm["kv_bytes"] is None
    assert arm["highest_passing_qps"].keys() == arm["first_miss_qps"].keys() == {"15", "25"}
    assert {"name", "n", "ttft_p50_s"} <= arm["fixed_cohort"].keys()
    cell = arm["cells"][0]
    assert cell.keys() >= {
        "offered_qps", "repeat", "valid", "invalid_reasons", "n", "failed", "achieved_qps", "ttft_s", "miss",
        "slip_p99_ms",
    }  # fmt: skip
    assert cell["ttft_s"].keys() == {"p50", "p90", "p99"}
    assert summary["paired"][0].keys() >= {"offered_qps", "n", "ttft_delta_p50_s"}


def test_miss_accounting(tmp_path: Path) -> None:
    """FAILING: TTFT 0.6, 0.7, 0.8, failed, failed, 2.5 under limits of 1 and 2 s: three of six miss both."""
    tp2, dcp2 = summary_of(tmp_path / "run", PAIR)["arms"]
    fast, failing = tp2["cells"]
    assert fast["miss"] == {"15": 0.0, "25": 0.0}
    assert failing["miss"] == {"15": 0.5, "25": 0.5}
    assert (failing["n"], failing["failed"], failing["valid"]) == (6, 2, True)
    assert failing["ttft_s"] == {"p50": pytest.approx((0.8 + 2.5) / 2), "p90": None, "p99": None}
    assert tp2["highest_passing_qps"] == {"15": 1.0, "25": 1.0}
    assert tp2["first_miss_qps"] == {"15": 2.0, "25": 2.0}
    assert dcp2["highest_passing_qps"] == {"15": None, "25": 2.0}
    assert dcp2["first_miss_qps"] == {"15": 1.0, "25": None}
    assert dcp2["first_failing_qps"] == {"15": 1.0, "25": None}


def test_a_rate_above_which_nothing_failed_is_no_boundary(tmp_path: Path) -> None:
    """tp2 misses at 2 QPS; dcp2 was not measured there, or its client was late: 1 QPS is all that is known."""
    for name, more in (
        ("unmeasured", {}),
        ("late", {CellKey("dcp2", 2.0, 0): replace(FAST, loop_lag_s=[9.0])}),
    ):
        cells = {CellKey("tp2", 1.0, 0): FAST, CellKey("tp2", 2.0, 0): FAILING, CellKey("dcp2", 1.0, 0): FAST}
        text = markdown_report(summary_of(tmp_path / name, cells | more))
        assert "tp2 passes 1 QPS, dcp2 passes at least 1 QPS (nothing higher was shown not to pass)" in text
        assert "| >= 1 " in text
    unknown = {CellKey("tp2", 1.0, 0): replace(FAST, loop_lag_s=[9.0])}
    assert "tp2 passes an unknown rate" in markdown_report(summary_of(tmp_path / "unknown", unknown))


def test_answers_of_different_lengths_are_told(tmp_path: Path) -> None:
    short = replace(FAST, records=[replace(FAST.records[0], completion_tokens=1), *FAST.records[1:]])
    same = {CellKey("tp2", 1.0, 0): FAST, CellKey("dcp2", 1.0, 0): SLOW}
    assert summary_of(tmp_path / "same", same)["other_lengths"] == 0
    summary = summary_of(tmp_path / "run", same | {CellKey("dcp2", 1.0, 0): short})
    assert "1 request got answers of different lengths" in markdown_report(summary)


def test_a_boundary_is_not_where_the_client_was_late(tmp_path: Path) -> None:
    """Both pass 1 QPS. tp2 may stop anywhere from there to 2 QPS, at which it misses: at 1.5 its client was late."""
    late = replace(FAST, loop_lag_s=[9.0])
    cells = {
        CellKey(arm, rate, repeat): FAILING if rate == 2.0 else late if (arm, rate) == ("tp2", 1.5) else FAST
        for repeat in range(3)
        for arm in ("tp2", "dcp2")
        for rate in (1.0, 1.5, 2.0)
    }
    summary = summary_of(tmp_path / "run", cells)
    assert [part["interval_qps"] for part in summary["boundary_difference"]] == 2 * [
        {"low": pytest.approx(-0.5), "high": pytest.approx(1.0)}
    ]


def test_a_cell_too_short_to_tell_a_growing_backlog_says_so(tmp_path: Path) -> None:
    summary = summary_of(tmp_path / "run", PAIR)
    assert [cell["stability_known"] for arm in summary["arms"] for cell in arm["cells"]] == [False] * 4
    assert "4 cells have too few requests to tell whether the backlog grows." in markdown_report(summary)


def test_achieved_rate_counts_successes_only(tmp_path: Path) -> None:
    """FAILING: four succeed, the last of them at 5 + 2.5 + 0.1 s."""
    cell = summary_of(tmp_path / "run", PAIR)["arms"][0]["cells"][1]
    assert cell["achieved_qps"] == pytest.approx(4 / 7.6)
    nothing = {CellKey("tp2", 1.0, 0): cell_run([None] * 6)}
    assert summary_of(tmp_path / "none", nothing)["arms"][0]["cells"][0]["achieved_qps"] is None


def test_fixed_cohort_pools_repeats_at_the_lowest_rate_valid_everywhere(tmp_path: Path) -> None:
    aborted = replace(FAST, aborted=True)
    cells = PAIR | {
        CellKey("dcp2", 1.0, 1): aborted,
        CellKey("tp2", 2.0, 1): FAST,
        CellKey("dcp2", 2.0, 1): SLOW,
    }
    tp2, dcp2 = summary_of(tmp_path / "run", cells)["arms"]
    # At 1 QPS one repeat of dcp2 does not count. At 2 QPS cohort 1 (requests 3 to 5) of two repeats:
    # tp2 failed, failed, 2.5, 0.8, 0.9, 0.95; dcp2 0.8, 0.9, 0.95, 0.9, 1.0, 1.5.
    assert tp2["fixed_cohort"] == {
        "name": "1",
        "n": 6,
        "requests": 3,
        "ttft_p50_s": pytest.approx((0.95 + 2.5) / 2),
        "offered_qps": 2.0,
    }
    assert dcp2["fixed_cohort"] == {
        "name": "1",
        "n": 6,
        "requests": 3,
        "ttft_p50_s": pytest.approx(0.925),
        "offered_qps": 2.0,
    }


def test_fixed_cohort_without_a_common_rate(tmp_path: Path) -> None:
    cells = {CellKey("tp2", 1.0, 0): FAST, CellKey("dcp2", 1.0, 0): replace(FAST, aborted=True)}
    summary = summary_of(tmp_path / "run", cells)
    assert summary["arms"][0]["fixed_cohort"]["ttft_p50_s"] is None
    assert summary["arms"][0]["at_load"]["answer_p50_s"] is None
    assert "no offered rate has valid cells in every measured arm" in markdown_report(summary)


def test_an_arm_that_was_not_measured_takes_nothing_from_the_others(tmp_path: Path) -> None:
    three = summary_of(tmp_path / "three", PAIR, arms=("tp2", "dcp2", "dcp2-stock"))
    two = summary_of(tmp_path / "two", PAIR)
    assert three["arms"][0]["fixed_cohort"]["ttft_p50_s"] is not None
    for name in ("fixed_cohort", "at_load"):
        assert [arm[name] for arm in three["arms"][:2]] == [arm[name] for arm in two["arms"]]


def test_what_follows_the_first_token_stands_beside_it(tmp_path: Path) -> None:
    """Two tokens 0.1 s apart; the answer ends with the second. At 2 QPS, the highest rate valid in both arms."""
    summary = summary_of(tmp_path / "run", PAIR)
    tp2, dcp2 = summary["arms"]
    assert dcp2["at_load"] == {
        "offered_qps": 2.0,
        "n": 6,
        "unstable": False,
        "tpot_p50_s": pytest.approx(0.1),
        "answer_p50_s": pytest.approx(0.85),
    }
    assert tp2["cells"][0]["answer_s"] == {"p50": pytest.approx(0.85), "p90": None, "p99": None}
    text = markdown_report(summary)
    assert "P50 per later token at 2 QPS | P50 whole answer at 2 QPS" in text
    assert (
        "a later token takes tp2 100.0 ms, dcp2 100.0 ms (not paired). The whole answer of dcp2 ends" in text
    )


def test_the_rate_at_which_a_trace_really_arrives(tmp_path: Path) -> None:
    """Due at 0, 1, ... 5 s, offered at 1 and 2 QPS by name."""
    summary = summary_of(tmp_path / "run", {CellKey("tp2", 2.0, 0): FAST})
    assert summary["arms"][0]["cells"][0]["arrived_qps"] == 1.0
    assert summary["arrived_over_offered"] == 0.5
    text = markdown_report(summary)
    assert "Its requests arrive at 0.5 times the offered rate" in text
    assert "Rates are nominal: this trace's requests arrive at 0.50 times them." in text
    exact = markdown_report(summary_of(tmp_path / "exact", {CellKey("tp2", 1.0, 0): FAST}))
    assert "nominal" not in exact


def test_pairs_are_of_the_same_request_and_valid_in_both_arms(tmp_path: Path) -> None:
    aborted = replace(SLOW, aborted=True)
    summary = summary_of(
        tmp_path / "run", PAIR | {CellKey("tp2", 3.0, 0): FAST, CellKey("dcp2", 3.0, 0): aborted}
    )
    low, high = summary["paired"]
    assert {name: low[name] for name in ("arms", "offered_qps", "n", "ttft_delta_p50_s")} == {
        "arms": ["tp2", "dcp2"],
        "offered_qps": 1.0,
        "n": 6,
        "ttft_delta_p50_s": pytest.approx(0.1),
    }
    # dcp2 - tp2 at 2 QPS: -0.1, -0.1, -0.1, -inf, -inf, -1.55
    assert (high["n"], high["ttft_delta_p50_s"]) == (6, pytest.approx((-0.1 - 1.55) / 2))


def test_an_invalid_cell_stays_out_of_the_headline(tmp_path: Path) -> None:
    summary = summary_of(tmp_path / "run", PAIR | {CellKey("tp2", 1.0, 0): replace(FAST, aborted=True)})
    tp2 = summary["arms"][0]
    assert tp2["highest_passing_qps"] == {"15": None, "25": None}
    assert tp2["cells"][0]["invalid_reasons"] == ["interrupted"]
    assert [pair["offered_qps"] for pair in summary["paired"]] == [2.0]


def test_shared_cores_widen_the_allowance(tmp_path: Path) -> None:
    late = replace(FAST, loop_lag_s=[0.03] * 10)
    strict = summary_of(tmp_path / "a", {CellKey("tp2", 1.0, 0): late})
    wide = summary_of(tmp_path / "b", {CellKey("tp2", 1.0, 0): late}, shared_cores=True)
    assert not strict["arms"][0]["cells"][0]["valid"]
    assert wide["arms"][0]["cells"][0]["valid"]
    assert "10 ms" in markdown_report(strict)
    assert "50 ms" in markdown_report(wide)


def test_tables(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run", PAIR, notes=["computation binds first"])
    text = write_report(store)
    for expected in (
        "Scale 1",
        TRACE.sha256[:12],
        "source 15 s applied as 1 s",
        "for the test",
        "n too small",
        "unknown",
        "computation binds first",
        "Parity: not checked",
        "cohort 1",
        "dcp2 - tp2",
        "waiting to be scheduled, mean",
    ):
        assert expected in text
    assert (store.path / "table.md").read_text() == text
    rows = list(csv.DictReader(io.StringIO((store.path / "cells.csv").read_text())))
    for row in rows:  # each line can be read alone
        assert row["trace_sha256"] == TRACE.sha256 and float(row["scale"]) == TRACE.scale
        limits = [float(row[f"limit_{name}_applied_s"]) for name in ("15", "25")]
        assert limits == list(store.manifest["limits"]["applied"].values())
    assert [(row["arm"], row["offered_qps"], row["miss_15"], row["ttft_p99_s"]) for row in rows] == [
        ("tp2", "1.0", "0.0", ""),
        ("tp2", "2.0", "0.5", ""),
        ("dcp2", "1.0", str(1 / 6), ""),
        ("dcp2", "2.0", "0.0", ""),
    ]


def test_why_a_percentile_has_no_number() -> None:
    def cell(n: int) -> dict[str, Any]:
        return {"n": n, "ttft_s": {"p50": None, "p90": None, "p99": 1.0}}

    assert percentile_text(cell(19), 90) == "n too small"
    assert percentile_text(cell(20), 90) == "failures"
    assert percentile_text(cell(1), 50) == "failures"
    assert percentile_text(cell(200), 99) == "1.000"


def test_topology() -> None:
    assert topology_text(None) == "unknown"
    assert topology_text({"tp": 2, "dcp": 2, "ep": 1, "nodes": 1}) == "TP2 DCP2"
    assert topology_text({"tp": 8, "dcp": 1, "ep": 8, "nodes": 2}) == "TP8 EP8 2 nodes"


def test_a_run_without_cells_or_metrics_is_reported(tmp_path: Path) -> None:
    assert "Result" in write_report(store_of(tmp_path / "empty", {}))
    bare = RunStore.create(tmp_path / "bare", manifest(TRACE), TRACE)
    bare.write_cell(CellKey("tp2", 1.0, 0), cell_run([None] * 6), trace_sha256=TRACE.sha256, cache_salt="")
    assert "Result" in write_report(bare)
    assert (tmp_path / "bare" / "plots" / "engine.png").exists()


@pytest.mark.usefixtures("hangups_are_heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_waits_for_the_whole_report(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_of(tmp_path / "run", PAIR)
    draw = report.write_plots

    def interrupted(*arguments: Any) -> None:
        os.kill(os.getpid(), number)
        draw(*arguments)

    monkeypatch.setattr(report, "write_plots", interrupted)
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        write_report(store)
    assert signal.getsignal(number) == before
    names = {path.relative_to(store.path).as_posix() for path in store.path.rglob("*") if path.is_file()}
    assert {"report.html", "plots/engine.png", "plots/engine.svg", "plots/ttft.svg"} <= names
    assert not [name for name in names if name.endswith(".tmp")]


def test_time_per_output_token(tmp_path: Path) -> None:
    """Two tokens in 0.1 s after the first; four in one chunk count as four; one alone tells nothing."""
    run = cell_run([0.5, 0.5, 0.5])
    records = [
        replace(run.records[0], token_s=[1.0, 1.05, 1.1], token_counts=[1, 2, 3]),
        replace(run.records[1], token_s=[1.0, 1.4], token_counts=[1, 5]),
        replace(run.records[2], token_s=[1.0], token_counts=[1]),
    ]
    cells = {CellKey("tp2", 1.0, 0): replace(run, records=records), CellKey("tp2", 2.0, 0): FAILING}
    first, failing = summary_of(tmp_path / "run", cells)["arms"][0]["cells"]
    assert first["tpot_s"]["p50"] == pytest.approx((0.05 + 0.1) / 2)
    assert failing["tpot_s"]["p50"] == pytest.approx(0.1)  # the failures lie beyond it


def test_a_report_of_fewer_cells_leaves_no_old_plot(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run", PAIR)
    write_report(store)
    (store.path / "plots" / "mine.png").write_bytes(b"")
    for path in (store.path / "cells").iterdir():
        path.unlink()
    write_report(store)
    assert [path.name for path in (store.path / "plots").iterdir()] == ["mine.png"]


def test_ranks_on_one_core_show_no_speed(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run", PAIR)
    manifest, cells = store.manifest, list(store.cells())
    for arm, cores in zip(manifest["arms"], ("0|1", "0|0"), strict=True):
        arm["engine"] = {"environment": {"VLLM_CPU_OMP_THREADS_BIND": cores}}
    said = "Ranks of dcp2 share cores: whether it works is shown, how fast it is not."
    assert said in markdown_report(build_summary(manifest, cells))
    manifest["arms"][1]["engine"] = None
    assert said not in markdown_report(build_summary(manifest, cells))


def test_a_note_says_where_vllms_nccl_wrapper_was_disabled(tmp_path: Path) -> None:
    """Only where several ranks' proofs speak of it: older runs are reported as before."""
    store = store_of(tmp_path / "run", PAIR)
    manifest, cells = store.manifest, list(store.cells())
    disabled = {"active": False, "reason": "NCCL 2.28.3 lacks ncclCommSuspend"}

    def notes(state: dict[str, Any] | None, ranks: int = 2) -> list[str]:
        features = {"cuda_graphs": {"active": False, "reason": ""}} | ({"vllm_nccl": state} if state else {})
        proofs = [{"rank": rank, "world_size": ranks, "features": features} for rank in range(ranks)]
        for arm in manifest["arms"]:
            arm["engine"] = {"ranks": proofs}
        summary = build_summary(manifest, cells)
        assert all(f"Note: {note}" in markdown_report(summary) for note in summary["notes"])
        found: list[str] = summary["notes"]
        return found

    assert notes(disabled) == [
        "vLLM's own NCCL wrapper was disabled in tp2, dcp2, collectives went through torch.distributed:"
        " NCCL 2.28.3 lacks ncclCommSuspend."
    ]
    assert notes(disabled, ranks=1) == notes({"active": True, "reason": "NCCL 2.29.7"}) == notes(None) == []


def test_a_note_says_where_others_held_memory_of_the_gpus(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run", PAIR)
    manifest, cells = store.manifest, list(store.cells())

    def gpus(*used: str) -> list[dict[str, str]]:
        return [{"memory.used": amount} for amount in used]

    manifest["sessions"] = [
        {"gpus": gpus("0 MiB", "1024 MiB"), "gpus_at_end": gpus("[N/A]", "3 MiB")},
        {"gpus": gpus("0 MiB", "2048 MiB")},  # ended without a word
        {"gpus": [], "gpus_at_end": gpus("6434 MiB", "6435 MiB")},
    ]
    ending = "by none of them; whatever held it may have disturbed the session."
    assert build_summary(manifest, cells)["notes"] == [
        f"Session 2: 2048 MiB of GPU 1 in use before its engines started, {ending}",
        f"Session 3: 6434 MiB of GPU 0, 6435 MiB of GPU 1 in use after its engines had ended, {ending}",
    ]


def test_a_note_says_which_sessions_ran_on_other_gpus(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run", PAIR)
    manifest, cells = store.manifest, list(store.cells())
    one, other = [{"uuid": "GPU-1"}, {"uuid": "GPU-2"}], [{"uuid": "GPU-1"}, {"uuid": "GPU-3"}]
    manifest["sessions"] = [
        {},
        {"gpus": one},
        {"gpus": other},
        {"gpus": one[::-1]},
        {"gpus": [{"name": "H200"}]},
    ]
    assert build_summary(manifest, cells)["notes"] == [
        "Session 3: other GPUs than those of Session 2, so launches differ by the GPUs as well."
    ]


def test_parity_is_passed_on(tmp_path: Path) -> None:
    parity: dict[str, Any] = {"ok": True, "compared": 12, "diverged": []}
    summary = summary_of(tmp_path / "run", PAIR, parity=parity)
    assert summary["parity"] == parity
    assert "Parity: passed, 12 compared, no other token." in markdown_report(summary)
