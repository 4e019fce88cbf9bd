# SPDX-License-Identifier: Apache-2.0
"""Small traces, records and cells for tests; every argument that a test does not name is harmless."""

from typing import Any

from harness.client import RequestRecord
from harness.load import CellRun, CellSpec
from harness.manifest import new_arm, new_manifest
from harness.sla import Limits
from harness.trace import Trace, make_trace


def small_trace(**changes: Any) -> Trace:
    """Six requests of 4 to 40 tokens in two cohorts, four tokens out, at constant gaps."""
    arguments: dict[str, Any] = {
        "requests": 6,
        "min_tokens": 4,
        "max_tokens": 40,
        "output_tokens": 4,
        "cohort_size": 3,
        "arrivals": "constant",
        "seed": 7,
        "vocab_size": 100,
    }
    return make_trace(**{**arguments, **changes})


def spec(offered_qps: float = 50.0, **changes: Any) -> CellSpec:
    arguments = {"repeat": 0, "cache_salt": "salt", "drain_timeout_s": 10.0, "request_timeout_s": 10.0}
    return CellSpec(offered_qps, **{**arguments, **changes})


def record(index: int = 0, ttft_s: float | None = 0.5, **changes: Any) -> RequestRecord:
    """A request due at `index` seconds that was served without a flaw; with `ttft_s` None it timed out."""
    due_s = float(index)
    served = ttft_s is not None
    arguments: dict[str, Any] = {
        "id": f"r{index:04d}",
        "cohort": index // 3,
        "limit_class": "default",
        "prompt_tokens": 10,
        "output_tokens": 2,
        "due_s": due_s,
        "dispatched_s": due_s + 0.001,
        "connected_s": due_s + 0.002,
        "sent_s": due_s + 0.003,
        "first_byte_s": due_s + 0.004,
        "first_token_s": due_s + ttft_s if served else None,
        "done_s": due_s + (ttft_s + 0.1 if served else 60.0),
        "token_s": [due_s + ttft_s, due_s + ttft_s + 0.1] if served else [],
        "token_counts": [1, 2] if served else [],
        "status": "ok" if served else "timeout",
        "http_status": 200,
        "completion_tokens": 2 if served else 0,
        "server_prompt_tokens": 10,
        "finish_reason": "length" if served else None,
    }
    return RequestRecord(**{**arguments, **changes})


def cell_run(ttft_s: list[float | None], **changes: Any) -> CellRun:
    records = [record(index, ttft) for index, ttft in enumerate(ttft_s)]
    arguments: dict[str, Any] = {
        "records": records,
        "loop_lag_s": [0.001] * 10,
        "started_unix_s": 1000.0,
        "aborted": False,
    }
    return CellRun(**{**arguments, **changes})


def manifest(trace: Trace, arms: tuple[str, ...] = ("tp2", "dcp2"), **changes: Any) -> dict[str, Any]:
    return {
        **new_manifest(
            trace=trace,
            trace_path="trace.jsonl",
            arms=[new_arm(name, f"http://127.0.0.1/{name}") for name in arms],
            rates=[1.0, 2.0],
            repeats=1,
            limits=Limits.of(1.0, 2.0, rule="for the test"),
            fixed_cohort=1,
            shared_cores=False,
        ),
        **changes,
    }
