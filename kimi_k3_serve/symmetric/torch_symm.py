# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of GPUs, over `torch.distributed._symmetric_memory`."""

import os
from dataclasses import dataclass
from typing import Any

import torch

DISABLE_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@dataclass(frozen=True)
class TorchRegion:
    """A `Region` over peer pointers. Keeps PyTorch's handle, which owns the mappings, alive."""

    rank: int
    peers: tuple[torch.Tensor, ...]
    multicast_address: int
    handle: Any

    @property
    def world_size(self) -> int:
        return len(self.peers)


def allocate_torch(nbytes: int, group: Any, device: torch.device, *, multicast: bool) -> TorchRegion:
    """Collective over `group` (a process group over NCCL whose GPUs reach each other's memory)."""
    from torch.distributed import _symmetric_memory as symm_mem

    storage = symm_mem.empty(nbytes, dtype=torch.uint8, device=device)
    storage.zero_()
    torch.cuda.synchronize(device)
    handle = symm_mem.rendezvous(storage, group.group_name)
    handle.barrier()
    torch.cuda.synchronize(device)
    peers = tuple(
        storage if peer == handle.rank else handle.get_buffer(peer, (nbytes,), torch.uint8, 0)
        for peer in range(handle.world_size)
    )
    address = handle.multicast_ptr if multicast else 0
    return TorchRegion(handle.rank, peers, address, handle)


def peer_objection(device: torch.device) -> str | None:
    """Why this GPU cannot store into its neighbours' memory; None where it can."""
    if device.type != "cuda":
        return f"{device.type} has no GPU peers"
    try:
        import torch.distributed._symmetric_memory
    except ImportError as error:
        return f"this PyTorch has no symmetric memory ({error})"
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    for other in others:
        if not torch.cuda.can_device_access_peer(device, other):
            return f"{device} has no peer access to cuda:{other}"
    return None


def multicast_objection(device: torch.device) -> str | None:
    """Why one store cannot reach all ranks; None where it can."""
    if reason := peer_objection(device):
        return reason
    if os.environ.get(DISABLE_MULTICAST) == "1":
        return f"{DISABLE_MULTICAST}=1"
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    if not _SymmetricMemory.has_multicast_support(DeviceType.CUDA, device.index):
        return f"{device} has no NVLS multicast"
    return None
