# SPDX-License-Identifier: Apache-2.0
"""The projection kernels without a GPU: in the Triton interpreter between processes, and compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def ranks(case: str, world_size: int) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, str(HERE / "projection_ranks.py"), case, str(world_size)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    return done.stdout.strip(), done.stderr[-3000:]


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        *(("merged", world) for world in (2, 4, 8, 16)),
        ("pair", 2),
        ("pair", 4),
        ("projected", 2),
        ("projected", 4),
        ("missing", 2),
        ("late inside", 2),
        ("late inside", 4),
    ],
)
def test_the_kernel_itself_over_shared_memory(case: str, world_size: int) -> None:
    """W processes in the Triton interpreter, each polling for the others' words, one of them late."""
    stdout, stderr = ranks(case, world_size)
    assert stdout == "ok", stdout + stderr


@pytest.mark.parametrize(
    ("mutation", "words"),
    [
        ("one slot", "a slot was overwritten before it was read"),
        ("no wait", "Wrong: step"),
        ("frozen epoch", "Wrong: step"),
    ],
)
def test_a_broken_protocol_is_caught(mutation: str, words: str) -> None:
    stdout, stderr = ranks(f"mutation: {mutation}", 2)
    assert words in stdout, stdout + stderr


@pytest.mark.parametrize(("arch", "world_size"), [(90, 2), (90, 16), (100, 8)])
def test_the_kernels_compile_without_a_gpu(arch: int, world_size: int) -> None:
    """To a cubin for Hopper and Blackwell: 16-byte accesses everywhere, system scope, and no fence beside the data."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "projection_ptx.py"), str(arch), str(world_size)],
        capture_output=True,
        text=True,
        check=True,
    )
    for kernel in json.loads(done.stdout):
        assert kernel["pushes"] >= 1 and kernel["polls"] >= 1 and kernel["cubin_bytes"] > 0
        assert kernel["atomics"] == kernel["multimem"] == kernel["narrow_loads"] == 0
        assert kernel["fences"] == kernel["ends"] > 0  # none but before a trap
        assert kernel["shared_bytes"] <= 1024  # small blocks
    gather_alone, product = json.loads(done.stdout)
    assert (gather_alone["pushes"], gather_alone["polls"], gather_alone["shared_bytes"]) == (1, 1, 0)
    assert (
        product["wide_loads"] >= 2 * 7168 * 4 * 2 // 16 // 256
    )  # the weight's and the hidden state's, a thread
