# SPDX-License-Identifier: Apache-2.0
"""What vLLM's CPU platform lacks for MLA with decode context parallelism, and how it gets it."""

from typing import Any

import torch

from kimi_k3_serve.slot_mapping import PAD_SLOT, slot_mapping

BACKEND = "kimi_k3_serve.attention.cpu_mla.CPUDCPMLABackend"


def install() -> None:
    """Give the CPU platform the DCP backend, chunked prefill and DCP-aware slots. Idempotent."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils import cpu_triton_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_MLA, BACKEND)
    cpu_triton_utils._compute_slot_mapping_kernel_impl = compute_slot_mapping
    stock = CpuPlatform.check_and_update_config
    if not getattr(stock, "keeps_chunked_prefill", False):
        CpuPlatform.check_and_update_config = keep_chunked_prefill(stock)
    define_cp_gather_cache()


def compute_slot_mapping(
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    slot_mapping_out: torch.Tensor,
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int = 1,
    TOTAL_CP_RANK: int = 0,
    CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
    PAD_ID: int = PAD_SLOT,
    BLOCK_SIZE: int = 1024,
) -> None:
    """vLLM's slot-mapping kernel for the CPU, with context parallelism (the stock one asserts W = 1).

    Writes `slot_mapping_out` [max_num_tokens]; what lies beyond the batch's tokens becomes PAD_ID.
    """
    slots = slot_mapping(
        query_start_loc,
        positions,
        block_table,
        block_size=KV_CACHE_BLOCK_SIZE,
        world_size=TOTAL_CP_WORLD_SIZE,
        rank=TOTAL_CP_RANK,
        interleave=CP_KV_CACHE_INTERLEAVE_SIZE,
    )
    slot_mapping_out[: len(slots)] = slots
    slot_mapping_out[len(slots) :] = PAD_ID


def keep_chunked_prefill(stock: Any) -> Any:
    """Wrap `CpuPlatform.check_and_update_config` so that it leaves the scheduler as the user set it.

    The stock method turns chunked prefill and prefix caching off for MLA, since its backends could not
    continue a prefill. This one can.
    """

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
        )
        stock.__func__(cls, vllm_config)
        (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
        ) = asked

    check_and_update_config.keeps_chunked_prefill = True  # type: ignore[attr-defined]
    return classmethod(check_and_update_config)


def define_cp_gather_cache() -> None:
    """Define `_C_cache_ops::cp_gather_cache` where the CPU build of vLLM does not have it."""
    if hasattr(torch.ops._C_cache_ops, "cp_gather_cache"):
        return
    torch.library.define(
        "_C_cache_ops::cp_gather_cache",
        "(Tensor src_cache, Tensor(a!) dst, Tensor block_table, Tensor cu_seq_lens, int batch_size, "
        "Tensor? seq_starts=None) -> ()",
    )
    torch.library.impl("_C_cache_ops::cp_gather_cache", "CPU", cp_gather_cache)


def cp_gather_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    batch_size: int,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """Copy rows of a paged cache into a dense buffer, request after request.

    Args:
        src_cache: [blocks, block_size, D].
        dst: [>= cu_seq_lens[-1], D].
        block_table: [batch_size, max_blocks].
        cu_seq_lens: [batch_size + 1], where each request's rows begin in `dst`.
        seq_starts: [batch_size], each request's first row in its own context; 0 where absent.
    """
    block_size = src_cache.shape[1]
    bounds = cu_seq_lens.tolist()
    starts = seq_starts.tolist() if seq_starts is not None else [0] * batch_size
    for i in range(batch_size):
        rows = torch.arange(starts[i], starts[i] + bounds[i + 1] - bounds[i])
        dst[bounds[i] : bounds[i + 1]] = src_cache[
            block_table[i, rows // block_size].long(), rows % block_size
        ]
