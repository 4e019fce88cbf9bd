# SPDX-License-Identifier: Apache-2.0
"""A resident run of eight ranks an arm, against the fake engine."""

import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from builders import manifest, small_trace
from commands import measured, on_gpus, read

from harness.cli import main
from harness.engines.process import Engine
from harness.fleet import Fleet
from harness.run_folder import RunFolder
from harness.serving import on_cpu
from harness.steps import Steps
from harness.store import RunStore

pytestmark = pytest.mark.usefixtures("client_is_trusted")


def test_eight_ranks(tmp_path: Path) -> None:
    """Started, proven rank by rank, the last one killed in a cell, at equal bytes."""
    out = tmp_path / "run"
    assert main(on_gpus(out, "--kill", "dcp8", ranks=8)) == 0
    manifest = read(out / "manifest.json")
    assert [death["cells"] for death in manifest["deaths"]] == [["dcp8_q6_r0"]]
    assert [len(arm["engine"]["ranks"]) for arm in manifest["arms"]] == [8, 8, 8]
    assert [arm["kv_tokens"] for arm in manifest["arms"]] == [1_048_576, 8_388_608, 8_388_608]
    assert [arm["topology"]["dcp"] for arm in manifest["arms"]] == [1, 8, 8]
    assert manifest["parity"]["ok"] and len(measured(out)) == 6
    assert len(list((out / "parity" / "check-2" / "proof" / "dcp8").glob("rank-*.json"))) == 8


@pytest.mark.parametrize(
    ("faults", "error"),
    [
        ({"unused_path": "peer_decode_merge", "only_rank": 7}, "peer_decode_merge has not run on rank 7"),
        ({"inactive_feature": "prefill_context_gather", "only_rank": 7}, "is not active on rank 7: as told"),
        ({"other_bytes": "dcp8"}, "the arms' KV caches differ in bytes (tp8 1,073,741,824, dcp8 536,870,912"),
    ],
)
def test_eight_ranks_of_which_one_is_another(
    faults: dict[str, Any],
    error: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", json.dumps(faults))
    assert main(on_gpus(tmp_path / "run", "--budget", "0.002", ranks=8)) == 2
    assert error in capsys.readouterr().err.splitlines()[-1]


def test_the_last_of_eight_ranks_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = small_trace()
    folder = RunFolder(RunStore.create(tmp_path / "run", manifest(trace), trace), manifest(trace))
    fleet = Fleet(on_cpu(("p",), tmp_path, 1, 9), folder, Steps(sys.stderr), 0)
    ranks = [SimpleNamespace(rank=rank, pid=100 + rank) for rank in range(8)]
    fleet.engines = {"dcp8": cast(Engine, SimpleNamespace(proofs=ranks))}
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr("harness.fleet.os.kill", lambda *signal: killed.append(signal))
    assert fleet.kill_worker("dcp8") == 107 and killed == [(107, signal.SIGKILL)]
