# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kimi_k3_serve.symmetric import SymmetricMemoryError, allocate, choose, view

CPU = torch.device("cpu")


def rank_main(rank: int, world_size: int, store: str, body: Callable[[int, int], None]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    body(rank, world_size)
    dist.barrier()
    dist.destroy_process_group()


def run(world_size: int, folder: Path, body: Callable[[int, int], None]) -> None:
    mp.start_processes(rank_main, (world_size, str(folder / "store"), body), world_size, start_method="fork")


def every_rank_writes_to_every_rank(rank: int, world_size: int) -> None:
    region = allocate("shared", 4096, dist.group.WORLD, CPU, host_group=dist.group.WORLD)
    assert (region.rank, region.world_size, len(region.peers)) == (rank, world_size, world_size)
    assert not any(peer.any() for peer in region.peers)
    dist.barrier()
    for peer in region.peers:
        view(peer, 64 * rank, (2, 3), torch.float32).fill_(rank + 1)
    dist.barrier()
    for source in range(world_size):
        assert (view(region.peers[rank], 64 * source, (6,), torch.float32) == source + 1).all()


def sizes_differ(rank: int, world_size: int) -> None:
    with pytest.raises(SymmetricMemoryError, match="different symmetric memory"):
        allocate("shared", 64 * (rank + 1), dist.group.WORLD, CPU, host_group=dist.group.WORLD)


def the_cpu_takes_shared_memory(rank: int, world_size: int) -> None:
    name, reasons = choose(dist.group.WORLD, CPU)
    assert name == "shared"
    assert reasons == {"multicast": "rank 0: cpu has no GPU peers", "peer": "rank 0: cpu has no GPU peers"}
    assert choose(dist.group.WORLD, CPU, among=("peer",)) == (None, {"peer": "rank 0: cpu has no GPU peers"})


@pytest.mark.parametrize("body", [every_rank_writes_to_every_rank, sizes_differ, the_cpu_takes_shared_memory])
def test_shared(body: Any, tmp_path: Path) -> None:
    run(4, tmp_path, body)


def test_multicast_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from kimi_k3_serve.symmetric import torch_symm

    monkeypatch.setattr(torch_symm, "peer_objection", lambda device: None)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    assert torch_symm.multicast_objection(torch.device("cuda", 0)) == "TORCH_SYMM_MEM_DISABLE_MULTICAST=1"
