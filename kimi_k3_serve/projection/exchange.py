# SPDX-License-Identifier: Apache-2.0
"""The buffers of a projection gather over peer memory, and its two calls. No vLLM here."""

from dataclasses import dataclass

import torch
import triton

from kimi_k3_serve.projection import kernels
from kimi_k3_serve.symmetric.deadline import Deadline
from kimi_k3_serve.symmetric.region import Region, addresses, view

MAX_ROWS = 8
TIMEOUT = "KIMI_K3_PROJECTION_TIMEOUT_S"
UNIT = 8  # bytes of payload that move as one; they take twice as many in a slot
UNITS = 128  # units of a block: one a thread
STEP = 512  # columns of the hidden state that a product takes at a time


@dataclass(frozen=True)
class Geometry:
    """What a launch moves: bytes a row of the two parts, on one rank; up to `rows` rows."""

    first: int
    second: int
    rows: int = MAX_ROWS
    ubatches: int = 1

    def objection(self) -> str | None:
        """Why these parts cannot be moved; None where they can."""
        for part in (self.first, self.second):
            if part % UNIT:
                return f"{part} bytes a row and rank are not a multiple of {UNIT}"
        return None

    def slots_bytes(self, world_size: int) -> int:
        """Both slots of one ubatch."""
        return 2 * self.rows * world_size * 2 * (self.first + self.second)

    @property
    def units(self) -> int:
        """Of a row of one rank."""
        return (self.first + self.second) // UNIT

    def gather_blocks(self, world_size: int) -> int:
        """Blocks of a `PeerGather`'s row; a `PeerProjection` has one for each unit."""
        return -(-world_size * self.units // UNITS)

    def nbytes(self, world_size: int) -> int:
        """Symmetric memory a rank needs: all slots, every rank's address, an epoch for each row and block."""
        blocks = max(self.units, self.gather_blocks(world_size))
        tables = 8 * world_size + 4 * self.ubatches * self.rows * blocks
        return self.ubatches * self.slots_bytes(world_size) + tables


class PeerLaunch:
    """One rank's memory for one kernel. Every rank makes the same calls in the same order; `kernels` has the protocol.

    Addresses and epochs lie in the region, behind the slots: at level 2 vLLM's sleep mode discards what a model's
    layers allocate otherwise.
    """

    def __init__(self, region: Region, geometry: Geometry, blocks: int, timeout_s: float) -> None:
        """Args:
        region: zeroed symmetric memory of at least `geometry.nbytes(W)` bytes a rank, used by nothing else.
        blocks: of a row.
        timeout_s: how long a launch waits for the others; 0: for ever.

        Raises:
            ValueError: the region is too small, or the parts cannot be gathered.
        """
        own, needed = region.own, geometry.nbytes(region.world_size)
        if own.numel() < needed:
            raise ValueError(f"region of {own.numel()} bytes; {needed} are needed")
        if reason := geometry.objection():
            raise ValueError(reason)
        self.region, self.geometry, self.blocks = region, geometry, blocks
        self.rank, self.world_size = region.rank, region.world_size
        self.first, self.second = geometry.first // UNIT, geometry.second // UNIT
        tables = geometry.ubatches * geometry.slots_bytes(self.world_size)
        self.bases = view(own, tables, (self.world_size,), torch.int64)
        self.bases.copy_(torch.tensor(addresses(region), dtype=torch.int64, device="cpu"))
        shape = (geometry.ubatches, geometry.rows, blocks)
        self.epochs = view(own, tables + 8 * self.world_size, shape, torch.int32)
        self.deadline = Deadline(timeout_s, self.late, on_gpu=own.is_cuda)

    def late(self, missing: int, last: int, epoch: int, place: int) -> str:
        return (
            f"rank {self.rank}: rank {missing} did not come to gather {epoch} of a projection's row within "
            f"{self.deadline.limit_s:g} s; see that rank's log, or raise {TIMEOUT}"
        )


class PeerGather(PeerLaunch):
    """The gather of rows that are there."""

    def __init__(
        self, region: Region, geometry: Geometry, transport: str = "peer", *, timeout_s: float = 0.0
    ) -> None:
        """Args:
        region, timeout_s: see `PeerLaunch`.
        transport: how the region was connected.
        """
        super().__init__(region, geometry, geometry.gather_blocks(region.world_size), timeout_s)
        self.transport = transport

    def warm_up(self) -> None:
        """Compile and load the kernel, by one launch on every rank: a graph's capture must not have to. Collective."""
        for ubatch in range(self.geometry.ubatches):
            first, second = (
                torch.zeros(1, nbytes, dtype=torch.uint8, device=self.bases.device)
                for nbytes in (self.geometry.first, self.geometry.second)
            )
            self.pair(first, second, ubatch)

    def takes(self, *parts: torch.Tensor) -> bool:
        """Whether these rows can go this way. Depends on what is alike on all ranks: shapes, strides, devices."""
        return all(
            part.dim() == 2
            and 0 < part.shape[0] <= self.geometry.rows
            and part.stride(1) == 1
            and part.device == self.bases.device
            and part.stride(0) * part.itemsize % UNIT == 0
            and part.storage_offset() * part.itemsize % UNIT == 0
            for part in parts
        )

    def merged(self, local: torch.Tensor, ubatch: int = 0) -> torch.Tensor:
        """[rows, local columns of both parts], any row stride -> [rows, W times as many], first part first."""
        units = self.geometry.units
        rows, itemsize = local.shape[0], local.itemsize
        if local.shape[1] * itemsize != units * UNIT:
            raise ValueError(f"rows of {local.shape[1] * itemsize} bytes; this gather moves {units * UNIT}")
        words = local.view(torch.int64)
        out = torch.empty(rows, self.world_size * units, dtype=torch.int64, device=local.device)
        behind = self.world_size * self.first
        self.launch(words, words[:, self.first :], out, out[:, behind:], ubatch)
        return out.view(local.dtype)

    def pair(
        self, first: torch.Tensor, second: torch.Tensor, ubatch: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, A] and [rows, B] of any dtypes -> [rows, W * A] and [rows, W * B], rank-major, bit by bit."""
        rows = first.shape[0]
        for part, nbytes in ((first, self.geometry.first), (second, self.geometry.second)):
            if part.shape[0] != rows or part.shape[1] * part.itemsize != nbytes:
                raise ValueError(
                    f"{tuple(part.shape)} {part.dtype}; this gather moves {rows} rows of {nbytes} bytes"
                )
        out_first, out_second = (
            torch.empty(rows, self.world_size * units, dtype=torch.int64, device=first.device)
            for units in (self.first, self.second)
        )
        self.launch(first.view(torch.int64), second.view(torch.int64), out_first, out_second, ubatch)
        return out_first.view(first.dtype), out_second.view(second.dtype)

    def launch(
        self,
        first: torch.Tensor,
        second: torch.Tensor,
        out_first: torch.Tensor,
        out_second: torch.Tensor,
        ubatch: int,
    ) -> None:
        kernels.gather_kernel[(first.shape[0] * self.blocks,)](
            first,
            second,
            out_first,
            out_second,
            first.stride(0),
            second.stride(0),
            out_first.stride(0),
            out_second.stride(0),
            self.bases,
            self.epochs[ubatch],
            ubatch * self.geometry.slots_bytes(self.world_size),
            self.rank,
            *self.deadline.arguments(),
            FIRST=self.first,
            SECOND=self.second,
            ROWS=self.geometry.rows,
            WORLD_SIZE=self.world_size,
            UNITS=UNITS,
            PTX=self.bases.is_cuda,
            num_warps=UNITS // 32,
        )


class PeerProjection(PeerLaunch):
    """A column-sharded projection of one to `rows` rows and the gather of its columns, in one launch."""

    def __init__(
        self, region: Region, geometry: Geometry, inputs: int, *, step: int = STEP, timeout_s: float = 0.0
    ) -> None:
        """Args:
        region, timeout_s: see `PeerLaunch`.
        inputs: columns of the hidden state, a multiple of 16.
        step: of them that a block takes at a time, a power of two.
        """
        super().__init__(region, geometry, geometry.units, timeout_s)
        self.inputs, self.step = inputs, min(step, inputs & -inputs)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile and load the kernel for every number of rows. Collective."""
        columns = self.geometry.units * UNIT // dtype.itemsize
        weight = torch.zeros(columns, self.inputs, dtype=dtype, device=self.bases.device)
        # One kernel for each power of two that a number of rows is rounded up to.
        for rows in {
            triton.next_power_of_2(rows): rows for rows in range(1, self.geometry.rows + 1)
        }.values():
            self.project(weight.new_zeros(rows, self.inputs), weight)

    def takes(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether this product can go this way. Depends on what is alike on all ranks."""
        return (
            x.dim() == 2
            and 0 < x.shape[0] <= self.geometry.rows
            and x.shape[1] == self.inputs
            and x.stride(1) == 1
            and x.stride(0) % 16 == 0
            and x.storage_offset() % 16 == 0
            and x.dtype == weight.dtype
            and x.dtype.itemsize == 2
            and x.dtype.is_floating_point
            and x.device == weight.device == self.bases.device
            and weight.is_contiguous()
            and weight.shape == (self.geometry.units * 4, self.inputs)
        )

    def project(self, x: torch.Tensor, weight: torch.Tensor, ubatch: int = 0) -> torch.Tensor:
        """[rows, inputs] times this rank's [columns, inputs], transposed -> [rows, W * columns], first part first."""
        rows = x.shape[0]
        out = torch.empty(rows, self.world_size * self.blocks, dtype=torch.int64, device=x.device)
        kernels.project_kernel[(self.blocks,)](
            x,
            weight,
            out,
            x.stride(0),
            rows,
            self.bases,
            self.epochs[ubatch],
            ubatch * self.geometry.slots_bytes(self.world_size),
            self.rank,
            *self.deadline.arguments(),
            K=self.inputs,
            STEP=self.step,
            FIRST=self.first,
            SECOND=self.second,
            ROWS=self.geometry.rows,
            M=triton.next_power_of_2(rows),
            WORLD_SIZE=self.world_size,
            WORLD_PADDED=triton.next_power_of_2(self.world_size),
            PTX=self.bases.is_cuda,
            num_warps=8,
        )
        return out.view(x.dtype)
