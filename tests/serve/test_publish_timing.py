# SPDX-License-Identifier: Apache-2.0
"""The timer of the context path, with events that a test completes by hand."""

import atexit
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kimi_k3_serve.errors import UserError
from kimi_k3_serve.publish import timing


class Event:
    """Of a GPU that has passed every event but those after `passed`."""

    made: list["Event"] = []  # noqa: RUF012
    passed = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.made.append(self)

    def record(self) -> None:
        self.time = 2.5 * self.made.index(self)

    def query(self) -> bool:
        return self.made.index(self) < Event.passed

    def synchronize(self) -> None:
        Event.passed = max(Event.passed, self.made.index(self) + 1)

    def elapsed_time(self, other: "Event") -> float:
        return other.time - self.time


def metadata(rows: list[int]) -> Any:
    group = SimpleNamespace(rank_in_group=1)
    context = SimpleNamespace(
        chunks=[SimpleNamespace(num_context_tokens=n) for n in rows], dcp_manager=SimpleNamespace(group=group)
    )
    return SimpleNamespace(prefill=SimpleNamespace(chunked_context=context))


def test_calls_are_written_once_the_gpu_has_passed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *call, **more: at_exit.append(partial(*call, **more)))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.made, Event.passed = [], 0
    method = timing.timed(lambda self, q, cache, attn_metadata, k_scale: (q, k_scale), tmp_path)
    assert method(None, "q", None, metadata([65536, 10]), k_scale=3) == ("q", 3)
    assert (tmp_path / "rank-1.jsonl").read_text() == ""
    Event.passed = 4
    method(None, "q", None, metadata([7]), k_scale=3)
    method(None, "q", None, metadata([7]), k_scale=3)
    lines = [json.loads(line) for line in (tmp_path / "rank-1.jsonl").read_text().splitlines()]
    assert lines == [{"chunks": 2, "rows": 65546, "ms": 2.5}, {"chunks": 1, "rows": 7, "ms": 2.5}]
    assert timing.summary(tmp_path) == {
        1: {"calls": 1, "rows": 7, "ms_a_layer_and_chunk": 2.5},
        2: {"calls": 1, "rows": 65546, "ms_a_layer_and_chunk": 1.25},
    }
    [end] = at_exit
    end()
    assert len((tmp_path / "rank-1.jsonl").read_text().splitlines()) == 3


def test_the_switch_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(timing.SWITCH, raising=False)
    assert timing.asked("cuda") is None
    monkeypatch.setenv(timing.SWITCH, str(tmp_path / "new"))
    assert timing.asked("cuda") == tmp_path / "new" and (tmp_path / "new").is_dir()
    with pytest.raises(UserError, match="times GPUs and this is cpu"):
        timing.asked("cpu")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(timing.SWITCH, str(tmp_path / "file" / "folder"))
    with pytest.raises(UserError, match="name a folder that can be written"):
        timing.asked("cuda")
