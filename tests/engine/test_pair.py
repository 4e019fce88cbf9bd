# SPDX-License-Identifier: Apache-2.0
"""The product's main job, short: a real TP2 / DCP2 pair, two rates, few requests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def test_a_short_real_pair(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "harness", "bench", "--quick", "--out", str(run), "--cache", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((run / "summary.json").read_text())
    tp2, dcp2 = summary["arms"]
    assert (tp2["name"], tp2["topology"]) == ("tp2", {"tp": 2, "dcp": 1, "ep": 1, "nodes": 1})
    assert (dcp2["name"], dcp2["topology"]) == ("dcp2", {"tp": 2, "dcp": 2, "ep": 1, "nodes": 1})
    assert dcp2["kv_bytes"] == tp2["kv_bytes"] and dcp2["kv_tokens"] == 2 * tp2["kv_tokens"]
    assert summary["parity"]["ok"] and summary["parity"]["compared"] > 0
    assert set(summary["limits"]) == {"15", "25"} and summary["scale"] == 0.01
    for arm in (tp2, dcp2):
        assert [cell["offered_qps"] for cell in arm["cells"]] == sorted(
            cell["offered_qps"] for cell in tp2["cells"]
        )
        assert all(cell["n"] == 8 and cell["failed"] == 0 for cell in arm["cells"])
    proof = json.loads((run / "proof" / "dcp2" / "rank-1.json").read_text())
    assert set(proof["used"]) == {"decode_merge", "prefill_context_gather", "prefill_kv_shared"}
    assert proof["prefill_kv"]["transport"] == "shared"
    assert "| dcp2" in done.stdout and (run / "plots" / "ttft.png").exists()
