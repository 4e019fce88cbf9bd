# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of processes of one machine: one nameless, memory-mapped file a rank."""

import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_private = threading.Lock()
_private.acquire()


def fence() -> None:
    """Order this thread's loads and stores before it against those after it, for other processes too.

    Python has no fence of its own. A lock released and taken again is one: on Linux it is an atomic with
    release and then one with acquire semantics on the same word, which neither x86-64 nor Arm reorders
    (release to acquire is sequentially consistent there). About 0.1 us.
    """
    _private.release()
    _private.acquire()


@dataclass(frozen=True)
class SharedRegion:
    """A `Region` over memory-mapped files."""

    rank: int
    peers: tuple[torch.Tensor, ...]
    multicast_address: int = 0

    @property
    def world_size(self) -> int:
        return len(self.peers)


def allocate_shared(nbytes: int, group: Any) -> SharedRegion:
    """Collective over `group` (any backend that moves Python objects; all ranks in one process namespace).

    Anonymous memory files, which the ranks open through /proc: not bounded by the size of /dev/shm (64 MiB in a
    container, by default), and nothing is left behind however a process ends.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    descriptor = os.memfd_create("kimi-k3-symmetric")
    os.ftruncate(descriptor, nbytes)
    owners: list[Any] = [None] * world_size
    dist.all_gather_object(owners, (os.getpid(), descriptor), group=group)
    peers = tuple(map_file(Path(f"/proc/{pid}/fd/{opened}"), nbytes) for pid, opened in owners)
    dist.barrier(group)
    os.close(descriptor)
    return SharedRegion(rank, peers)


def map_file(path: Path, nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 over the file's pages; the mapping lives as long as the tensor."""
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
