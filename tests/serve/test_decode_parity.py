# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/decode_parity.py reports of arms that gave no answer."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# A warning of every arm, which starts without a tokenizer.
WARNING = """
(MainProcess pid=1) WARNING 11-30 10:40:39 [base.py:380] Traceback (most recent call last):
(MainProcess pid=1) WARNING 11-30 10:40:39 [base.py:380]     raise ValueError("Tokenizer not available")
(MainProcess pid=1) WARNING 11-30 10:40:39 [base.py:380] ValueError: Tokenizer not available
"""
DEATH = """
(Worker_TP0 pid=2) ERROR 11-30 10:41:05 [executor.py:1063]     raise RuntimeError(
(Worker_TP0 pid=2) ERROR 11-30 10:41:05 [executor.py:1063] RuntimeError: heads must be packed
Traceback (most recent call last):
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("decode_verdict")


def folder(tmp_path: Path, name: str, log: str) -> Path:
    (tmp_path / "reference.json").write_text("[]")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / f"{name}.log").write_text(log)
    return tmp_path


@pytest.mark.parametrize(
    ("progress", "loaded"),
    [({"loaded": 94.0, "turn": 95.5}, "loaded after 94 s"), (None, "not loaded")],
)
def test_an_arm_that_was_given_too_little_time_is_late_and_not_dead(
    verdict: Any, tmp_path: Path, progress: dict[str, float] | None, loaded: str
) -> None:
    out = folder(tmp_path, "tp2", WARNING)
    if progress:
        verdict.progress_file(out, "tp2").write_text(json.dumps(progress))
    late = {"limit_s": 200.0, "since": "start"}
    report = verdict.judge(out, ["tp2"], {"tp2": {"late": late}}, 0.3)
    assert report["arms"] == [{"arm": "tp2", "seconds": progress or {}, "late": late}]
    assert not report["ok"]
    assert verdict.table(report)[2:] == [
        f"tp2                    late: not answered within 200 s of its start ({loaded})"
    ]


def test_also_an_arm_that_may_die_fails_the_run_where_it_is_late(verdict: Any, tmp_path: Path) -> None:
    arm = "fa3+a2a uncured"
    out = folder(tmp_path, "fa3-a2a-uncured", DEATH)
    late = {"limit_s": 200.0, "since": "turn"}
    assert not verdict.judge(out, [arm], {arm: {"late": late}}, 0.3)["ok"]
    assert verdict.judge(out, [arm], {arm: {"died": 1}}, 0.3)["ok"]


def test_an_infinite_difference_is_null_in_the_report(
    verdict: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parity = importlib.import_module("decode_parity")
    report = {"ok": True, "tolerance": 0.3, "arms": [], "largest": float("inf")}
    monkeypatch.setattr(parity, "run", lambda args: {})
    monkeypatch.setattr(parity, "judge", lambda *_: report)
    monkeypatch.setattr("sys.argv", ["decode_parity.py", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        parity.main()
    assert json.loads((tmp_path / "out" / "parity.json").read_text())["largest"] is None


def test_uncured_arms_are_asked_for_by_name_and_may_be_wrong(
    verdict: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parity = importlib.import_module("decode_parity")
    asked: list[str] = []

    def run(args: Any) -> None:
        asked.extend(args.arms)
        raise SystemExit

    monkeypatch.setattr(parity, "run", run)
    for index, more in enumerate(([], ["--arms", "tp2", "triton+ag_rs uncured"])):
        asked.clear()
        monkeypatch.setattr("sys.argv", ["decode_parity.py", "--out", str(tmp_path / str(index)), *more])
        with pytest.raises(SystemExit):
            parity.main()
        assert [name for name in asked if name.endswith("uncured")] == more[2:]
    assert len(verdict.UNCURED) == 6  # three kernels, two exchanges

    tops = [[{"1": 0.0, "2": -5.0}] * 2, [{"1": -5.0, "2": 0.0}] * 2]
    expected = {"id": "p", "tokens": [1, 1], "top_logprobs": tops[0]}
    out = folder(tmp_path, "tp2", "")
    (out / "reference.json").write_text(json.dumps([expected]))
    monkeypatch.setattr(verdict, "OUTPUT_TOKENS", 2)
    answers = {"p": [{"token": 2, "top": top, "decoded": True} for top in tops[1]]}
    nccl = {"active": False, "reason": "VLLM_DISABLE_PYNCCL is set"}
    answer = {"seconds": {}, "alone": answers, "together": answers, "vllm_nccl": nccl}
    for name, ok in (("triton+ag_rs uncured", True), ("triton+ag_rs", False)):
        (out / f"{verdict.slug(name)}.json").write_text(json.dumps(answer))
        report = verdict.judge(out, [name], {}, 0.3)
        assert report["ok"] == ok
        assert report["arms"][0]["verdict"] == "WRONG" and report["arms"][0]["vllm_nccl"] == nccl


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (DEATH + WARNING, "heads must be packed"),
        (WARNING + "no reference\n", "no error in its log; last line: no reference"),
        (
            WARNING + "torch.OutOfMemoryError: CUDA out of memory\n",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        (WARNING, "no error in its log"),
    ],
)
def test_the_last_words_of_a_death_are_an_error(verdict: Any, tmp_path: Path, log: str, words: str) -> None:
    report = verdict.judge(folder(tmp_path, "tp2", log), ["tp2"], {"tp2": {"died": 1}}, 0.3)
    (row,) = report["arms"]
    assert row["died"] == 1 and not row["expected"] and not report["ok"]
    assert row["words"].endswith(words)
    assert verdict.table(report)[2].startswith("tp2                    died (NOT expected): ")
