# SPDX-License-Identifier: Apache-2.0
"""The context maps of a batch's chunks on the device: one copy a batch, shared by all layers.

A chunk's part of that copy, int32, C = its padded local rows rounded up:

    header [16]        padded local rows, -, tiles
    rows [3, C]        destination, request and position of each padded local row
    tiles [tiles, 2]   runs of other ranks' compact rows; only where rows are to be scaled on arrival
    gathered [N]       where each compact row stands after an all-gather; only for the collective fallback
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kimi_k3_serve.context_map import build_context_map, gathered_rows, remote_tiles

Geometry = tuple[Sequence[int], Sequence[Sequence[int]], Sequence[int]]
"""padded_local_seq_lens [R], local_context_lens_allranks [R][W], local_starts [R]: see `build_context_map`."""

ALIGNMENT = 16
"""int32 entries: every array begins on 64 bytes, so that one compiled kernel serves them all."""
TILE_ROWS = 32
"""Rows of a tile: at 128 threads and 512 + 64 bytes a row, eight 16-byte loads each and a bit."""


@dataclass(frozen=True)
class DeviceChunk:
    """What a publication of one chunk reads on the device."""

    memory: torch.Tensor
    """This chunk's part of the batch's copy; entries beyond those counted in the header are not read."""
    capacity: int
    """C: entries of a map."""
    local_rows: int
    """Padded local rows, known on the host."""
    num_rows: int
    """N, compact rows of the chunk."""
    num_tiles: int = 0
    tiled: bool = False
    """Whether the runs of other ranks' rows are there; there may be none of them."""
    gathered: bool = False

    @property
    def num_local_rows(self) -> torch.Tensor:
        """[1] int32; on the device, so that a captured graph can be replayed with another number."""
        return self.memory[:1]

    @property
    def rows(self) -> torch.Tensor:
        """[3, C] int32: destination, request and position of each padded local row."""
        return self.memory[ALIGNMENT:][: 3 * self.capacity].view(3, self.capacity)

    @property
    def tiles(self) -> torch.Tensor:
        """[num_tiles, 2] int32: begin and end of each run of other ranks' compact rows."""
        return self.memory[ALIGNMENT + 3 * self.capacity :][: 2 * self.num_tiles].view(self.num_tiles, 2)

    @property
    def gathered_rows(self) -> torch.Tensor:
        """[N] int32: where each compact row stands after the all-gather. Only if the batch was uploaded with it."""
        assert self.gathered
        begin = ALIGNMENT + 3 * self.capacity + align(2 * self.num_tiles)
        return self.memory[begin:][: self.num_rows]


def upload(
    chunks: Sequence[Geometry],
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    tiles: bool = False,
    gathered: bool = False,
) -> list[DeviceChunk]:
    """Build the maps of a batch and copy them to the device at once.

    Args:
        tiles: also the runs of other ranks' rows, to be scaled on arrival.
        gathered: also what the collective fallback needs.
    """
    runs = [
        remote_tiles(*chunk, rank=rank, world_size=world_size, tile_rows=TILE_ROWS) if tiles else NONE
        for chunk in chunks
    ]
    orders = [gathered_rows(*chunk, world_size=world_size) if gathered else NONE for chunk in chunks]
    counts = [sum(padded) for padded, _, _ in chunks]
    sizes = [
        ALIGNMENT + 3 * align(count) + align(run.size) + align(order.size)
        for count, run, order in zip(counts, runs, orders, strict=True)
    ]
    pinned = device.type == "cuda"
    host = torch.empty(sum(sizes), dtype=torch.int32, device="cpu", pin_memory=pinned)
    on_device = host if device.type == "cpu" else torch.empty_like(host, device=device)
    buffer, begin, answers = host.numpy(), 0, []
    for chunk, run, order, count, size in zip(chunks, runs, orders, counts, sizes, strict=True):
        capacity, part = align(count), buffer[begin : begin + size]
        part[:3] = count, 0, len(run)
        maps = part[ALIGNMENT:][: 3 * capacity].reshape(3, capacity)[:, :count]
        built = build_context_map(*chunk, rank=rank, world_size=world_size, out=maps)
        part[ALIGNMENT + 3 * capacity :][: run.size] = run.ravel()
        part[ALIGNMENT + 3 * capacity + align(run.size) :][: order.size] = order
        memory = on_device[begin : begin + size]
        answers.append(DeviceChunk(memory, capacity, count, built.num_rows, len(run), tiles, gathered))
        begin += size
    if on_device is not host:
        on_device.copy_(host, non_blocking=pinned)
    return answers


NONE = np.empty(0, dtype=np.int32)


def align(entries: int) -> int:
    """At least one row, so that a chunk of which this rank holds nothing still has addresses."""
    return max(1, -(-entries // ALIGNMENT)) * ALIGNMENT
