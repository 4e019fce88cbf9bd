# SPDX-License-Identifier: Apache-2.0
"""Both arms' real engines at once; a rank of one of them is killed in the middle of a cell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def test_resident_pair_survives_a_killed_rank(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = "--resident --quick --requests 4 --cohort-size 2 --output-tokens 8 --absolute-rates --rates 0.5"
    words += " --sla 15,25 --parity-lengths 40,1290 --lone-prompts 1 --kill dcp2"
    command = [sys.executable, "-m", "harness", "bench", *words.split()]
    done = subprocess.run(
        [*command, "--out", str(run), "--cache", str(tmp_path)], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    manifest = json.loads((run / "manifest.json").read_text())
    (death,) = manifest["deaths"]
    assert death["arm"] == "dcp2" and death["cells"] == ["dcp2_q0.5_r0"] and death["restart_s"] > 0
    summary = json.loads((run / "summary.json").read_text())
    for arm in summary["arms"]:
        (cell,) = arm["cells"]
        assert cell["n"] == 4 and cell["failed"] == 0
    assert summary["parity"]["ok"] and (run / "set_aside" / "dcp2_q0.5_r0-1.parquet").exists()
    assert (run / "residency-1.json").exists()
    proof = json.loads((run / "proof" / "dcp2" / "rank-1.json").read_text())
    assert proof["features"]["prefill_context_gather"]["active"] and "prefill_kv_shared" in proof["used"]
