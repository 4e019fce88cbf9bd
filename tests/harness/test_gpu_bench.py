# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import UserError
from harness.gpu_bench import choose, visible_gpus


@pytest.mark.parametrize(
    ("gpus", "profile"),
    [
        (["NVIDIA B300 SXM6 AC"] * 8, "b300-8"),
        (["NVIDIA H200"] * 8, "slice-h200-8"),
        (["NVIDIA H200"] * 2, "slice-h200-2"),
    ],
)
def test_profile_follows_the_gpus(gpus: list[str], profile: str) -> None:
    assert choose(gpus)[0] == profile


@pytest.mark.parametrize("gpus", [["NVIDIA H200"], ["NVIDIA B300"] * 7 + ["NVIDIA H200"]])
def test_gpus_without_a_pair_are_refused(gpus: list[str]) -> None:
    with pytest.raises(UserError, match="no pair is known"):
        choose(gpus)


def test_gpus_as_nvidia_smi_names_them() -> None:
    assert visible_gpus([sys.executable, "-c", "print('NVIDIA H200\\nNVIDIA H200')"]) == ["NVIDIA H200"] * 2
    assert visible_gpus(["no-such-program"]) == []


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness", "bench", "--gpu", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_dry_run_prints_every_step_and_does_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "run"
    chosen = ["--profile", "b300-8", "--arms", "tp8,dcp8", "--rates", "0.5,1", "--out", str(out)]
    done = bench("--dry-run", "--image", "x@sha256:1", "--model", str(tmp_path), *chosen)
    assert done.returncode == 0, done.stderr
    assert "--gpus all" in done.stdout and "--ulimit memlock=-1" in done.stdout
    assert "x@sha256:1 serve --profile b300-8 --topology dcp8 --model /model" in done.stdout
    assert done.stdout.count("  cell ") == 4 and "about 6 min of load" in done.stdout
    assert not out.exists()


@pytest.mark.parametrize("given", [(), ("--image", "x"), ("--image", "x", "--model", "/nowhere")])
def test_what_is_missing_is_one_line(given: tuple[str, ...]) -> None:
    done = bench(*given)
    assert done.returncode == 2 and done.stderr.startswith("error: --gpu ") and done.stderr.count("\n") == 1
