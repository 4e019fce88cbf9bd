# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/prefill_profile.py makes of kernels, and of arms that end without an answer."""

import argparse
import gzip
import importlib
import json
import subprocess
import sys
import threading
import time
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


def answer(*prompts: dict[str, float]) -> dict[str, Any]:
    """Of one arm with two ranks alike: each prompt's kernels, in milliseconds."""
    ranks = [
        {
            "span_ms": 9.0,
            "busy_ms": 8.0,
            "kernels": {name: {"calls": 1, "ms": ms} for name, ms in prompt.items()},
        }
        for prompt in prompts
    ]
    return {"ttft_s": [1.0], "profiled_ttft_s": [1.1], "prompts": [[rank, rank] for rank in ranks]}


def test_kernels_that_differ_stand_in_the_table_the_farthest_apart_first(load: Any) -> None:
    arms = {
        "tp2": answer({"gemm": 5.0, "near": 1.0, "noisy": 1.0}, {"gemm": 5.2, "near": 1.0, "noisy": 3.0}),
        "peer fa3": answer({"gemm": 5.1, "near": 1.4, "noisy": 2.5, "publish": 1.0}),
    }
    lines = list(load("prefill_profile").table(arms, least=0.3))
    assert [line.split()[-1] for line in lines[6:-1]] == ["publish", "near"]
    assert lines[6].split()[:3] == ["-", "1.0", "1.0"]
    assert lines[5].split()[:3:2] == ["8.1", "10.0"]  # all kernels
    assert lines[-1].split()[:3:2] == ["7.1", "7.6"]  # gemm, and noisy, which varies as much in one arm


def test_each_rank_stands_in_the_table(load: Any) -> None:
    prompts = [
        [{"kernels": {"publish": {"calls": 1, "ms": ms}}} for ms in (first, 7.0 - first)]
        for first in (1.0, 3.0)
    ]
    prompts[0][1]["kernels"]["copy"] = {"calls": 1, "ms": 3.0}
    module = load("prefill_profile")
    found = module.kernel_ms({"prompts": prompts})
    assert module.shown(found["publish"]).split() == ["2.0", "5.0"]
    # A rank that did not launch it counts as zero.
    assert module.shown(found["copy"]).split() == ["0.0", "1.5"]
    assert module.summed(found) == [[1.0, 9.0], [3.0, 4.0]]


def test_a_profile_that_was_kept_prints_its_table_again(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "profile.json.gz"
    kept.write_bytes(gzip.compress(json.dumps({"arms": {"tp2": answer({"gemm": 5.0})}}).encode()))
    monkeypatch.setattr(sys, "argv", ["prefill_profile.py", "--read", str(kept)])
    load("prefill_profile").main()
    assert "5.0      5.0  all kernels, summed" in capsys.readouterr().out


def test_a_profile_without_kernels_is_an_error(load: Any) -> None:
    with pytest.raises(RuntimeError, match="recorded nothing"):
        load("prefill_probe").summary([])


def test_arms_take_turns_once_all_have_loaded(load: Any, tmp_path: Path) -> None:
    module, arms = load("prefill_profile"), ["tp2", "fa3+a2a", "peer fa3"]
    taken: list[tuple[str, int]] = []

    def work(name: str) -> None:
        (tmp_path / f"{module.slug(name)}.loaded").touch()
        for count in range(3):
            with module.turn(tmp_path, arms, name, count):
                taken.append((name, count))

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in reversed(arms)]
    for thread in threads[:2]:
        thread.start()
    time.sleep(0.2)
    assert taken == []  # the first arm has not loaded yet
    threads[2].start()
    for thread in threads:
        thread.join(timeout=30)
    assert taken == [(name, count) for count in range(3) for name in (arms[::-1] if count == 1 else arms)]


@pytest.mark.parametrize(
    ("scripts", "wrong"),
    [
        (["import sys; print('OSError: no such card'); sys.exit(1)"], ["tp2 failed: OSError: no such card"]),
        (["import time; time.sleep(60)"], ["no answer of tp2 within 0.5 s; see its log"]),
        (
            ["from pathlib import Path; Path('tp2.json').touch(); import time; time.sleep(60)", "import bad"],
            ["peer fa3 failed: ModuleNotFoundError: No module named 'bad'"],
        ),
        (["from pathlib import Path; Path('tp2.json').touch(); import time; time.sleep(60)"], []),
    ],
)
def test_a_run_ends_with_what_is_wrong_and_leaves_nothing_behind(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scripts: list[str], wrong: list[str]
) -> None:
    started: list[Any] = []
    popen = subprocess.Popen

    def start(_: Any, **how: Any) -> Any:
        started.append(popen([sys.executable, "-c", scripts[len(started)]], cwd=tmp_path, **how))
        return started[-1]

    module = load("prefill_profile")
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(subprocess, "Popen", start)
    arms = ["tp2", "peer fa3"][: len(scripts)]
    timeout = 0.5 if "no answer" in "".join(wrong) else 60.0
    assert module.run(argparse.Namespace(out=tmp_path, arms=arms, timeout=timeout)) == wrong
    assert all(process.poll() is not None for process in started)
