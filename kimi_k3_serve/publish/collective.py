# SPDX-License-Identifier: Apache-2.0
"""The fallback where ranks cannot store into each other's memory: all-gather padded rows, then take the valid ones."""

from typing import Any

import torch
import torch.distributed as dist

from kimi_k3_serve.publish.chunks import DeviceChunk
from kimi_k3_serve.publish.publisher import dequantise


class Collective:
    """`PrefillKV` over the group's own all-gather. Rows travel as the bytes that are cached.

    Against stock: fp8 moves half the bytes, and the rows are put in order by one indexed copy a plane instead of
    one slice for each request and rank.
    """

    transport = "collective"
    needs_gathered_rows = True

    def __init__(
        self, group: Any, dtype: torch.dtype, latent: int, model_dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.group, self.dtype, self.latent, self.model_dtype = group, dtype, latent, model_dtype
        self.world_size = dist.get_world_size(group)

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
        """See `PrefillKV`. The result is this call's own memory; slot and ubatch mean nothing here."""
        # Padded local rows: known on the host without asking the device, since all ranks hold equally many.
        count, block_size = chunk.local_rows, cache.shape[1]
        request, position = chunk.rows[1, :count].long(), chunk.rows[2, :count].long()
        words = widest_words(cache, self.latent * self.dtype.itemsize)
        local = words[block_table[request, position // block_size].long(), position % block_size]
        gathered = local.new_empty((self.world_size * count, local.shape[1]))
        dist.all_gather_into_tensor(gathered, local, group=self.group)
        order, latent = chunk.gathered_rows, self.latent * self.dtype.itemsize // local.element_size()
        kv_c = gathered[:, :latent].index_select(0, order)
        k_pe = gathered[:, latent:].index_select(0, order)
        kv_c, k_pe = kv_c.view(self.dtype), k_pe.view(self.dtype)
        return (kv_c, k_pe) if scale is None else dequantise(kv_c, k_pe, scale, self.model_dtype)


def widest_words(cache: torch.Tensor, latent_bytes: int) -> torch.Tensor:
    """The paged cache as the widest integers that divide rows, their two parts and strides: fewer to be indexed."""
    item = cache.element_size()
    sizes = [
        latent_bytes,
        *(n * item for n in (cache.shape[-1], *cache.stride()[:-1], int(cache.storage_offset()))),
    ]
    for word in (torch.int64, torch.int32):  # NCCL has no int16
        if word.itemsize >= item and all(size % word.itemsize == 0 for size in sizes):
            return cache.view(word)
    return cache.view(torch.uint8) if item == 1 else cache
