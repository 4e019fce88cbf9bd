# SPDX-License-Identifier: Apache-2.0
"""A run's kept answers are judged again, and both verdicts stay."""

import gzip
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from builders import cell_run, manifest, small_trace

from harness.cli import main
from harness.parity import ArmAnswers, Position
from harness.store import CellKey, RunStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two arms whose logprobs differ by 0.2 nats; refused with a tolerance of 0.1."""
    trace = small_trace()
    before = {
        "ok": False,
        "compared": 4,
        "refusal": "parity refused: |Δlogprob| 0.2 > 0.1",
        "tolerance": {"logprob": 0.1, "overlap": 0.5},
        "pairs": [],
        "diverged": [],
    }
    store = RunStore.create(tmp_path / "run", manifest(trace, parity=before), trace)
    for arm, shift in (("tp2", 0.0), ("dcp2", 0.2)):
        answer = (Position(7, {token: -token - shift for token in range(7, 27)}),) * 2
        kept = ArmAnswers({"p0": answer}, {"p0": answer}, 1)
        path = store.path / "parity" / f"{arm}.json.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress(json.dumps(asdict(kept)).encode()))
        store.write_cell(
            CellKey(arm, 1.0, 0), cell_run([0.5] * 6), [], trace_sha256=trace.sha256, cache_salt=""
        )
    return store.path


def test_judged_again_with_another_tolerance(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", str(run), "--lengths", "40", "--tolerance", "0.1"]) == 0
    assert "|Δlogprob| 0.2 > 0.1 (tp2 vs dcp2)" in capsys.readouterr().out
    assert main(["parity", str(run), "--tolerance", "0.3"]) == 0
    assert "passed, 8 compared" in capsys.readouterr().out
    kept = json.loads((run / "manifest.json").read_text())
    assert kept["parity"]["ok"] and kept["parity"]["before"]["refusal"].endswith("0.2 > 0.1")
    (note,) = kept["notes"]
    assert note.startswith(
        "Parity was judged again from the kept answers: passed. The run's own verdict was:"
    )
    record = json.loads((run / "parity.json").read_text())
    assert record["ok"] and record["prompts"] == {"p0": 40} and not record["before"]["ok"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "this run did not record its prompts' lengths"),
        (["--lengths", "40,50"], "not the prompts that were asked"),
        (["--lengths", "40", "--tolerance", "0"], "give a positive number of nats"),
    ],
)
def test_what_it_needs(words: list[str], error: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", str(run), *words]) == 2
    assert error in capsys.readouterr().err
