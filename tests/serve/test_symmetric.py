# SPDX-License-Identifier: Apache-2.0
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kimi_k3_serve.symmetric import SymmetricMemoryError, connect, torch_symm, transport, view
from kimi_k3_serve.symmetric.region import Region
from kimi_k3_serve.symmetric.shared import fence, map_file

CPU = torch.device("cpu")
NO_PEERS = "rank 0: cpu has no GPU peers"


def rank_main(rank: int, world_size: int, store: str, body: Callable[[int, int], None]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    body(rank, world_size)
    dist.barrier()
    dist.destroy_process_group()


def run(world_size: int, folder: Path, body: Callable[[int, int], None]) -> None:
    mp.start_processes(rank_main, (world_size, str(folder / "store"), body), world_size, start_method="fork")


def every_rank_writes_to_every_rank(rank: int, world_size: int) -> None:
    region = connect(4096, dist.group.WORLD, CPU).get()
    assert (region.rank, region.world_size, len(region.peers)) == (rank, world_size, world_size)
    assert not any(peer.any() for peer in region.peers)
    dist.barrier()
    for peer in region.peers:
        view(peer, 64 * rank, (2, 3), torch.float32).fill_(rank + 1)
    dist.barrier()
    for source in range(world_size):
        assert (view(region.own, 64 * source, (6,), torch.float32) == source + 1).all()


def sizes_differ(rank: int, world_size: int) -> None:
    with pytest.raises(SymmetricMemoryError, match="different symmetric memory"):
        connect(64 * (rank + 1), dist.group.WORLD, CPU)


def the_cpu_takes_shared_memory(rank: int, world_size: int) -> None:
    found = connect(64, dist.group.WORLD, CPU)
    assert found.transport == "shared" and found.reasons == {"multicast": NO_PEERS, "peer": NO_PEERS}
    found = connect(64, dist.group.WORLD, CPU, ("peer",))
    assert (found.transport, found.region, found.passed_over) == (None, None, f"peer: {NO_PEERS}")
    with pytest.raises(SymmetricMemoryError, match=r"no symmetric memory \(peer: rank 0"):
        found.get()


def one_rank_objects(rank: int, world_size: int) -> None:
    found = connect(64, dist.group.WORLD, CPU, ("shared",), against="not today" if rank == 2 else None)
    assert found.region is None and found.reasons == {"shared": "rank 2: not today"}


def failing(step: str, failing_rank: int, rank: int) -> None:
    """Add a transport `first` before `shared`: nothing is known against it, and one step of it fails on one rank."""
    shared = transport.TRANSPORTS["shared"]

    def fail(*arguments: Any) -> Any:
        # The ranks that do not fail must not be left waiting in the next step, which is taken together.
        if rank == failing_rank:
            raise torch.OutOfMemoryError("CUDA driver error:\n system not yet initialized")
        return getattr(shared, step)(*arguments)

    transport.TRANSPORTS = {"first": replace(shared, **{step: fail}), "shared": shared}


def an_allocation_fails_on_one_rank(rank: int, world_size: int) -> None:
    failing("open", 1, rank)
    found = connect(64, dist.group.WORLD, CPU, ("first", "shared"))
    why = "rank 1: CUDA driver error: system not yet initialized"
    assert found.transport == "shared" and found.reasons == {"first": why}
    assert not found.get().own.any()
    found = connect(64, dist.group.WORLD, CPU, ("first",))
    assert found.region is None and found.passed_over == f"first: {why}"
    targets = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in targets if "kimi-k3" in path.name]  # what the other ranks opened is closed


def a_rendezvous_fails_on_all_ranks(rank: int, world_size: int) -> None:
    failing("join", rank, rank)
    found = connect(64, dist.group.WORLD, CPU, ("first", "shared"))
    assert found.transport == "shared"
    assert found.reasons == {"first": "rank 0: CUDA driver error: system not yet initialized"}


def machines_differ(rank: int, world_size: int) -> None:
    transport.machine = lambda: f"boot {rank // 2}"
    found = connect(64, dist.group.WORLD, CPU, ("shared",))
    assert found.reasons == {"shared": "rank 0: the ranks are on different machines"}


@pytest.mark.parametrize(
    "body",
    [
        every_rank_writes_to_every_rank,
        sizes_differ,
        the_cpu_takes_shared_memory,
        one_rank_objects,
        an_allocation_fails_on_one_rank,
        a_rendezvous_fails_on_all_ranks,
        machines_differ,
    ],
)
def test_connect(body: Any, tmp_path: Path) -> None:
    run(4, tmp_path, body)


def test_another_process_of_the_same_number_is_not_taken_for_the_rank(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"....")
    with pytest.raises(OSError, match="is not the other rank's memory"):
        map_file(str(tmp_path / "other"), inode=-1)


def test_fences_of_two_threads_do_not_meet() -> None:
    errors: list[Exception] = []

    def many() -> None:
        try:
            for _ in range(20_000):
                fence()
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process sees four, in two islands: 0 and 1, 2 and 3."""
    monkeypatch.setattr(torch_symm, "gpu_name", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one.index // 2 == other // 2)


def test_only_the_groups_own_gpus_are_asked(four_gpus: None) -> None:
    first = torch.device("cuda", 0)
    assert torch_symm.peer_objection(first, ["GPU-0", "GPU-1"]) is None
    assert torch_symm.peer_objection(first, ["GPU-0", "GPU-2"]) == "cuda:0 has no peer access to cuda:2"
    assert torch_symm.peer_objection(first, ["GPU-0", "GPU-of-another-process"]) is None


def test_multicast_can_be_switched_off(four_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    why = torch_symm.multicast_objection(torch.device("cuda", 0), ["GPU-0", "GPU-1"])
    assert why == "TORCH_SYMM_MEM_DISABLE_MULTICAST=1"


def test_multicast_without_an_address_is_an_error_that_connect_catches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = SimpleNamespace(rank=0, world_size=1, multicast_ptr=0, barrier=lambda: None)
    monkeypatch.setattr("torch.distributed._symmetric_memory.rendezvous", lambda storage, name: handle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    group, storage = SimpleNamespace(group_name="group"), torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="no multicast address"):
        torch_symm.join_torch(storage, group, multicast=True)
    assert isinstance(torch_symm.join_torch(storage, group, multicast=False), Region)
