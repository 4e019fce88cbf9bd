# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of processes of one machine: one memory-mapped file a rank, without a name once all have it."""

import mmap
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = Path("/dev/shm")

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
    """Collective over `group` (any backend that moves Python objects; all ranks on one machine).

    The files lose their names as soon as every rank has mapped them, so that nothing outlives the processes,
    however they end.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    token = [secrets.token_hex(8)]
    dist.broadcast_object_list(token, group=group, group_src=0)
    paths = [FOLDER / f"kimi-k3-{token[0]}-{peer}" for peer in range(world_size)]
    descriptor = os.open(paths[rank], os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)  # a full /dev/shm is an error here, not a SIGBUS later
        os.close(descriptor)
        dist.barrier(group)
        peers = tuple(map_file(path, nbytes) for path in paths)
        dist.barrier(group)
    finally:
        paths[rank].unlink()
    return SharedRegion(rank, peers)


def map_file(path: Path, nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 over the file's pages; the mapping lives as long as the tensor."""
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
