# SPDX-License-Identifier: Apache-2.0
"""The bars of benchmarks/publish.py."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("publish_benchmark", ROOT / "benchmarks" / "publish.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_run_of_two_gpus_has_these_verdicts(benchmark: Any) -> None:
    run = json.loads((ROOT / "results" / "publish" / "h200-x2.json").read_text())
    assert benchmark.bars(run["rows"], run["world_size"]) == run["bars"]


@pytest.mark.parametrize(
    ("stock", "peer", "floor", "met"),
    [(200, 100, 87, [True, True]), (199, 100, 87, [False, True]), (200, 100, 86, [True, False])],
)
def test_eight_gpus_have_bars_of_their_own(
    benchmark: Any, stock: int, peer: int, floor: int, met: list[bool]
) -> None:
    """bf16 1 x 65,536: at least twice as fast as stock, and at most 15 % above the floor."""
    times = {"stock": stock, "nccl": 150, "peer": peer, "floor": floor}
    table = [{"chunk": "1 x 65536", "kv": "bf16", "launched_us": times, "device_us": times}]
    verdicts = benchmark.bars(table, 8)
    assert [verdict["met"] for verdict in verdicts if verdict["by"] == "device_us"] == met
    assert {verdict["bar"] for verdict in verdicts} == {
        "bf16 1 x 65536: stock at least 2 x peer",
        "bf16 1 x 65536: peer at most 1.15 x floor",
    }
    assert benchmark.bars(table, 4) == []
