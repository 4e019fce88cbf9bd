# SPDX-License-Identifier: Apache-2.0
"""A run's cells and paired requests as CSV, for spreadsheets. Pure."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.report.table import LIMITS
from harness.report.tables import each_cell


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
            "launch",
            "n",
            "failed",
            "achieved_qps",
            "ttft_p50_s",
            "ttft_p90_s",
            "ttft_p99_s",
            "tpot_p50_s",
            "answer_p50_s",
        ]
        + [f"miss_{name}" for name in LIMITS]
        + [f"limit_{name}_applied_s" for name in LIMITS]
        + ["scale", "trace_sha256"]
        + ["slip_p99_ms", "loop_lag_p99_ms", "backlog_slope_rps", *metrics, "valid", "invalid_reasons"]
    )
    for arm, cell in each_cell(summary):
        writer.writerow(
            [
                arm["name"],
                cell["offered_qps"],
                cell["repeat"],
                cell["launch"],
                cell["n"],
                cell["failed"],
                cell["achieved_qps"],
            ]
            + [cell["ttft_s"][f"p{percent}"] for percent in (50, 90, 99)]
            + [cell["tpot_s"]["p50"], cell["answer_s"]["p50"]]
            + [cell["miss"][name] for name in LIMITS]
            + [summary["limits"][name] for name in LIMITS]
            + [summary["scale"], summary["trace_sha256"]]
            + [cell["slip_p99_ms"], cell["loop_lag_p99_ms"], cell["backlog_slope_rps"]]
            + [cell["metrics"].get(name) for name in metrics]
            + [str(cell["valid"]).lower(), "; ".join(cell["invalid_reasons"])]
        )
    return out.getvalue()


def paired_csv(pairs: Iterable[Sequence[Any]]) -> str:
    """One line for each request of each comparison; see `differences.paired_ttft`."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["first", "other", "offered_qps", "repeat", "id", "prompt_tokens", "ttft_first_s", "ttft_other_s"]
    )
    writer.writerows(pairs)
    return out.getvalue()
