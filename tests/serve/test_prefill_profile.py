# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/prefill_profile.py makes of kernels, and of arms that end without an answer."""

import argparse
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


def test_overlapping_kernels_keep_a_gpu_busy_once(load: Any) -> None:
    found = [("b", 500.0, 2000.0), ("a", 0.0, 1000.0), ("copy", 600.0, 700.0), ("a", 5000.0, 6500.0)]
    summary = load("prefill_probe").summary(found)
    assert summary["span_ms"] == pytest.approx(6.5)
    assert summary["busy_ms"] == pytest.approx(3.5)
    assert summary["kernels"]["a"] == {"calls": 2, "ms": pytest.approx(2.5)}
    assert summary["kernels"]["b"] == {"calls": 1, "ms": pytest.approx(1.5)}


def test_the_probe_reads_what_the_profiler_recorded(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU: operators in the place of kernels."""
    import torch

    module = load("prefill_probe")
    monkeypatch.setattr(module, "ACTIVITY", torch.profiler.ProfilerActivity.CPU)
    monkeypatch.setattr(module, "DEVICE", torch.autograd.DeviceType.CPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    probe = module.PrefillProbe()
    probe.start_kernels()
    for _ in range(3):
        torch.ones(64, 64) @ torch.ones(64, 64)
    summary = probe.end_kernels()
    assert summary["kernels"]["aten::mm"]["calls"] == 3
    assert 0 < summary["kernels"]["aten::mm"]["ms"] <= summary["busy_ms"] <= summary["span_ms"]


def test_kernels_that_differ_stand_in_the_table_the_farthest_apart_first(load: Any) -> None:
    def arm(**ms: float) -> dict[str, Any]:
        kernels = {name: {"calls": 1, "ms": value} for name, value in ms.items()}
        return {"ttft_s": [1.0], "ranks": [{"span_ms": 9.0, "busy_ms": 8.0, "kernels": kernels}] * 2}

    arms = {"tp2": arm(gemm=5.0, near=1.0), "peer fa3": arm(gemm=5.2, publish=1.0, near=1.4)}
    lines = list(load("prefill_profile").table(arms, least=0.3))
    assert [line.split()[0] for line in lines[4:]] == ["publish", "near"]
    assert lines[4].split()[1:] == ["0.0", "1.0"]


def test_a_kernel_of_one_rank_alone_counts_half(load: Any) -> None:
    ranks = [{"kernels": {"copy": {"calls": 1, "ms": 3.0}}}, {"kernels": {}}]
    assert load("prefill_profile").kernel_ms({"ranks": ranks}) == {"copy": pytest.approx(1.5)}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; print('OSError: no such card'); sys.exit(1)", "tp2 failed: OSError: no such card"),
        ("import time; time.sleep(60)", "no answer of tp2 within 0.3 s"),
    ],
)
def test_an_arm_without_an_answer_ends_the_run_with_the_reason(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, words: str
) -> None:
    started = []
    real = subprocess.Popen

    def start(_: Any, **how: Any) -> Any:
        started.append(real([sys.executable, "-c", script], **how))
        return started[-1]

    module = load("prefill_profile")
    monkeypatch.setattr(module.subprocess, "Popen", start)
    timeout = 60.0 if "failed" in words else 0.3
    with pytest.raises(SystemExit, match=words):
        module.run(argparse.Namespace(out=tmp_path, arms=["tp2"], timeout=timeout))
    assert started[0].poll() is not None
