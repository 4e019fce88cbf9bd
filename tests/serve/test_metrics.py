# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kimi_k3_serve import proof
from kimi_k3_serve.metrics import Proofs


def test_proofs_become_gauges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(proof.PROOF_DIR, str(tmp_path))
    monkeypatch.setattr(proof, "_proof", {})
    monkeypatch.setattr(proof, "_used", set())
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
