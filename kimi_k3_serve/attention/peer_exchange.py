# SPDX-License-Identifier: Apache-2.0
"""The buffers of a peer exchange and its two calls: `gather` before attention, `merge` after it. No vLLM here."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kimi_k3_serve.attention import peer_gather, peer_merge
from kimi_k3_serve.symmetric.deadline import Deadline
from kimi_k3_serve.symmetric.region import Region, addresses, view
from kimi_k3_serve.triton_launch import Launch

ALIGNMENT = 128
TIMEOUT = "KIMI_K3_PEER_DECODE_TIMEOUT_S"
DEFAULT_TIMEOUT_S = 600.0  # as NCCL's: a rank may compile kernels while the others wait
BLOCKS = 128  # upper bound of a merge's grid: small blocks, all resident at once on any data-centre GPU
ROWS = 8  # heads a block merges at a time when there are many
UNIT = 16  # bytes of a query that move as one
UNITS = 128  # of them a block gathers, one a thread
FLAG_BYTES = peer_merge.FLAG_BYTES.value


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

    @property
    def query_units(self) -> tuple[int, int]:
        """Units of 16 bytes of the two parts of a head's query."""
        size = self.query_dtype.itemsize
        return self.latent * size // UNIT, self.rope * size // UNIT

    @property
    def gather_blocks(self) -> int:
        """Of the largest gather."""
        return -(-self.max_tokens * self.heads * sum(self.query_units) // UNITS)

    def layout(self, world_size: int) -> dict[str, tuple[int, int]]:
        """Name -> (byte offset, bytes) of each part of one ubatch's region."""
        rows = self.max_tokens * self.heads * world_size
        others = self.max_tokens * self.heads * (world_size - 1)
        sizes = {
            "slots": 2 * others * sum(self.query_units) * UNIT,
            "merge_flags": BLOCKS * FLAG_BYTES,
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
        """Symmetric memory a rank needs: its ubatches' parts, and behind them states, all ranks' addresses, epochs."""
        tables = 8 * (world_size + (2 + self.gather_blocks) * self.ubatches)
        return self.ubatches * self.layout(world_size)["end"][0] + tables


class PeerExchange:
    """One rank's side. Every rank makes the same calls in the same order (`peer_gather.py`, `peer_merge.py`).

    Addresses and states lie in the region too: at level 2 vLLM's sleep mode discards what a model's layers
    allocate otherwise.
    """

    def __init__(
        self, region: Region, geometry: Geometry, *, blocks: int = BLOCKS, timeout_s: float = 0.0
    ) -> None:
        """Args:
        region: zeroed symmetric memory of at least `geometry.nbytes(W)` bytes a rank.
        blocks: grid of a merge, at most BLOCKS; equal on all ranks.
        timeout_s: how long a launch waits for the others; 0: for ever.
        """
        self.region, self.geometry = region, geometry
        self.rank, self.world_size = region.rank, region.world_size
        self.blocks = min(blocks, BLOCKS)
        self.parts = geometry.layout(self.world_size)
        own = region.own
        if own.numel() < geometry.nbytes(self.world_size):
            raise ValueError(f"region of {own.numel()} bytes; {geometry.nbytes(self.world_size)} are needed")
        if self.world_size > FLAG_BYTES // 8:
            raise ValueError(f"{self.world_size} ranks; the flags of a block hold {FLAG_BYTES // 8}")
        if any(width * geometry.query_dtype.itemsize % UNIT for width in (geometry.latent, geometry.rope)):
            raise ValueError(
                f"queries of {geometry.latent} + {geometry.rope} {geometry.query_dtype} values a head are not "
                f"whole units of {UNIT} bytes"
            )
        self.on_gpu = own.is_cuda
        place = geometry.ubatches * self.parts["end"][0]
        # [ubatch, (epoch, blocks that have signalled)] of the merges
        self.state = view(own, place, (geometry.ubatches, 2), torch.int64)
        place += self.state.nbytes
        self.bases = view(own, place, (self.world_size,), torch.int64)
        self.bases.copy_(torch.tensor(addresses(region), dtype=torch.int64, device="cpu"))
        place += self.bases.nbytes
        # of each block's gathers
        self.epochs = view(own, place, (geometry.ubatches, geometry.gather_blocks), torch.int64)
        self.deadline = Deadline(timeout_s, self.late, on_gpu=self.on_gpu)
        nope, rope = geometry.query_units
        constants = {"NOPE": nope, "ROPE": rope, "UNITS": UNITS, "RANK": self.rank, "W": self.world_size}
        self.gathering = Launch(
            peer_gather.gather_query, constants | {"PTX": self.on_gpu}, num_warps=UNITS // 32
        )
        self.mergers: dict[tuple[Any, ...], Launch] = {}

    def offset(self, part: str, ubatch: int) -> int:
        return ubatch * self.parts["end"][0] + self.parts[part][0]

    def gather(self, nope: torch.Tensor, rope: torch.Tensor, ubatch: int = 0) -> torch.Tensor:
        """Gather every rank's heads.

        Args:
            nope: [B, H, latent] and rope: [B, H, rope], token and head strides multiples of 16 bytes, last dimension
                contiguous; others are copied first.

        Returns:
            [B, W * H, latent + rope], rank-major heads; a new tensor.

        Raises:
            RendezvousTimeout: a rank did not come to an earlier call.
        """
        g, tokens, world = self.geometry, nope.shape[0], self.world_size
        self.check(nope, (tokens, g.heads, g.latent), g.query_dtype)
        self.check(rope, (tokens, g.heads, g.rope), g.query_dtype)
        nope, rope = aligned(nope), aligned(rope)
        query = torch.empty(
            tokens, world * g.heads, g.latent + g.rope, dtype=g.query_dtype, device=nope.device
        )
        self.gathering(
            -(-tokens * g.heads * sum(g.query_units) // UNITS),
            *self.rows_of(nope),
            *self.rows_of(rope),
            query.data_ptr(),
            self.bases.data_ptr(),
            self.offset("slots", ubatch),
            self.epochs.data_ptr() + ubatch * self.epochs.stride(0) * 8,
            *self.deadline.arguments(),
            tokens,
            g.heads,
            g.max_tokens,
        )
        return query

    def merge(
        self,
        partial: torch.Tensor,
        lse: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        *,
        base_e: bool = True,
        ubatch: int = 0,
    ) -> torch.Tensor:
        """Merge every rank's partial attention of this rank's heads.

        Args:
            partial: [B, W * H, latent] over this rank's shard, strides as in `gather`.
            lse: [B, W * H] in any strides and floating dtype; natural logarithm, or base 2 with `base_e` off.
            seq_lens: [requests] int32, rows in this shard: where there is none, the shard is empty.
            query_start_loc: [requests + 1] int32, first token of each request; what follows the last one is padding.

        Returns:
            [B, H, latent], a new tensor.

        Raises:
            RendezvousTimeout: a rank did not come to an earlier call.
            ValueError: shapes, dtypes or strides that do not fit.
        """
        g, tokens, world = self.geometry, partial.shape[0], self.world_size
        self.check(partial, (tokens, world * g.heads, g.latent), g.output_dtype)
        if lse.shape != partial.shape[:2]:
            raise ValueError(f"LSE of shape {tuple(lse.shape)} for outputs of shape {tuple(partial.shape)}")
        requests = len(seq_lens)
        if len(query_start_loc) != requests + 1:
            raise ValueError(
                f"{len(query_start_loc)} starts of {requests} requests; {requests + 1} are needed"
            )
        seq_lens, query_start_loc = seq_lens.int(), query_start_loc.int()
        partial = aligned(partial)
        merged = torch.empty(tokens, g.heads, g.latent, dtype=partial.dtype, device=partial.device)
        grid, rows = self.grid(tokens)
        # One compiled kernel for every number of requests: a decode batch has no more of them than tokens.
        seqs = triton.next_power_of_2(max(g.max_tokens, requests))
        key = (rows, lse.dtype, base_e, seqs)
        launch = self.mergers.get(key) or self.merging(*key)
        launch(
            grid,
            *self.rows_of(partial),
            lse.data_ptr(),
            *lse.stride(),
            seq_lens.data_ptr(),
            query_start_loc.data_ptr(),
            requests,
            merged.data_ptr(),
            self.bases.data_ptr(),
            self.offset("merge_flags", ubatch),
            self.offset("received", ubatch),
            self.offset("received_lse", ubatch),
            self.state.data_ptr() + ubatch * 16,
            *self.deadline.arguments(),
            tokens,
            g.heads,
            g.max_tokens,
        )
        return merged

    def load(self, *, base_e: bool) -> None:
        """Compile and load the kernels for every number of rows, by launches on every rank. Collective.

        Neither a graph's capture nor a step of serving, with other ranks waiting, must have to.
        """
        g, device = self.geometry, self.bases.device
        for tokens in {self.grid(count)[1]: count for count in range(g.max_tokens, 0, -1)}.values():
            shape = (tokens, g.heads, (g.latent + g.rope) * g.query_dtype.itemsize)
            query = torch.zeros(shape, dtype=torch.uint8, device=device).view(g.query_dtype)
            heads = self.gather(query[..., : g.latent], query[..., g.latent :]).shape[1]
            partial = torch.zeros(tokens, heads, g.latent, dtype=g.output_dtype, device=device)
            lse = torch.zeros(tokens, heads, dtype=torch.float32, device=device)
            lens = torch.ones(tokens, dtype=torch.int32, device=device)
            starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
            self.merge(partial, lse, lens, starts, base_e=base_e)

    def merging(self, rows: int, lse: torch.dtype, base_e: bool, seqs: int) -> Launch:
        g = self.geometry
        constants = {
            "ELEMENT": element(g.output_dtype),
            "LSE": element(lse),
            "VALUE": g.latent,
            "ROWS": rows,
            "SEQS": seqs,
            "BASE_E": base_e,
            "RANK": self.rank,
            "W": self.world_size,
            "LANES": triton.next_power_of_2(self.world_size),
            "PTX": self.on_gpu,
        }
        launch = Launch(peer_merge.merge_partials, constants, num_warps=warps(rows))
        self.mergers[rows, lse, base_e, seqs] = launch
        return launch

    def rows_of(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        """Address of an aligned tensor [B, H, D], and its token and head strides in units of 16 bytes."""
        each = 16 // tensor.itemsize
        return tensor.data_ptr(), tensor.stride(0) // each, tensor.stride(1) // each

    def late(self, missing: int, last: int, epoch: int, place: int) -> str:
        ubatch, offset = divmod(place, self.parts["end"][0])
        step = "merge" if offset >= self.parts["merge_flags"][0] else "query gather"
        return (
            f"rank {self.rank}: rank {missing} did not come to {step} {epoch} of ubatch {ubatch} within "
            f"{self.deadline.limit_s:g} s (its last was {last}); see that rank's log, or raise {TIMEOUT}"
        )

    def grid(self, tokens: int) -> tuple[int, int]:
        """Blocks of a merge, and rows a block merges at a time: the same on every rank."""
        total = tokens * self.geometry.heads
        rows = min(ROWS, triton.next_power_of_2(math.ceil(total / self.blocks)))
        return min(self.blocks, -(-total // rows)), rows

    def check(self, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tensor.shape != shape or tensor.dtype != dtype or tensor.stride(-1) != 1:
            raise ValueError(
                f"expected {dtype} {shape} with a contiguous last dimension, got {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )
        if not 0 < shape[0] <= self.geometry.max_tokens:
            raise ValueError(f"{shape[0]} tokens; this exchange holds 1 to {self.geometry.max_tokens}")


def warps(rows: int) -> int:
    """Of a block: a single row is one warp's, which needs no barrier; each thread moves 16 bytes at a time."""
    return 1 if rows == 1 else 4


def element(dtype: torch.dtype) -> Any:
    """A dtype in Triton."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where every row begins on 16 bytes, else a copy where it does."""
    size = tensor.itemsize
    if (tensor.data_ptr() | tensor.stride(0) * size | tensor.stride(1) * size) & 15 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
