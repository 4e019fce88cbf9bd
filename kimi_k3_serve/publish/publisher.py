# SPDX-License-Identifier: Apache-2.0
"""Slots, capacity, and what cannot be published: the part of the publication that no transport changes."""

from typing import Any, Protocol

import torch

from kimi_k3_serve.errors import UserError
from kimi_k3_serve.publish.chunks import DeviceChunk
from kimi_k3_serve.publish.layout import Layout
from kimi_k3_serve.publish.ranks import Rank, Scaled, TorchRank, TritonRank
from kimi_k3_serve.symmetric.region import Region, view

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
ROW_ALIGNMENT = 16
"""Bytes: rows, strides and addresses that are multiples of it can be moved 16 bytes at a time."""
REMEMBERED = 256
"""Views of planes: more than a batch has chunks."""


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
        scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of a chunk, as every rank has cached them. Collective over the group.

        Args:
            cache: [blocks, block_size, L + P] paged rows of this rank; for fp8 its raw bytes.
            block_table: [requests of the chunk, >= blocks] int32.
            slot: the chunk's index modulo 2, beginning at 0 in each layer.
            scale: float32, one element, where e4m3 rows are to be returned scaled.

        Returns:
            kv_c [N, L] and k_pe [N, P], contiguous. Without `scale` in the cache's dtype, good until this rank's
            next but one call for the same ubatch; with it in the model's dtype, float32(raw) * scale rounded once,
            and the caller's own.
        """
        ...


class Publisher:
    """`PrefillKV` over symmetric memory: the returned tensors are views of it.

    Args:
        region: at least `Layout.nbytes` on every rank.
        implementation: "triton" (GPU, or the interpreter) or "torch" (host memory).
        timeout_s: how long a wait may last; 0: for ever.
        model_dtype: of scaled rows.

    Raises:
        PublishError: dtype or widths that cannot be published, or memory of other ranks or fewer bytes.
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
        model_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if reason := objection(dtype, layout.latent_bytes, layout.rope_bytes):
            raise PublishError(f"{reason}; use KIMI_K3_PREFILL_KV=collective")
        own = region.peers[region.rank]
        if layout.world_size != region.world_size or layout.nbytes > own.numel():
            raise PublishError(
                f"planes for {layout.world_size} ranks take {layout.nbytes} bytes on each, and the symmetric memory is "
                f"{own.numel()} bytes on {region.world_size} ranks; this is a bug: KIMI_K3_PREFILL_KV=stock avoids it"
            )
        self.transport, self.layout, self.dtype, self.model_dtype = transport, layout, dtype, model_dtype
        self.rank: Rank = (
            TorchRank(region, layout, timeout_s)
            if implementation == "torch"
            else TritonRank(region, layout, timeout_s, own.device)
        )
        self.widths = (layout.latent_bytes // dtype.itemsize, layout.rope_bytes // dtype.itemsize)
        self.planes = [
            [
                tuple(
                    view(own, layout.slot_offset(ubatch, slot) + offset, (layout.capacity, width), dtype)
                    for offset, width in zip(
                        (layout.kv_c_offset, layout.k_pe_offset), self.widths, strict=True
                    )
                )
                for slot in range(layout.slots)
            ]
            for ubatch in range(layout.ubatches)
        ]
        self.accepted: set[tuple[Any, ...]] = set()
        self.handed: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def gather(
        self,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        chunk: DeviceChunk,
        *,
        slot: int,
        ubatch: int = 0,
        scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PrefillKV`. One launch, in which the wait is the last step; with `scale` a second one, which waits.

        Raises:
            PublishError: more rows than a plane holds, or a cache of another dtype or alignment.
            ValueError: no such slot or ubatch.
        """
        planes = self.valid(chunk, slot, ubatch)
        self.check(cache)
        if scale is None:
            self.rank.push(cache, block_table, chunk, slot, ubatch, wait=True)
            return planes
        assert chunk.tiled, "a chunk whose rows are to be scaled is uploaded with tiles=True"
        kv_c, k_pe = (
            cache.new_empty((chunk.num_rows, width), dtype=self.model_dtype) for width in self.widths
        )
        scaled = Scaled(scale, kv_c, k_pe)
        self.rank.push(cache, block_table, chunk, slot, ubatch, scaled=scaled)
        self.rank.scale(chunk, slot, ubatch, scaled)
        return kv_c, k_pe

    def valid(self, chunk: DeviceChunk, slot: int, ubatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A slot's planes up to row N: every layer of a batch asks for the same ones."""
        key = (ubatch, slot, chunk.num_rows)
        if (known := self.handed.get(key)) is not None:
            return known
        self.layout.slot_offset(ubatch, slot)
        if chunk.num_rows > self.layout.capacity:
            raise PublishError(
                f"a chunk of {chunk.num_rows} rows does not fit a plane of {self.layout.capacity}; "
                "planes are as large as vLLM's context workspace, so this is a bug: KIMI_K3_PREFILL_KV=stock avoids it"
            )
        if len(self.handed) >= REMEMBERED:
            self.handed.clear()
        kv_c, k_pe = (plane[: chunk.num_rows] for plane in self.planes[ubatch][slot])
        self.handed[key] = kv_c, k_pe
        return kv_c, k_pe

    def check(self, cache: torch.Tensor) -> None:
        """That rows of the paged cache are those of the planes, and can be moved 16 bytes at a time."""
        key = (cache.shape[-1], cache.dtype, cache.stride(), cache.data_ptr() % ROW_ALIGNMENT)
        if key in self.accepted:
            return
        require_rows(cache, self.dtype, sum(self.widths))
        strides = [stride * cache.element_size() for stride in cache.stride()[:-1]]
        if cache.stride(-1) != 1 or any(n % ROW_ALIGNMENT for n in (*strides, cache.data_ptr())):
            raise PublishError(
                f"rows of the KV cache are not on {ROW_ALIGNMENT} bytes (strides {strides} bytes); "
                "use KIMI_K3_PREFILL_KV=collective"
            )
        self.accepted.add(key)


def require_rows(cache: torch.Tensor, dtype: torch.dtype, width: int) -> None:
    """That a paged cache holds rows of `width` elements of `dtype`; e4m3 may come as the bytes that it is.

    Raises:
        PublishError: it does not.
    """
    raw = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
    if cache.dtype not in (dtype, raw) or cache.shape[-1] != width:
        raise PublishError(
            f"the KV cache has rows of {cache.shape[-1]} {cache.dtype}, where {width} {dtype} were announced; this is "
            "a bug: KIMI_K3_PREFILL_KV=stock avoids it"
        )


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
