# SPDX-License-Identifier: Apache-2.0
"""The context maps of a batch's chunks on the device: one copy a batch, shared by all layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kimi_k3_serve.context_map import build_context_map, gathered_rows

Geometry = tuple[Sequence[int], Sequence[Sequence[int]], Sequence[int]]
"""padded_local_seq_lens [R], local_context_lens_allranks [R][W], local_starts [R]: see `build_context_map`."""

ALIGNMENT = 16
"""int32 entries: every array begins on 64 bytes, so that one compiled kernel serves them all."""


@dataclass(frozen=True)
class DeviceChunk:
    """What a publication of one chunk reads on the device."""

    rows: torch.Tensor
    """[3, capacity] int32: destination, request and position of each padded local row; what is beyond
    `num_local_rows` is not read."""
    num_local_rows: torch.Tensor
    """[1] int32."""
    local_rows: int
    """The same number, known on the host."""
    num_rows: int
    """N, compact rows of the chunk."""
    gathered_rows: torch.Tensor | None = None
    """[N] int32, for the collective fallback only: where each compact row stands after the all-gather."""


def upload(
    chunks: Sequence[Geometry],
    *,
    rank: int,
    world_size: int,
    device: torch.device,
    gathered: bool = False,
) -> list[DeviceChunk]:
    """Build the maps of a batch and copy them to the device at once.

    Args:
        gathered: also what the collective fallback needs.
    """
    local_rows = [sum(padded) for padded, _, _ in chunks]
    capacities = [align(rows) for rows in local_rows]
    orders = [gathered_rows(*chunk, world_size=world_size) if gathered else None for chunk in chunks]
    sizes = [
        ALIGNMENT + 3 * capacity + (0 if order is None else align(len(order)))
        for capacity, order in zip(capacities, orders, strict=True)
    ]
    pinned = device.type == "cuda"
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=pinned)
    buffer = host.numpy()
    num_rows, begin = [], 0
    for chunk, count, capacity, order, size in zip(
        chunks, local_rows, capacities, orders, sizes, strict=True
    ):
        buffer[begin] = count
        rows = buffer[begin + ALIGNMENT :][: 3 * capacity].reshape(3, capacity)
        built = build_context_map(*chunk, rank=rank, world_size=world_size, out=rows[:, :count])
        num_rows.append(built.num_rows)
        if order is not None:
            buffer[begin + ALIGNMENT + 3 * capacity :][: len(order)] = order
        begin += size

    on_device = host.to(device, non_blocking=pinned)
    answers = []
    for part, count, capacity, n in zip(
        torch.split(on_device, sizes), local_rows, capacities, num_rows, strict=True
    ):
        maps = part[ALIGNMENT:]
        order_rows = maps[3 * capacity :][:n] if gathered else None
        answers.append(DeviceChunk(maps[: 3 * capacity].view(3, capacity), part[:1], count, n, order_rows))
    return answers


def align(entries: int) -> int:
    """At least one row, so that a chunk of which this rank holds nothing still has addresses."""
    return max(1, -(-entries // ALIGNMENT)) * ALIGNMENT
