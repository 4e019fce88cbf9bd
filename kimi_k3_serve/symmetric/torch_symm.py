# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of GPUs, over `torch.distributed._symmetric_memory`."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from kimi_k3_serve.symmetric.region import Region

DISABLE_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def open_torch(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate and zero this rank's bytes. Raises RuntimeError, as where memory is short."""
    from torch.distributed import _symmetric_memory as symm_mem

    storage = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    storage.zero_()
    torch.cuda.synchronize(device)
    return storage


def join_torch(storage: torch.Tensor, group: Any, *, multicast: bool) -> Region:
    """Map every rank's bytes. Collective over `group` (a process group over NCCL).

    Raises:
        RuntimeError: the GPUs do not reach each other's memory; or multicast is asked for and there is none.
    """
    from torch.distributed import _symmetric_memory as symm_mem

    handle = symm_mem.rendezvous(storage, group.group_name)
    if multicast and not handle.multicast_ptr:
        raise RuntimeError("PyTorch gave no multicast address")
    peers = tuple(
        storage if peer == handle.rank else handle.get_buffer(peer, (storage.numel(),), torch.uint8, 0)
        for peer in range(handle.world_size)
    )
    return Region(handle.rank, peers, handle.multicast_ptr if multicast else 0, handle)


def gpu_name(device: torch.device) -> str:
    """What tells this GPU from all others, whatever number a process gives it; empty for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def peer_objection(device: torch.device, members: Sequence[str]) -> str | None:
    """Why this GPU cannot store into the memory of the group's others; None where nothing is known against it.

    Args:
        members: `gpu_name` of every rank's GPU. One that this process does not see is taken on trust.
    """
    if device.type != "cuda":
        return f"{device.type} has no GPU peers"
    try:
        import torch.distributed._symmetric_memory
    except ImportError as error:
        return f"this PyTorch has no symmetric memory ({error})"
    for other in range(torch.cuda.device_count()):
        if other == device.index or gpu_name(torch.device("cuda", other)) not in members:
            continue
        if not torch.cuda.can_device_access_peer(device, other):
            return f"{device} has no peer access to cuda:{other}"
    return None


def multicast_objection(device: torch.device, members: Sequence[str]) -> str | None:
    """Why one store cannot reach all ranks; None where nothing is known against it."""
    if reason := peer_objection(device, members):
        return reason
    if os.environ.get(DISABLE_MULTICAST) == "1":
        return f"{DISABLE_MULTICAST}=1"
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index):
        return f"{device} has no NVLS multicast"
    return None
