# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of two GPUs: connected by peer pointers; passed over together where one rank's memory is short."""

import os
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[2]))
from kimi_k3_serve.symmetric import connect, torch_symm, view

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def connected(rank: int) -> None:
    """Each rank stores into the other's memory."""
    device, host_group = torch.device("cuda", rank), dist.new_group(backend="gloo")
    found = connect(1 << 20, dist.group.WORLD, device, ("multicast", "peer"), host_group=host_group)
    assert found.reasons == {"multicast": f"rank 0: {torch_symm.DISABLE_MULTICAST}=1"}, found
    region = found.get()
    assert (found.transport, region.rank, region.world_size) == ("peer", rank, 2)
    assert not region.own.any()
    torch.cuda.synchronize()
    dist.barrier(host_group)
    view(region.peers[1 - rank], 128, (4,), torch.int64).fill_(rank + 1)
    torch.cuda.synchronize()
    dist.barrier(host_group)
    assert view(region.own, 128, (4,), torch.int64).tolist() == [2 - rank] * 4


def short_of_memory(rank: int) -> None:
    """Rank 1 has too little left: both ranks learn of it, neither waits, and less memory is then had."""
    device, host_group = torch.device("cuda", rank), dist.new_group(backend="gloo")
    left = torch.cuda.mem_get_info()[0]
    taken = torch.empty(left - (4 << 30), dtype=torch.uint8, device=device) if rank else None
    found = connect(16 << 30, dist.group.WORLD, device, ("peer",), host_group=host_group)
    assert found.region is None and found.reasons["peer"].startswith("rank 1: "), found
    assert connect(1 << 20, dist.group.WORLD, device, ("peer",), host_group=host_group).transport == "peer"
    del taken


def rank_main(rank: int, folder: str) -> None:
    os.environ[torch_symm.DISABLE_MULTICAST] = "1"
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=device
    )
    try:
        for case in (connected, short_of_memory):
            case(rank)
    except BaseException:
        traceback.print_exc()
        raise
    dist.destroy_process_group()


def test_two_gpus() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), 2, start_method="spawn")
