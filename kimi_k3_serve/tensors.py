# SPDX-License-Identifier: Apache-2.0
"""Which tensors a model has by its configuration, and how much they hold; without PyTorch."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Tensors = Iterator[tuple[str, tuple[int, ...]]]


def read_config(folder: Path) -> Any:
    """config.json of a DeepSeek-V3 or Kimi-Linear model, with the defaults of what it may leave out."""
    defaults: dict[str, Any] = {
        "attn_res_block_size": None,
        "latent_moe_use_norm": False,
        "moe_renormalize": True,
    }
    defaults |= {"moe_layer_freq": 1, "first_k_dense_replace": 0, "routed_expert_hidden_size": None}
    defaults |= {"linear_attn_config": None, "moe_router_activation_func": "sigmoid", "q_lora_rank": None}
    defaults |= {"mla_use_nope": False, "mla_use_output_gate": False, "routed_scaling_factor": 1.0}
    defaults |= {"torch_dtype": "bfloat16", "num_shared_experts": 0}
    config = SimpleNamespace(**defaults | json.loads((folder / "config.json").read_text()))
    config.is_moe = getattr(config, "num_experts", None) is not None
    kda = (config.linear_attn_config or {}).get("kda_layers") or []
    config.is_kda_layer = lambda index: index + 1 in kda
    return config


def total_gb(folder: Path) -> float | None:
    """10^9 bytes of the weights of the model in a folder; None where they are quantised or config.json lacks a size."""
    config = read_config(folder)
    if hasattr(config, "quantization_config"):
        return None
    try:
        values = sum(math.prod(shape) for _, shape in tensors(config))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return values * (4 if config.torch_dtype == "float32" else 2) / 1e9


def tensors(config: Any) -> Tensors:
    """Name and shape of every tensor of a checkpoint with this configuration, named as vLLM's loaders expect.

    Raises:
        ValueError: an architecture other than DeepSeek-V3 (q-LoRA) and Kimi-Linear / Kimi-K3 (text).
    """
    known = {"deepseek_v3": deepseek_layer, "kimi_linear": kimi_layer}
    if config.model_type not in known:
        raise ValueError(f"no weights for model_type {config.model_type!r}; known are {', '.join(known)}")
    hidden, vocabulary = config.hidden_size, config.vocab_size
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for index in range(config.num_hidden_layers):
        for name, shape in known[config.model_type](config, index):
            yield f"model.layers.{index}.{name}", shape
    if getattr(config, "attn_res_block_size", None) is not None:
        yield "model.output_attn_res_norm.weight", (hidden,)
        yield "model.output_attn_res_proj.weight", (1, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def deepseek_layer(config: Any, index: int) -> Tensors:
    hidden = config.hidden_size
    yield from mla(config)
    yield from norms(hidden)
    if index < config.first_k_dense_replace:
        yield from mlp("mlp", hidden, config.intermediate_size)
        return
    width = config.moe_intermediate_size
    yield "mlp.gate.weight", (config.n_routed_experts, hidden)
    if getattr(config, "topk_method", None) == "noaux_tc":
        yield "mlp.gate.e_score_correction_bias", (config.n_routed_experts,)
    for expert in range(config.n_routed_experts):
        yield from mlp(f"mlp.experts.{expert}", hidden, width)
    if config.n_shared_experts:
        yield from mlp("mlp.shared_experts", hidden, width * config.n_shared_experts)


def kimi_layer(config: Any, index: int) -> Tensors:
    hidden = config.hidden_size
    yield from kda(config) if config.is_kda_layer(index) else mla(config)
    yield from norms(hidden)
    if config.attn_res_block_size is not None:
        for part in ("self_attention_res", "mlp_res"):
            yield f"{part}_norm.weight", (hidden,)
            yield f"{part}_proj.weight", (1, hidden)
    moe = config.is_moe and index >= config.first_k_dense_replace and index % config.moe_layer_freq == 0
    if not moe:
        yield from mlp("mlp", hidden, config.intermediate_size)
        return
    width = config.moe_intermediate_size
    routed = config.routed_expert_hidden_size or hidden
    yield "block_sparse_moe.gate.weight", (config.num_experts, hidden)
    yield "block_sparse_moe.gate.e_score_correction_bias", (config.num_experts,)
    if config.num_shared_experts:
        yield from mlp("block_sparse_moe.shared_experts", hidden, width * config.num_shared_experts)
    if config.routed_expert_hidden_size is not None:
        yield "block_sparse_moe.routed_expert_down_proj.weight", (routed, hidden)
        if config.latent_moe_use_norm:
            yield "block_sparse_moe.routed_expert_norm.weight", (routed,)
        yield "block_sparse_moe.routed_expert_up_proj.weight", (hidden, routed)
    for expert in range(config.num_experts):
        yield f"block_sparse_moe.experts.{expert}.w1.weight", (width, routed)
        yield f"block_sparse_moe.experts.{expert}.w3.weight", (width, routed)
        yield f"block_sparse_moe.experts.{expert}.w2.weight", (routed, width)


def norms(hidden: int) -> Tensors:
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def mlp(prefix: str, hidden: int, width: int) -> Tensors:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


def mla(config: Any) -> Tensors:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    if config.q_lora_rank is None:
        yield "self_attn.q_proj.weight", (heads * (nope + rope), hidden)
    else:
        yield "self_attn.q_a_proj.weight", (config.q_lora_rank, hidden)
        yield "self_attn.q_a_layernorm.weight", (config.q_lora_rank,)
        yield "self_attn.q_b_proj.weight", (heads * (nope + rope), config.q_lora_rank)
    yield "self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield "self_attn.kv_b_proj.weight", (heads * (nope + value), latent)
    if getattr(config, "mla_use_output_gate", False):
        yield "self_attn.g_proj.weight", (heads * value, hidden)
    yield "self_attn.o_proj.weight", (hidden, heads * value)


def kda(config: Any) -> Tensors:
    linear, hidden = config.linear_attn_config, config.hidden_size
    heads, dim, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    for part in "qkv":
        yield f"self_attn.{part}_proj.weight", (heads * dim, hidden)
        yield f"self_attn.{part}_conv1d.weight", (heads * dim, 1, taps)
    if linear.get("use_full_rank_gate", False):
        yield "self_attn.g_proj.weight", (heads * dim, hidden)
    else:
        yield "self_attn.g_a_proj.weight", (dim, hidden)
        yield "self_attn.g_b_proj.weight", (heads * dim, dim)
    yield "self_attn.f_a_proj.weight", (dim, hidden)
    yield "self_attn.f_b_proj.weight", (heads * dim, dim)
    yield "self_attn.b_proj.weight", (heads, hidden)
    yield "self_attn.dt_bias", (heads * dim,)
    yield "self_attn.A_log", (heads,)
    yield "self_attn.o_norm.weight", (dim,)
    yield "self_attn.o_proj.weight", (hidden, heads * dim)
