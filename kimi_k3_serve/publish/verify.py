# SPDX-License-Identifier: Apache-2.0
"""KIMI_K3_VERIFY_PREFILL_KV=1: every published chunk against vLLM's own path, byte for byte, in the running engine.

Stops the engine at the first difference. It gathers every chunk a second time over vLLM's collective, so it is for
checking, not for serving; and that collective is one more rendezvous, so it proves rows, not lifetimes.
"""

import os
from typing import Any

import torch

from kimi_k3_serve.errors import UserError
from kimi_k3_serve.proof import mark_used

SWITCH = "KIMI_K3_VERIFY_PREFILL_KV"
compared = {"chunks": 0, "rows": 0}
"""By this process so far, over all layers."""


class PublishedRowsDiffer(RuntimeError):
    """A published row is not the row that vLLM's own path yields."""


def asked() -> bool:
    """The switch, checked.

    Raises:
        UserError: neither 0 nor 1.
    """
    value = os.environ.get(SWITCH, "0")
    if value not in ("0", "1"):
        raise UserError(f"{SWITCH}={value!r} is not known; use 0 or 1")
    return value == "1"


def compare(
    impl: Any,
    chunk: Any,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context: Any,
    k_scale: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
) -> None:
    """Compare a chunk as the consumer sees it (fp8: scaled). Collective over the group.

    Raises:
        PublishedRowsDiffer: naming the plane and the first row.
    """
    expected = stock_rows(impl, chunk, cache, block_table, context, k_scale)
    for name, found, wanted in zip(("kv_c", "k_pe"), (kv_c, k_pe), expected, strict=True):
        same = bytes_of(found) == bytes_of(wanted)
        if not bool(same.all()):
            row = int((~same.all(dim=1)).nonzero()[0])
            raise PublishedRowsDiffer(
                f"rank {context.dcp_manager.group.rank_in_group}: {name} of context chunk {chunk.index} differs from "
                f"vLLM's in row {row} of {len(found)}; report it, and serve with KIMI_K3_PREFILL_KV=stock"
            )
    compared["chunks"] += 1
    compared["rows"] += chunk.num_context_tokens
    mark_used("prefill_kv_verified")


def stock_rows(
    impl: Any,
    chunk: Any,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    context: Any,
    k_scale: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's kv_c [N, L] and k_pe [N, P] of a chunk: its gather, its all-gather, its `reorg_kvcache`."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.attention.mla_attention import reorg_kvcache
    from vllm.utils.torch_utils import is_quantized_kv_cache

    world_size, workspace = context.dcp_manager.group.world_size, context.workspace
    rows = chunk.num_local_context_tokens
    if is_quantized_kv_cache(impl.kv_cache_dtype):
        ops.gather_and_maybe_dequant_cache(
            src_cache=cache,
            dst=workspace,
            block_table=block_table,
            cu_seq_lens=chunk.padded_local_cu_seq_lens,
            token_to_seq=chunk.padded_local_token_to_seq,
            num_tokens=rows,
            kv_cache_dtype=impl.kv_cache_dtype,
            scale=k_scale,
            seq_starts=chunk.starts,
        )
    else:
        ops.cp_gather_cache(
            src_cache=cache,
            dst=workspace[:rows],
            block_table=block_table,
            cu_seq_lens=chunk.padded_local_cu_seq_lens,
            batch_size=chunk.num_requests,
            seq_starts=chunk.starts,
        )
    begin = workspace.shape[0] // (world_size + 1)
    gathered = workspace[begin:][: rows * world_size]
    context.dcp_manager.kv_gather(gathered, workspace[:rows])
    kv_c, k_pe = gathered.split([impl.kv_lora_rank, impl.qk_rope_head_dim], dim=-1)
    return reorg_kvcache(  # type: ignore[no-any-return]
        kv_c,
        k_pe,
        chunk.padded_local_seq_lens,
        chunk.local_context_lens_allranks,
        chunk.local_starts,
        sum_seq_len=chunk.num_context_tokens,
        max_seq_len=chunk.max_seq_len,
        toks=rows,
    )


def bytes_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)
