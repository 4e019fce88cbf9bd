# SPDX-License-Identifier: Apache-2.0
"""Slots, capacity, and what cannot be published: the part of the publication that no transport changes."""

from typing import Protocol

import torch

from kimi_k3_serve.errors import UserError
from kimi_k3_serve.publish.chunks import DeviceChunk
from kimi_k3_serve.publish.layout import SLOTS, Layout
from kimi_k3_serve.publish.ranks import Rank, TorchRank, TritonRank
from kimi_k3_serve.symmetric.region import Region, view

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
ROW_ALIGNMENT = 16
"""Bytes: rows, strides and addresses that are multiples of it can be moved 16 bytes at a time."""


class PublishError(UserError):
    """A chunk that cannot be published."""


class PrefillKV(Protocol):
    """How a prefill gets the context rows that other ranks hold."""

    transport: str
    needs_gathered_rows: bool

    def gather(
        self,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        chunk: DeviceChunk,
        *,
        slot: int,
        ubatch: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of a chunk, as every rank has cached them. Collective over the group.

        Args:
            cache: [blocks, block_size, L + P] paged rows of this rank; for fp8 its raw bytes.
            block_table: [requests of the chunk, >= blocks] int32.
            slot: the chunk's index modulo 2, beginning at 0 in each layer.

        Returns:
            kv_c [N, L] and k_pe [N, P] in the cache's dtype (e4m3 bytes are not scaled), contiguous. They are
            good until this rank's next but one call for the same ubatch.
        """
        ...


class Publisher:
    """`PrefillKV` over symmetric memory: the returned tensors are views of it.

    Args:
        region: at least `Layout.nbytes` on every rank.
        implementation: "triton" (GPU, or the interpreter) or "torch" (host memory).
        timeout_s: how long a wait may last.

    Raises:
        PublishError: dtype or widths that cannot be published.
    """

    needs_gathered_rows = False

    def __init__(
        self,
        region: Region,
        layout: Layout,
        dtype: torch.dtype,
        *,
        transport: str,
        implementation: str,
        timeout_s: float = 300.0,
    ) -> None:
        if reason := objection(dtype, layout.latent_bytes, layout.rope_bytes):
            raise PublishError(f"{reason}; use KIMI_K3_PREFILL_KV=collective")
        own = region.peers[region.rank]
        self.transport, self.layout, self.dtype = transport, layout, dtype
        self.rank: Rank = (
            TorchRank(region, layout, timeout_s)
            if implementation == "torch"
            else TritonRank(region, layout, timeout_s, own.device)
        )
        widths = (layout.latent_bytes // dtype.itemsize, layout.rope_bytes // dtype.itemsize)
        self.planes = [
            [
                tuple(
                    view(own, layout.slot_offset(ubatch, slot) + offset, (layout.capacity, width), dtype)
                    for offset, width in zip((layout.kv_c_offset, layout.k_pe_offset), widths, strict=True)
                )
                for slot in range(SLOTS)
            ]
            for ubatch in range(layout.ubatches)
        ]

    def gather(
        self,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        chunk: DeviceChunk,
        *,
        slot: int,
        ubatch: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PrefillKV`. One launch, one wait.

        Raises:
            PublishError: more rows than a plane holds, or a cache of another dtype or alignment.
            ValueError: no such slot or ubatch.
            RendezvousTimeout: a rank never came.
        """
        if chunk.num_rows > self.layout.capacity:
            raise PublishError(
                f"a chunk of {chunk.num_rows} rows does not fit a plane of {self.layout.capacity}; "
                "planes are as large as vLLM's context workspace, so this is a bug: KIMI_K3_PREFILL_KV=stock avoids it"
            )
        self.rank.push(self.words(cache), block_table, chunk, slot, ubatch)
        self.rank.wait(slot, ubatch)
        kv_c, k_pe = self.planes[ubatch][slot]
        return kv_c[: chunk.num_rows], k_pe[: chunk.num_rows]

    def words(self, cache: torch.Tensor) -> torch.Tensor:
        """The paged cache as int32 words."""
        row_bytes = self.layout.latent_bytes + self.layout.rope_bytes
        strides = [stride * cache.element_size() for stride in cache.stride()[:-1]]
        if cache.element_size() != self.dtype.itemsize or cache.shape[-1] * cache.element_size() != row_bytes:
            raise PublishError(
                f"the KV cache has rows of {cache.shape[-1]} {cache.dtype}, the planes rows of {row_bytes} bytes of "
                f"{self.dtype}; use KIMI_K3_PREFILL_KV=collective"
            )
        if cache.stride(-1) != 1 or any(n % ROW_ALIGNMENT for n in (*strides, cache.data_ptr())):
            raise PublishError(
                f"rows of the KV cache are not on {ROW_ALIGNMENT} bytes (strides {strides} bytes); "
                "use KIMI_K3_PREFILL_KV=collective"
            )
        return cache.view(torch.int32)


def objection(dtype: torch.dtype, latent_bytes: int, rope_bytes: int) -> str | None:
    """Why rows of this kind cannot be published; None where they can."""
    if dtype not in DTYPES:
        return f"a KV cache of {dtype} cannot be published"
    for width in (latent_bytes, rope_bytes):
        if width < ROW_ALIGNMENT or width & (width - 1):
            return (
                f"rows of {latent_bytes} + {rope_bytes} bytes cannot be published: each part must be a power of two "
                f"of at least {ROW_ALIGNMENT}"
            )
    return None


def dequantise(
    kv_c: torch.Tensor, k_pe: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 planes -> model dtype: float32(raw) * scale, rounded once, bit for bit what stock's gather yields."""
    if kv_c.device.type != "cuda":
        return (kv_c.float() * scale).to(dtype), (k_pe.float() * scale).to(dtype)
    from kimi_k3_serve.publish.kernel import dequantise_kernel

    block = 4096
    answers = []
    for plane in (kv_c, k_pe):
        out = torch.empty(plane.shape, dtype=dtype, device=plane.device)
        dequantise_kernel[(-(-plane.numel() // block),)](plane, scale, out, plane.numel(), BLOCK=block)
        answers.append(out)
    return answers[0], answers[1]
