# SPDX-License-Identifier: Apache-2.0
"""What a kernel needs of symmetric memory, and nothing more: an address for each rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Region:
    """The same number of bytes on every rank, zeroed at first, each mapped into this process.

    Lives as long as the object does. Nothing in it synchronises: that is its user's protocol.
    """

    rank: int
    peers: tuple[torch.Tensor, ...]
    """[world_size] uint8 tensors of equal length: every rank's bytes; `peers[rank]` is this rank's own."""
    multicast_address: int = 0
    """Where one `multimem.st` reaches every rank's bytes; 0 without multicast. A plain access is undefined."""
    owner: Any = None
    """What must stay alive for the mappings to."""

    @property
    def world_size(self) -> int:
        return len(self.peers)

    @property
    def own(self) -> torch.Tensor:
        """This rank's bytes."""
        return self.peers[self.rank]

    @classmethod
    def group(cls, world_size: int, nbytes: int, device: torch.device | str = "cpu") -> list["Region"]:
        """The W regions of W ranks that all live in this process: for tests, and for several ranks on one GPU."""
        peers = tuple(torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(world_size))
        return [cls(rank, peers) for rank in range(world_size)]


def view(memory: torch.Tensor, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A typed view of `shape` that begins `offset` bytes into one rank's bytes (a multiple of the item size)."""
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(*shape)


def addresses(region: Region) -> list[int]:
    """Where each rank's bytes begin in this process's address space."""
    return [peer.data_ptr() for peer in region.peers]
