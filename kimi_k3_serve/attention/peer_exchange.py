# SPDX-License-Identifier: Apache-2.0
"""The buffers of a peer exchange and its two calls: `gather` before attention, `merge` after it. No vLLM here."""

import math
from dataclasses import dataclass

import torch

from kimi_k3_serve.attention import peer_kernels
from kimi_k3_serve.symmetric.region import Region, addresses, view

ALIGNMENT = 128
BLOCKS = 128  # upper bound of a grid: small blocks, all resident at once on any data-centre GPU
ROWS = 8  # heads a block moves at a time when there are many


@dataclass(frozen=True)
class Geometry:
    """What one rank exchanges: H local heads, query width latent + rope, output width latent.

    A gather or merge may hold up to `max_tokens` tokens; DBO ubatches have buffers of their own.
    """

    heads: int
    latent: int
    rope: int
    query_dtype: torch.dtype
    output_dtype: torch.dtype
    max_tokens: int
    ubatches: int = 1

    def layout(self, world_size: int) -> dict[str, tuple[int, int]]:
        """Name -> (byte offset, bytes) of each part of one ubatch's region."""
        rows = self.max_tokens * self.heads * world_size
        sizes = {
            "gather_flags": world_size * BLOCKS * 8,
            "merge_flags": world_size * BLOCKS * 8,
            "query": rows * (self.latent + self.rope) * self.query_dtype.itemsize,
            "received": 2 * rows * self.latent * self.output_dtype.itemsize,
            "received_lse": 2 * rows * 4,
        }
        parts, offset = {}, 0
        for name, size in sizes.items():
            parts[name] = (offset, size)
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        parts["end"] = (offset, 0)
        return parts

    def nbytes(self, world_size: int) -> int:
        """Symmetric memory a rank needs for all its ubatches."""
        return self.ubatches * self.layout(world_size)["end"][0]


class PeerExchange:
    """One rank's side. Every rank makes the same calls in the same order; see `peer_kernels` for the protocol."""

    def __init__(self, region: Region, geometry: Geometry, *, blocks: int = BLOCKS) -> None:
        """Args:
        region: zeroed symmetric memory of at least `geometry.nbytes(W)` bytes a rank.
        blocks: grid of a launch, at most BLOCKS; equal on all ranks.
        """
        self.region, self.geometry = region, geometry
        self.rank, self.world_size = region.rank, region.world_size
        self.blocks = min(blocks, BLOCKS)
        self.parts = geometry.layout(self.world_size)
        own = region.peers[self.rank]
        if own.numel() < geometry.nbytes(self.world_size):
            raise ValueError(f"region of {own.numel()} bytes; {geometry.nbytes(self.world_size)} are needed")
        self.bases = torch.tensor(addresses(region), dtype=torch.int64, device=own.device)
        # [ubatch, gather or merge, (epoch, blocks done)]
        self.state = torch.zeros(geometry.ubatches, 2, 2, dtype=torch.int64, device=own.device)

    def offset(self, part: str, ubatch: int) -> int:
        return ubatch * self.parts["end"][0] + self.parts[part][0]

    def gather(self, nope: torch.Tensor, rope: torch.Tensor, ubatch: int = 0) -> torch.Tensor:
        """Gather every rank's heads.

        Args:
            nope: [B, H, latent] and rope: [B, H, rope], any token and head strides, last dimension contiguous.

        Returns:
            [B, W * H, latent + rope] in symmetric memory, rank-major heads; holds until the next gather.
        """
        g, tokens = self.geometry, nope.shape[0]
        self.check(nope, (tokens, g.heads, g.latent), g.query_dtype)
        self.check(rope, (tokens, g.heads, g.rope), g.query_dtype)
        grid, rows = self.grid(tokens)
        peer_kernels.gather_query[(grid,)](
            as_bits(nope),
            nope.stride(0),
            nope.stride(1),
            as_bits(rope),
            rope.stride(0),
            rope.stride(1),
            self.bases,
            self.offset("gather_flags", ubatch),
            self.offset("query", ubatch),
            self.state[ubatch, 0],
            self.rank,
            tokens,
            g.heads,
            W=self.world_size,
            NOPE=g.latent,
            ROPE=g.rope,
            ROWS=rows,
            BLOCKS=BLOCKS,
        )
        shape = (tokens, self.world_size * g.heads, g.latent + g.rope)
        return view(self.region.peers[self.rank], self.offset("query", ubatch), shape, g.query_dtype)

    def merge(
        self,
        partial: torch.Tensor,
        lse: torch.Tensor,
        seq_lens: torch.Tensor | None = None,
        query_start_loc: torch.Tensor | None = None,
        *,
        base_e: bool = True,
        ubatch: int = 0,
    ) -> torch.Tensor:
        """Merge every rank's partial attention of this rank's heads.

        Args:
            partial: [B, W * H, latent] over this rank's shard, any token and head strides.
            lse: [B, W * H] in any strides and floating dtype; natural logarithm, or base 2 with `base_e` off.
            seq_lens: [requests] rows in this shard, with query_start_loc: [requests + 1]; they mark empty shards.

        Returns:
            [B, H, latent], a new tensor.
        """
        g, tokens, world = self.geometry, partial.shape[0], self.world_size
        self.check(partial, (tokens, world * g.heads, g.latent), g.output_dtype)
        if lse.shape != partial.shape[:2]:
            raise ValueError(f"LSE of shape {tuple(lse.shape)} for outputs of shape {tuple(partial.shape)}")
        merged = torch.empty(tokens, g.heads, g.latent, dtype=partial.dtype, device=partial.device)
        masked = seq_lens is not None and query_start_loc is not None
        requests = seq_lens.shape[0] if seq_lens is not None else 0
        grid, rows = self.grid(tokens)
        peer_kernels.merge_partials[(grid,)](
            partial,
            partial.stride(0),
            partial.stride(1),
            lse,
            lse.stride(0),
            lse.stride(1),
            seq_lens if masked else self.state,
            query_start_loc if masked else self.state,
            requests,
            merged,
            self.bases,
            self.offset("merge_flags", ubatch),
            self.offset("received", ubatch),
            self.offset("received_lse", ubatch),
            self.state[ubatch, 1],
            self.rank,
            tokens,
            g.heads,
            g.max_tokens,
            W=world,
            VALUE=g.latent,
            ROWS=rows,
            BLOCKS=BLOCKS,
            # One compiled kernel for every number of requests: a decode batch has no more of them than tokens.
            SEQS=power_of_two(max(g.max_tokens, requests)),
            BASE_E=base_e,
            MASK=masked,
        )
        return merged

    def grid(self, tokens: int) -> tuple[int, int]:
        """Blocks of a launch, and rows a block moves at a time: the same on every rank."""
        total = tokens * self.geometry.heads
        rows = min(ROWS, power_of_two(math.ceil(total / self.blocks)))
        return min(self.blocks, -(-total // rows)), rows

    def check(self, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.stride(-1) != 1:
            raise ValueError(
                f"expected {dtype} {shape} with a contiguous last dimension, got {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
        if not 0 < shape[0] <= self.geometry.max_tokens:
            raise ValueError(f"{shape[0]} tokens; this exchange holds 1 to {self.geometry.max_tokens}")


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number` (at least 1)."""
    return 1 << max(number - 1, 0).bit_length()


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """FP8 is only copied: hand it over as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
