# SPDX-License-Identifier: Apache-2.0
"""As much of the GPU images as needs no GPU: their Debian packages, and that the locked nvcc compiles there.

FlashInfer and TileLang compile kernels when the server first needs them; an nvcc of another CUDA than the headers'
would end each of those with an error, on the user's machine.
"""

import os
import re
import sys
from pathlib import Path

import pytest
from stack import ROOT, docker, run

SOURCE = """
#include <cub/cub.cuh>
#include <cuda_runtime.h>
#include <cuda/std/atomic>
__global__ void count(int *total) { cuda::std::atomic_ref<int>(*total).fetch_add(1); }
"""
TOOLCHAIN = re.compile(r"(nvidia-cuda-(nvcc|crt|cccl|runtime)|nvidia-nvvm)==")
ARCHITECTURES = ("90a", "100a", "103a", "120a")  # of the profiles' GPUs


@pytest.fixture(scope="module")
def system() -> str:
    name = "kimi-k3-test:serve-system"
    base = os.environ["KIMI_K3_TEST_IMAGE"]
    docker("build", "-q", "--target", "serve-system", "-t", name, "--build-arg", f"BASE={base}",
        "--build-arg", "TARGET=serve", str(ROOT))  # fmt: skip
    return name


def test_the_locked_nvcc_compiles_for_every_profile_s_gpu(system: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    locked = [
        line for line in (ROOT / "locks" / "serve.txt").read_text().splitlines() if TOOLCHAIN.match(line)
    ]
    assert len(locked) == 5
    (tmp_path / "toolchain.txt").write_text("\n".join(locked))
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "--only-binary", ":all:",
        "--target", str(tmp_path / "site"), "-r", str(tmp_path / "toolchain.txt"))  # fmt: skip
    (tmp_path / "count.cu").write_text(SOURCE)
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in ARCHITECTURES]
    docker("run", "--rm", "--read-only", "--tmpfs", "/tmp:exec", "--network", "none", "-v", f"{tmp_path}:/in:ro",
        "--entrypoint", "/in/site/nvidia/cu13/bin/nvcc", system,
        "-std=c++17", "-t", "2", *targets, "-c", "/in/count.cu", "-o", "/tmp/count.o")  # fmt: skip


def test_the_image_has_no_more_of_a_toolchain_than_it_says(system: str) -> None:
    listed = docker("run", "--rm", "--entrypoint", "sh", system, "-c", "ls /usr/bin").stdout.split()
    assert {"gcc", "g++", "ld"} <= set(listed)
    assert not {"make", "cmake", "git", "curl", "wget"} & set(listed)
    assert docker("run", "--rm", "--entrypoint", "id", system, "-u").stdout == "10001\n"
