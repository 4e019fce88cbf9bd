# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory of processes of one machine: one nameless, memory-mapped file a rank."""

import mmap
import os
import threading
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from kimi_k3_serve.symmetric.agreement import everyone
from kimi_k3_serve.symmetric.region import Region


def fence() -> None:
    """Order this thread's loads and stores before it against those after it, for other processes too.

    Python has no fence of its own. A lock released and taken again is one: on Linux it is an atomic with
    release and then one with acquire semantics on the same word, which neither x86-64 nor Arm reorders
    (release to acquire is sequentially consistent there). About 0.1 us.
    """
    private = threading.Lock()
    private.acquire()
    private.release()
    private.acquire()


def open_shared(nbytes: int, device: torch.device) -> BinaryIO:
    """Make this rank's file, which is gone when nobody holds it any more. Raises OSError.

    Anonymous memory files, which the ranks open through /proc: not bounded by the size of /dev/shm (64 MiB in a
    container, by default), and nothing is left behind however a process ends.
    """
    file = os.fdopen(os.memfd_create("kimi-k3-symmetric"), "r+b", buffering=0)
    file.truncate(nbytes)
    return file


def join_shared(file: BinaryIO, group: Any) -> Region:
    """Map every rank's file. Collective over `group` (any backend that moves Python objects).

    Raises:
        OSError: a rank's file cannot be opened from here, as from another process namespace.
    """
    try:
        files = everyone(group, (os.getpid(), file.fileno(), os.fstat(file.fileno()).st_ino))
        peers = tuple(map_file(f"/proc/{pid}/fd/{opened}", inode) for pid, opened, inode in files)
    finally:
        dist.barrier(group)
        file.close()
    return Region(dist.get_rank(group), peers)


def map_file(path: str, inode: int) -> torch.Tensor:
    """uint8 over a whole file's pages; the mapping lives as long as the tensor.

    Raises:
        OSError: the file cannot be opened, or is another one: elsewhere the same process number means another.
    """
    with open(path, "r+b") as file:  # noqa: PTH123
        status = os.fstat(file.fileno())
        if status.st_ino != inode:
            raise OSError(f"{path} is not the other rank's memory")
        return torch.frombuffer(mmap.mmap(file.fileno(), status.st_size), dtype=torch.uint8)
