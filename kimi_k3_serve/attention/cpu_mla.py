# SPDX-License-Identifier: Apache-2.0
"""MLA on the CPU with decode context parallelism: the reference for every other backend here.

vLLM's own CPU backends keep the whole context on every rank. This one keeps a shard, and owns the
collectives that this needs (`ownership.py`): it is handed rank-local queries and returns the combined
output. One decode step, with W ranks of H heads each:

1. all-gather the queries over the heads: every rank sees all W * H heads;
2. attend over this rank's shard, which gives partial outputs and their log-sum-exp (LSE);
3. exchange, so that each rank holds the W partials of its own H heads;
4. merge the partials exactly (`merge_partials`).

Prefill context comes from the other ranks by publication over shared memory (`kimi_k3_serve/publish`).
With W = 1 every step but the local attention falls away, so that TP and DCP arms differ in nothing else.
"""

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_dcp_group
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from kimi_k3_serve.attention.merge import merge_partials
from kimi_k3_serve.proof import mark_used


class CPUDCPMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Shared MLA metadata; context rows are gathered without a manager."""

    supports_direct_dcp_kv_gather = True


class CPUDCPMLABackend(CPUMLABackend):
    """Takes the place of vLLM's CPU_MLA in its registry (`kimi_k3_serve.cpu`)."""

    @staticmethod
    def get_impl_cls() -> type["CPUDCPMLAImpl"]:
        return CPUDCPMLAImpl

    @staticmethod
    def get_builder_cls() -> type[CPUDCPMLAMetadataBuilder]:
        return CPUDCPMLAMetadataBuilder


class CPUDCPMLAImpl(CPUMLAImpl):
    """CPU MLA whose decode collectives are its own."""

    owns_decode_dcp_collectives = True
    can_return_lse_for_decode = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # vLLM's CPU implementation knows one rank only and says so.
        self.dcp_group = get_dcp_group()
        self.dcp_world_size: int = self.dcp_group.world_size

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Decode: rank-local queries [B, H, L + P] in, combined output [B, H, L] out."""
        assert attn_metadata.decode is not None
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        if self.dcp_world_size > 1:
            query = self.dcp_group.all_gather(query.contiguous(), dim=1)
        output, lse = attend_paged(
            query,
            kv_c_and_k_pe_cache,
            attn_metadata.decode.block_table,
            attn_metadata.decode.seq_lens,
            scale=self.scale,
            value_dim=self.kv_lora_rank,
        )
        if self.dcp_world_size > 1:
            output, _ = merge_partials(*self.exchange_partials(output, lse))
            mark_used("decode_merge")
        return output.to(query.dtype), None

    def exchange_partials(self, output: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All-to-all over the heads.

        Args:
            output: [B, W * H, L] float32, this shard's partial outputs of all heads, rank-major.
            lse: [B, W * H] float32.

        Returns:
            [W, B, H, L] and [W, B, H]: every shard's partials of this rank's own heads.
        """
        batch, heads, value_dim = output.shape
        packed = torch.cat([output, lse.unsqueeze(-1)], dim=-1)
        by_rank = packed.view(batch, self.dcp_world_size, heads // self.dcp_world_size, value_dim + 1)
        send = by_rank.transpose(0, 1).contiguous()
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=self.dcp_group.device_group)
        return received[..., :value_dim], received[..., value_dim]


def attend_paged(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    value_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One decode token a request against its paged latent rows.

    Args:
        query: [B, H, D].
        cache: [blocks, block_size, D]; the first `value_dim` columns of a row are its value.
        block_table: [B, max_blocks] int32.
        seq_lens: [B], rows of each request in this cache; 0 is an empty shard.

    Returns:
        output [B, H, value_dim] and lse [B, H] (natural logarithm), both float32. An empty shard gives
        output 0 and LSE -inf.
    """
    batch, heads, _ = query.shape
    block_size = cache.shape[1]
    output = torch.zeros(batch, heads, value_dim)
    lse = torch.full((batch, heads), -torch.inf)
    for i, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        blocks = block_table[i, : -(-length // block_size)].long()
        rows = cache[blocks].flatten(0, 1)[:length].float()
        scores = query[i].float() @ rows.T * scale
        lse[i] = torch.logsumexp(scores, dim=-1)
        output[i] = torch.exp(scores - lse[i].unsqueeze(-1)) @ rows[:, :value_dim]
    return output, lse
