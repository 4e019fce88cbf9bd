# SPDX-License-Identifier: Apache-2.0
"""Chunks as vLLM's own planner makes them, for the tests of the context map and of the publication."""

from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import build_mla_chunked_context_metadata


def chunks(contexts: list[int], world_size: int, interleave: int, workspace: int) -> list[Any]:
    """vLLM's chunks of a batch of prefills with these context lengths."""
    metadata = build_mla_chunked_context_metadata(
        context_lens_cpu=torch.tensor(contexts, dtype=torch.int32),
        prefill_query_start_loc_cpu=torch.arange(len(contexts) + 1, dtype=torch.int32) * 3,
        chunked_prefill_workspace=torch.empty(0),
        chunked_prefill_workspace_size=workspace,
        block_size=interleave,
        align_chunk_to_block=True,
        device=torch.device("cpu"),
        dcp_world_size=world_size,
        dcp_local_block_size=interleave,
        dcp_virtual_block_size=interleave * world_size,
    )
    return metadata.chunks if metadata is not None else []


def geometry(chunk: Any) -> tuple[Any, Any, Any]:
    return chunk.padded_local_seq_lens, chunk.local_context_lens_allranks, chunk.local_starts
