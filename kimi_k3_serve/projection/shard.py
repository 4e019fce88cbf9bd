# SPDX-License-Identifier: Apache-2.0
"""Column shards of a merged projection: who holds which columns, and how the logical order comes back.

A merged projection computes several outputs, its *parts*, of `widths` columns each: q_a (1,536) and kv_a (576) in
Kimi-K3. Each of W ranks holds 1/W of every part, so its local row is [q_a / W | kv_a / W]. Gathered rank-major, a row
reads q_a of rank 0, kv_a of rank 0, q_a of rank 1, ...: `restore` puts all of q_a first, then all of kv_a.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kimi_k3_serve.errors import UserError

if TYPE_CHECKING:
    import torch

SWITCH = "VLLM_KIMI_SHARD_QKV_A"
GIB = 2**30
MLA_LAYERS, HIDDEN, Q_A, KV_A = 24, 7168, 1536, 576  # of Kimi-K3; kv_a is kv_lora_rank 512 + RoPE 64


class ShardError(UserError):
    """The projection cannot be cut as it was asked to be."""


def enabled() -> bool:
    """Whether VLLM_KIMI_SHARD_QKV_A=1.

    Raises:
        ShardError: the variable is neither 0 nor 1.
    """
    value = os.environ.get(SWITCH) or "0"
    if value not in ("0", "1"):
        raise ShardError(f"{SWITCH}={value!r} is not known; use 1, or 0 to keep the replicated projection")
    return value == "1"


def local_widths(widths: Sequence[int], world_size: int, block: int = 1) -> tuple[int, ...]:
    """Columns of each part on one of `world_size` ranks.

    Args:
        block: columns that share one quantisation scale; a shard must not begin inside such a block.

    Raises:
        ShardError: a width does not divide, or not at a block's edge.
    """
    for width in widths:
        if width % world_size:
            raise ShardError(
                f"{SWITCH}=1 cannot split {width} columns over {world_size} tensor-parallel ranks; "
                f"use a tensor-parallel size that divides each of {', '.join(map(str, widths))}, or unset {SWITCH}"
            )
        if world_size > 1 and width // world_size % block:
            raise ShardError(
                f"{SWITCH}=1 leaves {width // world_size} columns a rank, which cuts a quantisation block of {block}; "
                f"unset {SWITCH}"
            )
    return tuple(width // world_size for width in widths)


def padded(width: int, quantum: int) -> int:
    """`width` rounded up to a transport's quantum of elements: 132 to 136 and 264 to itself, at 8."""
    return -(-width // quantum) * quantum


def restore(gathered: torch.Tensor, local: Sequence[int]) -> torch.Tensor:
    """Rank-major rows in the projection's logical order.

    Args:
        gathered: [W, rows, at least sum(local)]; columns beyond sum(local) are a transport's padding and are dropped.
        local: columns of each part on one rank.

    Returns:
        [rows, W * sum(local)], contiguous: all ranks' columns of the first part, then of the second, ...
    """
    world_size, rows, _ = gathered.shape
    restored = gathered.new_empty(rows, world_size * sum(local))
    begin = 0
    for width in local:
        part = restored[:, world_size * begin : world_size * (begin + width)]
        part.view(rows, world_size, width).copy_(gathered[:, :, begin : begin + width].transpose(0, 1))
        begin += width
    return restored


def weight_bytes(world_size: int = 1, layers: int = MLA_LAYERS, itemsize: int = 2) -> int:
    """Bytes that one rank holds of q_a and kv_a in `layers` MLA layers of Kimi-K3; `world_size` 1 is replicated."""
    return layers * HIDDEN * sum(local_widths((Q_A, KV_A), world_size)) * itemsize


def saved_gib(world_size: int, layers: int = MLA_LAYERS) -> float:
    """GiB a rank that sharding saves over replicating, in BF16: 0.634 at 16 ranks and 24 layers."""
    return (weight_bytes(1, layers) - weight_bytes(world_size, layers)) / GIB
