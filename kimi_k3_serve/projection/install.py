# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3's merged projection in column shards: what of vLLM 0.32.0 changes under VLLM_KIMI_SHARD_QKV_A=1.

Its layer builds one of two projections, in both of which q_a and kv_a are replicated:

- with an output gate (the target model) `KimiK3MergedQKVGateLinear`, rows [q_a | kv_a | gate / W];
- without one (the DSpark draft) `MergedColumnParallelLinear` with tensor parallelism switched off, rows [q_a | kv_a].

Both become an ordinary `MergedColumnParallelLinear` over W ranks, with rows [q_a / W | kv_a / W | gate / W]: its loader
cuts each checkpoint tensor (q_a_proj, kv_a_proj_with_mqa, g_proj), and the quantisation is inherited.
`_forward_q_lora` then works with the local number of latent rows, also where it slices the weight for the auxiliary
stream, and gathers the latent columns before they are used. The gate stays as it was.

vLLM's low-latency GEMM is looked up by the local shape. It knows 2,112 x 7,168, and no shard of it: a shard's GEMM is
cuBLAS's, by vLLM's own fallback.
"""

import functools
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.distributed.parallel_state import get_dcp_group, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import (
    KimiK3MergedQKVGateLinear,
    MergedColumnParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from kimi_k3_serve.patch import Edit, edit_function
from kimi_k3_serve.projection.gather import LatentGather, coordinator, select
from kimi_k3_serve.projection.shard import GIB, SWITCH, local_widths

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what its own logger's children say

KIMI = "vllm.models.kimi_k3.nvidia.mla"

EDITS = [
    Edit(
        "    qkv_a_rows = q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim\n",
        "    latents = (self.fused_qkv_a_g_proj or self.fused_qkv_a_proj).latents\n"
        "    qkv_a_rows = latents.local_width\n",
    ),
    Edit(
        "                self._unquantized_gemm(hidden_states, qkv_a_weight),\n",
        "                latents.project(hidden_states, qkv_a_weight, self._unquantized_gemm),\n",
    ),
    Edit(
        "    attn_out = self._apply_q_lora_attention(positions, hidden_states, qkv_lora)\n",
        "    attn_out = self._apply_q_lora_attention(positions, hidden_states, latents(qkv_lora))\n",
    ),
]


def install(device_type: str) -> None:
    """Shard the projections of all layers that are built from now on. Idempotent."""
    if device_type != "cuda":
        logger.warning_once("%s=1 has no effect on %s: Kimi-K3's own layer is for GPUs.", SWITCH, device_type)
        return
    from vllm.models.kimi_k3.nvidia import mla

    edit_function(f"{KIMI}.MultiHeadLatentAttention._forward_q_lora", EDITS)
    mla.KimiK3MergedQKVGateLinear = merged_with_gate
    mla.MergedColumnParallelLinear = merged


def merged_with_gate(
    *,
    hidden_size: int,
    q_lora_rank: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    total_num_heads: int,
    v_head_dim: int,
    quant_config: Any,
    prefix: str,
    bias: bool = False,
) -> Any:
    """In the place of `KimiK3MergedQKVGateLinear`: the same arguments; one rank gets that class itself.

    Raises:
        ShardError: see `sharded`.
    """
    latents = (q_lora_rank, kv_lora_rank + qk_rope_head_dim)
    if get_tensor_model_parallel_world_size() > 1:
        others = (total_num_heads * v_head_dim,)
        return sharded(hidden_size, latents, others, bias=bias, quant_config=quant_config, prefix=prefix)
    layer = KimiK3MergedQKVGateLinear(
        hidden_size=hidden_size,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=kv_lora_rank,
        qk_rope_head_dim=qk_rope_head_dim,
        total_num_heads=total_num_heads,
        v_head_dim=v_head_dim,
        bias=bias,
        quant_config=quant_config,
        prefix=prefix,
    )
    layer.latents = latent_gather(latents, hidden_size)
    return layer


def merged(input_size: int, output_sizes: list[int], *, disable_tp: bool, **arguments: Any) -> Any:
    """In the place of the layer's one `MergedColumnParallelLinear`, which is replicated (`disable_tp`).

    Raises:
        ShardError: see `sharded`.
    """
    if get_tensor_model_parallel_world_size() > 1:
        return sharded(input_size, tuple(output_sizes), (), **arguments)
    layer = MergedColumnParallelLinear(input_size, output_sizes, disable_tp=disable_tp, **arguments)
    layer.latents = latent_gather(tuple(output_sizes), input_size)
    return layer


def sharded(
    input_size: int,
    latents: tuple[int, ...],
    others: tuple[int, ...],
    *,
    bias: bool,
    quant_config: Any,
    prefix: str,
) -> Any:
    """A column-parallel merged projection whose attribute `latents` gathers its first columns.

    Raises:
        ShardError: a latent width does not divide by the number of ranks, or not at a quantisation block's edge.
    """
    world_size = get_tensor_model_parallel_world_size()
    local_widths(latents, world_size)  # before vLLM's own assertion, which names nothing
    layer = MergedColumnParallelLinear(
        input_size, [*latents, *others], bias=bias, quant_config=quant_config, prefix=prefix
    )
    if not isinstance(layer.quant_method, UnquantizedLinearMethod):
        block = getattr(quant_config, "weight_block_size", None)
        local_widths(latents, world_size, int(block[0]) if block else 1)
    layer.latents = latent_gather(latents, input_size)
    return layer


@functools.cache
def latent_gather(widths: tuple[int, ...], input_size: int) -> LatentGather:
    """What all layers of these widths share. Collective: every rank builds its layers in one order."""
    group = coordinator(get_tp_group(), get_dcp_group())
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    ubatches = max(get_current_vllm_config().parallel_config.num_ubatches, 1)
    choice = select(
        group,
        widths,
        device,
        inputs=None if envs.VLLM_BATCH_INVARIANT else input_size,
        dtype=torch.get_default_dtype(),
        ubatches=ubatches,
        ubatch=dbo_current_ubatch_id,
    )
    gather = LatentGather(group, widths, choice)
    if group.world_size == 1:
        return gather
    replicated = sum(widths) * input_size * torch.get_default_dtype().itemsize
    logger.info_once(
        "Latent projections %s in column shards of %d ranks: %.1f MiB a layer and rank instead of %.1f MiB; "
        "up to %d rows gathered over %s (%s).",
        str(widths),
        group.world_size,
        replicated / group.world_size * 1024 / GIB,
        replicated * 1024 / GIB,
        choice.way.rows if choice.way else 0,
        choice.name,
        choice.reason,
    )
    return gather
