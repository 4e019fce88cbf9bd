# SPDX-License-Identifier: Apache-2.0
"""Which samples of a cell show a request that waits for the KV cache."""

from typing import Any

import pytest
from builders import cell_run, manifest, record, small_trace

from harness.client import RequestRecord
from harness.manifest import new_arm
from harness.report.kv_waits import KvWaits, kv_waits
from harness.report.summary import build_summary
from harness.report.verdict import findings
from harness.scrape import Sample
from harness.store import CellKey, RunStore


def request(index: int, tokens: int, first_token_s: float | None, done_s: float | None) -> RequestRecord:
    return record(
        id=f"r{index}", prompt_tokens=tokens, sent_s=0.1 * index, first_token_s=first_token_s, done_s=done_s
    )


RECORDS = [
    request(0, 500, 2.0, 8.0),
    request(1, 450, 6.0, 9.0),
    request(2, 600, None, None),
    request(3, 300, None, None),
]
"""The first decodes from 2 to 8 s, the second is prefilled after it, a long one and a short one wait."""


def sample(**changes: Any) -> dict[str, float | None]:
    return {"t_s": 3.0, "running": 1.0, "kv_usage": 0.5, "waiting_capacity": 1.0, **changes}


@pytest.mark.parametrize(
    ("seen", "kv"),
    [
        (sample(), 0),  # the second, 450 of 1,000 tokens, fits beside the half that is used
        (sample(kv_usage=0.56), 1),  # now it does not, far below a full cache
        (sample(running=2.0), 1),  # the second is being prefilled: the third, 600, does not fit
        (sample(running=2.0, kv_usage=0.39), 0),
        (sample(running=3.0), 0),  # so is the third: the fourth, 300, fits
        (sample(t_s=8.5, running=1.0), 1),  # the first has ended, the second decodes
        (sample(t_s=8.5, running=2.0), 0),
        (sample(t_s=-1.0, kv_usage=0.71), 1),  # nobody was sent yet: at least the shortest of the trace waits
        (sample(t_s=-1.0, kv_usage=0.69), 0),
        (sample(running=None, kv_usage=0.56), 1),
    ],
)
def test_the_next_prompt_must_fit_whole(seen: dict[str, float | None], kv: int) -> None:
    assert kv_waits([seen], RECORDS, 1000) == KvWaits(1, 1, kv)


def test_samples_are_counted_where_they_tell() -> None:
    samples = [
        sample(kv_usage=0.99),
        sample(),
        sample(kv_usage=0.99, waiting_capacity=0.0),  # full, but nobody waits
        sample(kv_usage=None),
        sample(waiting_capacity=None),
    ]
    assert kv_waits(samples, RECORDS, 1000) == KvWaits(samples=3, waiting=2, kv=1)


@pytest.mark.parametrize(
    ("samples", "kv_tokens"), [([], 1000), ([sample(kv_usage=None)], 1000), ([sample()], None)]
)
def test_unknown(samples: list[dict[str, float | None]], kv_tokens: int | None) -> None:
    assert kv_waits(samples, RECORDS, kv_tokens) is None


def test_the_shares_are_told_for_every_arm(tmp_path: Any) -> None:
    """Prompts of 10 tokens: one more does not fit into 20 tokens that are over half full, but into 40."""
    trace = small_trace()
    arms = [new_arm(name, "http://h", kv_tokens=tokens) for name, tokens in (("tp2", 20), ("dcp2", 40))]
    store = RunStore.create(tmp_path / "run", {**manifest(trace), "arms": arms}, trace)
    samples = [Sample(1000.0 + t, running=1, waiting_capacity=t % 2, kv_usage=0.6) for t in range(4)]
    for name, qps in (("tp2", 1.0), ("tp2", 2.0), ("tp2", 3.0), ("dcp2", 1.0), ("dcp2", 2.0)):
        store.write_cell(
            CellKey(name, qps, 0),
            cell_run([0.5] * 6),
            samples,
            trace_sha256=trace.sha256,
            cache_salt="s",
        )
    summary = build_summary(store.manifest, list(store.cells()))
    (told,) = [part.text for part in findings(summary) if part.title == "Waiting for the KV cache"]
    assert told.startswith("At 2 QPS, the highest rate measured in every arm")
    assert "did not fit into the free KV cache in 2 of 4 (tp2), 0 of 4 (dcp2) samples" in told
    assert told.endswith("it waited though it fitted in 0 (tp2), 2 (dcp2).")
