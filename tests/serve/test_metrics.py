# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest

from kimi_k3_serve import proof
from kimi_k3_serve.metrics import Proofs


def test_proofs_become_gauges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(proof.PROOF_DIR, str(tmp_path))
    monkeypatch.setattr(proof, "_proof", {})
    monkeypatch.setattr(proof, "_used", {})
    proof.publish(
        {"rank": 1, "features": {"dcp": {"active": True, "reason": ""}, "x": {"active": False, "reason": ""}}}
    )
    proof.mark_used("decode_merge")
    registry = CollectorRegistry()
    registry.register(Proofs())
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'kimi_k3_feature_active{feature="dcp",rank="1"} 1.0',
        'kimi_k3_feature_active{feature="x",rank="1"} 0.0',
        'kimi_k3_path_used{path="decode_merge",rank="1"} 1.0',
    ]


def test_a_proof_says_how_often_and_when_a_path_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(proof.PROOF_DIR, str(tmp_path))
    monkeypatch.setattr(proof, "_proof", {})
    monkeypatch.setattr(proof, "_used", {})
    for _ in range(3):
        proof.mark_used("collective_decode_merge")
    proof.mark_used("peer_decode_merge")
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        proof.mark_used("peer_decode_merge")
    proof.publish({"rank": 0})
    for _ in range(5):
        proof.mark_used("peer_decode_merge")
    report = json.loads((tmp_path / "rank-0.json").read_text())
    assert report["used"] == ["collective_decode_merge", "peer_decode_merge"]
    assert report["calls"] == {
        "collective_decode_merge": {"startup": 3},
        "peer_decode_merge": {"startup": 1, "captured": 1, "serving": 4},  # written at 1, 2, 4, 8, ...
    }
