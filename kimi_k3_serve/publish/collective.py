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
        count = chunk.local_rows
        _, request, position = (row[:count].long() for row in chunk.rows)
        block_size = cache.shape[1]
        raw = cache.view(torch.uint8) if self.dtype.itemsize == 1 else cache
        local = raw[block_table[request, position // block_size].long(), position % block_size]
        gathered = local.new_empty((self.world_size * count, local.shape[1]))
        dist.all_gather_into_tensor(gathered, local, group=self.group)
        order = chunk.gathered_rows.long()
        kv_c, k_pe = gathered[:, : self.latent][order], gathered[:, self.latent :][order]
        kv_c, k_pe = kv_c.view(self.dtype), k_pe.view(self.dtype)
        return (kv_c, k_pe) if scale is None else dequantise(kv_c, k_pe, scale, self.model_dtype)
