# SPDX-License-Identifier: Apache-2.0
"""The fallback where ranks cannot store into each other's memory: all-gather padded rows, then take the valid ones."""

from typing import Any

import torch
import torch.distributed as dist

from kimi_k3_serve.publish.chunks import DeviceChunk
from kimi_k3_serve.publish.publisher import require_rows
from kimi_k3_serve.triton_launch import Launch

TILE_BYTES = 16 << 10
"""Bytes of rows that a program of a kernel moves."""


class Collective:
    """`PrefillKV` over the group's own all-gather. Rows travel as the bytes that are cached.

    Against stock: fp8 moves half the bytes, and one launch puts the rows in order (and scales them) instead of one
    slice for each request and rank.
    """

    transport = "collective"
    needs_gathered_rows = True

    def __init__(
        self,
        group: Any,
        dtype: torch.dtype,
        latent: int,
        rope: int,
        model_dtype: torch.dtype = torch.bfloat16,
        *,
        implementation: str,
    ) -> None:
        """Args:
        dtype: of the cached rows, L + P = latent + rope elements each.
        model_dtype: of scaled rows.
        implementation: "triton" (GPU, or the interpreter) or "torch" (host memory).
        """
        self.group, self.dtype, self.model_dtype = group, dtype, model_dtype
        self.latent, self.width = latent, latent + rope
        self.world_size = dist.get_world_size(group)
        self.triton = implementation == "triton"
        self.launches: dict[tuple[Any, ...], Launch] = {}

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
        """See `PrefillKV`. The result is this call's own memory; slot and ubatch mean nothing here.

        Raises:
            PublishError: a cache of other rows.
        """
        require_rows(cache, self.dtype, self.width)
        # Padded local rows: known on the host without asking the device, since all ranks hold equally many.
        row_bytes = cache.shape[-1] * cache.element_size()
        if self.triton:
            packed = cache.new_empty((chunk.local_rows, row_bytes), dtype=torch.uint8)
            self.pack(cache, block_table, chunk, packed)
        else:
            words = widest_words(cache, self.latent * self.dtype.itemsize)
            packed = rows_of(words, block_table, chunk).view(torch.uint8)
        gathered = packed.new_empty((self.world_size * chunk.local_rows, row_bytes))
        dist.all_gather_into_tensor(gathered, packed, group=self.group)
        if self.triton:
            return self.unpack(gathered, chunk, scale)
        kv_c, k_pe = (
            part.view(self.dtype)
            for part in gathered.index_select(0, chunk.gathered_rows).tensor_split(
                [self.latent * self.dtype.itemsize], dim=1
            )
        )
        if scale is None:
            return kv_c.contiguous(), k_pe.contiguous()
        return (kv_c.float() * scale).to(self.model_dtype), (k_pe.float() * scale).to(self.model_dtype)

    def pack(
        self, cache: torch.Tensor, block_table: torch.Tensor, chunk: DeviceChunk, packed: torch.Tensor
    ) -> None:
        """Fill `packed` [padded local rows, row bytes] uint8 with this rank's rows of the chunk."""
        word = word_bytes(cache, self.latent * self.dtype.itemsize)
        key = ("pack", word, cache.shape, cache.stride())
        rows = tile_rows(packed.shape[1])
        if (launch := self.launches.get(key)) is None:
            from triton import language, next_power_of_2

            from kimi_k3_serve.publish import collective_kernel as kernel

            width, item = packed.shape[1] // word, cache.element_size()
            constants = {
                "BLOCK_SIZE": cache.shape[1],
                "BLOCK_STRIDE": cache.stride(0) * item // word,
                "ROW_STRIDE": cache.stride(1) * item // word,
                "WIDTH": width,
                "PADDED": next_power_of_2(width),
                "WORD": getattr(language, f"int{8 * word}"),
                "ROWS": rows,
            }
            launch = self.launches[key] = Launch(kernel.pack_kernel, constants, num_warps=4)
        launch(
            -(-chunk.local_rows // rows),
            cache.data_ptr(),
            block_table.data_ptr(),
            chunk.memory.data_ptr(),
            chunk.capacity,
            block_table.stride(0),
            packed.data_ptr(),
        )

    def unpack(
        self, gathered: torch.Tensor, chunk: DeviceChunk, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`gathered` [W * padded local rows, row bytes] uint8 -> kv_c [N, L] and k_pe [N, P], what `gather` returns."""
        latent = self.latent * self.dtype.itemsize
        parts = latent, gathered.shape[1] - latent
        out = self.dtype if scale is None else self.model_dtype
        kv_c, k_pe = (
            gathered.new_empty((chunk.num_rows, part // self.dtype.itemsize), dtype=out) for part in parts
        )
        rows = tile_rows(gathered.shape[1])
        key = ("unpack", parts, None if scale is None else out)
        if (launch := self.launches.get(key)) is None:
            from triton import language, next_power_of_2

            from kimi_k3_serve.publish import collective_kernel as kernel

            word = self.dtype.itemsize  # 16 bytes a thread all the same: widths are constants
            whole = getattr(language, f"int{8 * word}")
            widths = [part // word for part in parts]
            constants = {
                "LATENT": widths[0],
                "ROPE": widths[1],
                "LATENT_PADDED": next_power_of_2(widths[0]),
                "ROPE_PADDED": next_power_of_2(widths[1]),
                "WORD": whole if scale is None else language.uint8,
                "OUT": whole if scale is None else getattr(language, str(out).removeprefix("torch.")),
                "SCALED": scale is not None,
                "ROWS": rows,
            }
            launch = self.launches[key] = Launch(kernel.unpack_kernel, constants, num_warps=4)
        launch(
            -(-chunk.num_rows // rows),
            gathered.data_ptr(),
            chunk.gathered_rows.data_ptr(),
            chunk.num_rows,
            0 if scale is None else scale.data_ptr(),
            kv_c.data_ptr(),
            k_pe.data_ptr(),
        )
        return kv_c, k_pe


def rows_of(words: torch.Tensor, block_table: torch.Tensor, chunk: DeviceChunk) -> torch.Tensor:
    """[padded local rows, words] of a chunk, one after the other."""
    request, position = (row[: chunk.local_rows].long() for row in chunk.rows[1:])
    block_size = words.shape[1]
    return words[block_table[request, position // block_size].long(), position % block_size]


def widest_words(cache: torch.Tensor, latent_bytes: int) -> torch.Tensor:
    """The paged cache as the widest integers that divide it: fewer to be indexed."""
    word = {8: torch.int64, 4: torch.int32}.get(word_bytes(cache, latent_bytes))
    if word is None or word.itemsize < cache.element_size():
        return cache.view(torch.uint8) if cache.element_size() == 1 else cache
    return cache.view(word)


def word_bytes(cache: torch.Tensor, latent_bytes: int) -> int:
    """Bytes of the widest integer, up to eight, that divides rows, their two parts, strides and address."""
    item = cache.element_size()
    sizes = [latent_bytes, cache.data_ptr(), *(n * item for n in (cache.shape[-1], *cache.stride()[:-1]))]
    return next(word for word in (8, 4, 2, 1) if all(size % word == 0 for size in sizes))


def tile_rows(row_bytes: int) -> int:
    """Rows of a program's tile, a power of two."""
    return 1 << max(0, (TILE_BYTES // row_bytes).bit_length() - 1)
