# SPDX-License-Identifier: Apache-2.0
"""The projection gather on GPUs: two ranks on two GPUs against NCCL, and W ranks as W streams of one GPU.

Needs PyTorch and Triton only. What one GPU cannot show: stores over NVLink, and time.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kimi_k3_serve.projection.exchange import Geometry, PeerGather
from kimi_k3_serve.projection.shard import KV_A, Q_A, local_widths
from kimi_k3_serve.symmetric.region import Region, view

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs an NVIDIA GPU of compute capability 9.0 or later",
    ),
]

WIDTHS = (Q_A, KV_A)
CASES = ("rows_equal", "fallbacks_equal", "pair_equal", "product_equal", "graphs_replay")


@pytest.fixture(scope="module")
def passed() -> tuple[list[str], str]:
    script = Path(__file__).with_name("projection_world.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    return done.stdout.split(), done.stderr[-6000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES)
def test_two_gpus_agree_with_nccl(passed: tuple[list[str], str], case: str) -> None:
    stdout, stderr = passed
    assert stdout.count(case) == 2, stderr


def primed(world_size: int) -> list[PeerGather]:
    """W ranks on one GPU, their kernel compiled and loaded.

    Loading may wait for an idle GPU, and a launch spins until all ranks have launched: words that already carry the
    first epoch let a lone rank through.
    """
    geometry = Geometry(*(2 * width for width in local_widths(WIDTHS, world_size)))
    slots = geometry.slots_bytes(world_size)  # of one ubatch; behind them lie tables
    regions = Region.group(world_size, geometry.nbytes(world_size), "cuda")
    ranks = [PeerGather(region, geometry, timeout_s=20.0) for region in regions]
    for rank in ranks:
        for peer in regions[0].peers:
            view(peer, 0, (slots // 8,), torch.int64).fill_(1 << 32)
        rank.merged(torch.zeros(geometry.rows, geometry.units * 4, dtype=torch.bfloat16, device="cuda"))
        torch.cuda.synchronize()
    for rank in ranks:
        rank.epochs.zero_()
    for peer in regions[0].peers:
        peer[:slots].zero_()
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    return ranks


LATE = """
import torch
from test_projection_gpu import primed
source = primed(2)[0]
source.deadline.limit_s = 0.2
row = torch.zeros(1, source.geometry.units * 4, dtype=torch.bfloat16, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    source.merged(row)
graph.replay()
try:
    torch.cuda.synchronize()
except Exception as error:
    print("CUDA error:", type(error).__name__)
try:
    source.deadline.check()
except RuntimeError as error:
    print(error)
"""


def test_a_rank_that_never_comes_is_named() -> None:
    """In a graph's replay; in a process of its own, since the lost rendezvous costs the CUDA context."""
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent
    )
    assert "CUDA error:" in done.stdout, done.stderr[-2000:]
    assert "rank 0: rank 1 did not come to gather 1 of a projection's row within 0.2 s" in done.stdout


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_of_one_gpu_hold_the_logical_rows(world_size: int) -> None:
    ranks = primed(world_size)
    streams = [torch.cuda.Stream() for _ in ranks]
    generator = torch.Generator().manual_seed(world_size)
    for step in range(40):
        rows = (1, 8, 3, 1)[step % 4]
        bits = torch.randint(-(2**15), 2**15, (rows, sum(WIDTHS)), generator=generator, dtype=torch.int16)
        logical = bits.view(torch.bfloat16).cuda()
        parts = logical.split(list(WIDTHS), dim=1)
        locals_ = [
            torch.cat([part.chunk(world_size, dim=1)[rank] for part in parts], dim=1)
            for rank in range(world_size)
        ]
        torch.cuda.synchronize()
        found = []
        for rank, (source, stream) in enumerate(zip(ranks, streams, strict=True)):
            with torch.cuda.stream(stream):
                if rank == step % world_size:
                    torch.cuda._sleep(1_000_000)
                found.append(source.merged(locals_[rank]))
        torch.cuda.synchronize()
        assert all(torch.equal(row.view(torch.int16), logical.view(torch.int16)) for row in found), step
