# SPDX-License-Identifier: Apache-2.0
import os
import subprocess
import sys
from pathlib import Path


def test_owner_equals_attention_over_the_whole_context() -> None:
    """W = 1, 2, 4, 8 and two interleaves: every rank's combined output, through real collectives, within 1e-5."""
    cases = ["1:1", "2:1", "4:1", "8:1", "4:16", "2:4"]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("dcp_ranks.py")), *cases],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    agreed = [line for line in done.stdout.splitlines() if line in cases]
    assert agreed == cases, done.stderr[-3000:]
