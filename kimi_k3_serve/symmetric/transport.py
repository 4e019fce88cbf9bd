# SPDX-License-Identifier: Apache-2.0
"""Ways to reach the other ranks, in order of preference, and the choice that all ranks make alike.

multicast   one `multimem.st` reaches every rank's memory (NVLS)
peer        a store to each rank's memory through its pointer (NVLink, or PCIe peer to peer)
shared      memory that processes of one machine map (CPU)
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from kimi_k3_serve.errors import UserError
from kimi_k3_serve.symmetric.region import Region
from kimi_k3_serve.symmetric.shared import allocate_shared
from kimi_k3_serve.symmetric.torch_symm import allocate_torch, multicast_objection, peer_objection

PREFERENCE = ("multicast", "peer", "shared")


class SymmetricMemoryError(UserError):
    """Symmetric memory was asked for in a way that cannot work."""


def shared_objection(device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"{device.type} tensors do not live in shared host memory"
    return None if hasattr(os, "memfd_create") else "no anonymous memory files here (Linux has them)"


OBJECTIONS: Mapping[str, Callable[[torch.device], str | None]] = {
    "multicast": multicast_objection,
    "peer": peer_objection,
    "shared": shared_objection,
}


def choose(
    group: Any, device: torch.device, among: Sequence[str] = PREFERENCE
) -> tuple[str | None, dict[str, str]]:
    """The first transport that every rank of `group` can use. Collective: all ranks get the same answer.

    Args:
        group: a process group that moves Python objects (vLLM's `cpu_group`).

    Returns:
        Its name, or None where there is none; and for each transport passed over, the first rank's reason.
    """
    mine = {name: OBJECTIONS[name](device) for name in among}
    facts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(facts, (mine, socket.gethostname()), group=group)
    reasons: dict[str, str] = {}
    for name in among:
        found = [f"rank {rank}: {why[name]}" for rank, (why, _) in enumerate(facts) if why[name]]
        if name != "multicast" and len({host for _, host in facts}) > 1:
            found.append("the ranks are on different machines")
        if not found:
            return name, reasons
        reasons[name] = found[0]
    return None, reasons


def allocate(transport: str, nbytes: int, group: Any, device: torch.device, *, host_group: Any) -> Region:
    """Allocate `nbytes` zeroed bytes on every rank. Collective.

    Args:
        group: the ranks; over NCCL for `multicast` and `peer`.
        host_group: the same ranks over a backend that moves Python objects; may be `group` itself.

    Raises:
        SymmetricMemoryError: the ranks ask for different sizes or transports, or multicast gave no address.
    """
    asked: list[Any] = [None] * dist.get_world_size(host_group)
    dist.all_gather_object(asked, (transport, nbytes), group=host_group)
    if len(set(asked)) > 1:
        raise SymmetricMemoryError(
            f"ranks ask for different symmetric memory: {asked}; give every rank one configuration"
        )
    if transport == "shared":
        return allocate_shared(nbytes, host_group)
    region = allocate_torch(nbytes, group, device, multicast=transport == "multicast")
    if transport == "multicast" and not region.multicast_address:
        raise SymmetricMemoryError("PyTorch gave no multicast address; use the peer transport")
    return region
