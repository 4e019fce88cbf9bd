# SPDX-License-Identifier: Apache-2.0
"""Arrivals, shared prefixes, production logs, limit classes, text and chat."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import small_trace
from tokenizer import make_tokenizer

from harness.arrivals import unit_times
from harness.cli import main
from harness.errors import UserError
from harness.trace import load_trace, save_trace
from harness.workloads import (
    Columns,
    LimitClass,
    as_words,
    import_log,
    make_shared_prefix,
    read_log,
    with_limit_classes,
)

LOG = "time,prompt_tokens,output_tokens\n10,30,4\n10,5,1\n16,20,3\n14,8,2\n"


def generator() -> np.random.Generator:
    return np.random.default_rng(5)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_gamma_gaps_have_mean_1_and_the_variation_of_their_burstiness(
    burstiness: float, variation: float
) -> None:
    gaps = np.diff(unit_times(generator(), 40_001, "gamma", burstiness))
    assert gaps.mean() == pytest.approx(1.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_recorded_gaps_keep_their_proportions() -> None:
    assert unit_times(generator(), 4, "recorded", recorded_s=[10, 10, 14, 16]).tolist() == [0, 0, 2, 3]
    trace = small_trace(arrivals="recorded", recorded_s=[10, 10, 14, 16, 20, 30, 99], requests=6)
    assert trace.span == pytest.approx(5.0)
    assert "recorded_sha256" in trace.header["generator"]


@pytest.mark.parametrize(
    "change",
    [
        {"arrivals": "gamma"},
        {"arrivals": "gamma", "burstiness": 0.0},
        {"arrivals": "poisson", "burstiness": 2.0},
        {"arrivals": "recorded", "recorded_s": [1.0, 2.0]},
        {"arrivals": "recorded", "recorded_s": [1.0] * 6},
    ],
)
def test_impossible_arrivals_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        small_trace(**change)


def shared(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "requests": 20, "shared_tokens": 114_000, "own_tokens": 6_000, "output_tokens": 4, "prefixes": 2,
        "cohort_size": 5, "arrivals": "poisson", "seed": 1, "vocab_size": 100, "scale": 0.001,
    }  # fmt: skip
    return make_shared_prefix(**{**arguments, **changes})


def test_shared_prefixes(tmp_path: Path) -> None:
    trace = shared()
    assert {request.prompt_tokens for request in trace.requests} == {120}
    assert len({request.prompt[:114] for request in trace.requests}) == 2
    assert len({request.prompt[114:] for request in trace.requests}) == 20
    assert trace.shares_prefixes and not small_trace().shares_prefixes
    assert trace == shared() != shared(seed=2)
    save_trace(trace, tmp_path / "t.jsonl.gz")
    assert load_trace(tmp_path / "t.jsonl.gz") == trace
    with pytest.raises(UserError, match="--prefixes is 0"):
        shared(prefixes=0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": -1}, "--seed is -1"),
        ({"vocab_size": 3}, "--vocab-size is 3"),
        ({"cohort_size": 0}, "--cohort-size is 0"),
        ({"scale": float("nan")}, "--scale is nan"),
        ({"requests": 0}, "--requests is 0"),
        ({"requests": -1}, "--requests is -1"),
    ],
)
def test_every_way_to_make_a_trace_refuses_the_same(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    (log := tmp_path / "log.csv").write_text(LOG)
    limited = {"limit" if name == "requests" else name: value for name, value in change.items()}
    ways = (lambda: small_trace(**change), lambda: shared(**change), lambda: imported(log, **limited))
    for way in ways:
        with pytest.raises(UserError, match=named):
            way()


def imported(path: Path, **changes: Any) -> Any:
    return import_log(path, **{"seed": 1, "vocab_size": 100, "cohort_size": 2, **changes})


def test_a_log_gives_lengths_and_gaps_in_the_order_of_time(tmp_path: Path) -> None:
    (log := tmp_path / "log.csv").write_text(LOG)
    trace = imported(log)
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 30, 4), (0.0, 5, 1), (2.0, 8, 2), (3.0, 20, 3),
    ]  # fmt: skip
    assert trace.header["generator"]["recorded_qps"] == pytest.approx(0.5)
    assert [r.prompt_tokens for r in imported(log, scale=0.1).requests] == [3, 1, 1, 2]
    assert len(imported(log, limit=2 + 1).requests) == 3


def test_a_log_may_hold_whole_prompts(tmp_path: Path) -> None:
    """A text of 120,000 tokens is longer than csv takes by itself."""
    path = tmp_path / "log.csv"
    path.write_text(f"time,prompt_tokens,output_tokens,text\n1,10,2,{'word ' * 120_000}\n")
    assert [row.prompt_tokens for row in read_log(path)] == [10]


def test_json_lines_with_other_names_and_iso_times_are_the_same_log(tmp_path: Path) -> None:
    (csv := tmp_path / "log.csv").write_text(LOG)
    rows = [("00:00:10", 30, 4), ("00:00:10", 5, 1), ("00:00:16", 20, 3), ("00:00:14", 8, 2)]
    lines = [json.dumps({"at": f"2026-01-01T{at}Z", "in": prompt, "out": out}) for at, prompt, out in rows]
    (log := tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    assert imported(log, columns=Columns("at", "in", "out")).requests == imported(csv).requests


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "holds no request"),
        ("when,prompt_tokens,output_tokens\n1,2,3\n", "line 2: no column 'time' among when,"),
        ("time,prompt_tokens,output_tokens\n1,0,3\n", "line 2: prompt_tokens is '0', not a count"),
        ("time,prompt_tokens,output_tokens\n1,2,x\n", "line 2: output_tokens is 'x', not a count"),
        ("time,prompt_tokens,output_tokens\nnoon,2,3\n", "line 2: time is 'noon', neither seconds"),
        ('{"time":1,"prompt_tokens":2,"output_tokens":3}\n{oops\n', "line 2: not JSON"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, text: str, complaint: str) -> None:
    (log := tmp_path / "log").write_text(text)
    with pytest.raises(UserError, match=complaint):
        read_log(log)


def test_limit_classes_follow_prompt_lengths(tmp_path: Path) -> None:
    classes = [LimitClass.parse("short=0-20"), LimitClass.parse("long=30-40")]
    trace = with_limit_classes(small_trace(), classes)
    for request in trace.requests:
        expected = (
            "short" if request.prompt_tokens <= 20 else "long" if request.prompt_tokens >= 30 else "default"
        )
        assert request.limit_class == expected
    assert trace.sha256 != small_trace().sha256
    save_trace(trace, tmp_path / "t.jsonl")
    assert load_trace(tmp_path / "t.jsonl") == trace
    with pytest.raises(UserError, match="NAME=MIN-MAX"):
        LimitClass.parse("short=20-0")


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "model")


def test_text_and_chat_are_counted_as_the_server_will(tokenizer_dir: Path, tmp_path: Path) -> None:
    trace = small_trace(vocab_size=98)
    text = as_words(trace, "text", tokenizer_dir)
    chat = as_words(trace, "chat", tokenizer_dir)
    for ids, words, talk in zip(trace.requests, text.requests, chat.requests, strict=True):
        assert words.text is not None and talk.messages is not None and words.prompt == talk.prompt == ()
        assert len(words.text.split()) == ids.prompt_tokens
        assert words.prompt_tokens == ids.prompt_tokens + 1  # <s>
        assert talk.prompt_tokens == ids.prompt_tokens + 2  # user ... assistant
    save_trace(chat, tmp_path / "chat.jsonl.gz")
    assert load_trace(tmp_path / "chat.jsonl.gz") == chat
    with pytest.raises(UserError, match="no tokenizer in"):
        as_words(trace, "text", tmp_path)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (log := tmp_path / "log.csv").write_text(LOG)
    out = str(tmp_path / "t.jsonl.gz")
    common = ["--out", out, "--seed", "1", "--vocab-size", "100", "--cohort-size", "2"]
    assert main(["trace", "import", str(log), *common, "--limit-class", "short=0-10"]) == 0
    assert "offer --rates 0.5" in capsys.readouterr().out
    assert main(["trace", "show", out]) == 0
    shown = capsys.readouterr().out
    assert "imported-log" in shown and "default 2, short 2" in shown
    make = ["trace", "make", *common, "--requests", "4", "--output-tokens", "2"]
    lengths = ["--min-tokens", "4", "--max-tokens", "9"]
    assert main([*make, *lengths, "--arrivals", "recorded", "--arrivals-log", str(log)]) == 0
    assert main([*make, *lengths, "--arrivals", "gamma", "--burstiness", "0.5"]) == 0
    prefix = [
        "--workload",
        "shared-prefix",
        "--shared-tokens",
        "9",
        "--own-tokens",
        "2",
        "--arrivals",
        "poisson",
    ]
    assert main([*make, *prefix]) == 0
    assert main([*make, "--arrivals", "poisson"]) == 2
    assert "needs --min-tokens" in capsys.readouterr().err
    assert main(["trace", "import", str(tmp_path / "none.csv"), *common]) == 2
    assert "cannot read log" in capsys.readouterr().err
