# SPDX-License-Identifier: Apache-2.0
"""One process at a time in a run's folder; what else files.py promises is shown where it is used (test_gates.py)."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from builders import manifest, small_trace

from harness.cli import main
from harness.errors import UserError
from harness.files import claim
from harness.store import RunStore

HOLD = """
import sys
from pathlib import Path

from harness.files import claim

claim(Path(sys.argv[1]))
print(1, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_one_process_s_until_it_dies(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout and other.stdout.readline() == b"1\n"
        (tmp_path / "trace.jsonl.gz").touch()  # a run that is just starting has no manifest yet
        (tmp_path / "manifest.json.1.tmp").touch()
        with pytest.raises(UserError, match=r"another process is at work in .*; wait for it, or choose"):
            RunStore.resume(tmp_path, {}, trace=None)  # type: ignore[arg-type]
        assert len(list(tmp_path.iterdir())) == 2
        other.send_signal(signal.SIGKILL)
        other.wait()
    claim(tmp_path)
    claim(tmp_path)  # its own already


def test_the_next_report_removes_what_a_killed_one_left_half_written(tmp_path: Path) -> None:
    """And nothing of a process that still writes."""
    run, trace = tmp_path / "run [1]", small_trace()
    RunStore.create(run, manifest(trace), trace)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as killed:
        killed.wait()
    (run / f"summary.json.{killed.pid}.tmp").touch()
    (run / f"report.html.{killed.pid}.tmp").touch()
    (run / f"table.md.{os.getppid()}.tmp").touch()
    assert main(["report", str(run)]) == 0
    assert [path.name for path in run.glob("*.tmp")] == [f"table.md.{os.getppid()}.tmp"]
