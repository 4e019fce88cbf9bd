# SPDX-License-Identifier: Apache-2.0
"""One process at a time in a run's folder; what else files.py promises is shown where it is used (test_gates.py)."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
