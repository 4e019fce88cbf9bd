# SPDX-License-Identifier: Apache-2.0
"""Weights of a slice without a checkpoint: every value follows from its tensor's name and its index in it.

vLLM's dummy weights fill every tensor of every rank alike, so that shards exchanged or lost go unseen, and all prompts
answer alike. These have unit scale times a gain, differ everywhere, and are the same whatever the device, the
tensor-parallel size and the order of loading: integer arithmetic, then one float32 product.

They are made to show parity in BF16 over 8 layers, where two right engines differ by rounding:

- **Routing does not depend on rounding.** A router's near ties would be decided by it, and an expert more or less is a
  jump. So the first E columns of the residual stream (E experts) belong to the router: an embedding row holds there
  the ranks of E hashed numbers, evenly spaced; no layer writes those columns (its output rows are zero); and expert e
  of a layer reads one of them. A normalised row has them all scaled by one factor, which leaves their order.
  Each token chooses its own experts, another set in each layer, whatever else the row holds. (Levels are distinct in
  BF16 up to 128 experts.)
- **Gains** (`GAINS`): attention sharp enough that 120,000 keys do not average out (scores of deviation 3.4), and
  outputs so small beside the residual stream that 8 layers do not amplify rounding (docs/decode.md has the figures,
  tests/serve/test_seeded_weights.py keeps the margin).
"""

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch

GAINS = {
    "q_b_proj": 2.5,
    "kv_b_proj": 1.5,
    "o_proj": 0.5,
    "down_proj": 0.5,
    "routed_expert_up_proj": 0.3,
    "lm_head": 2.5,
}
WRITERS = {"o_proj", "down_proj", "routed_expert_up_proj", "w2"}
"""Modules whose output goes to the residual stream; w2 does where the routed experts have no latent of their own."""

CHUNK = 1 << 24  # values made at a time: temporaries of about 0.5 GB

Tensors = Iterator[tuple[str, tuple[int, ...]]]


def values(
    name: str, shape: tuple[int, ...], device: torch.device | str = "cpu", *, experts: int = 0
) -> torch.Tensor:
    """The tensor `name` [shape], float32, whatever PyTorch's default dtype: vLLM loads under the model's.

    Norms are 1, a router's correction bias 0. A matrix is uniform with mean 0 and deviation gain / sqrt(fan_in), rows
    of an embedding with deviation 1; a KDA decay A_log lies about -3 (slow).

    Args:
        experts: routed experts of the model (`routed_experts`); that many columns of the residual stream are the
            router's.
    """
    module, leaf = name.split(".")[-2:]
    if module.endswith("norm"):
        return torch.ones(shape, dtype=torch.float32, device=device)
    if leaf == "e_score_correction_bias":
        return torch.zeros(shape, dtype=torch.float32, device=device)
    if module == "gate":
        return router(name, shape, device)
    deviation, mean = 1.0, 0.0
    if leaf == "A_log":
        mean = -3.0
    elif module != "embed_tokens" and len(shape) > 1:
        deviation = GAINS.get(module, 1.0) / math.sqrt(shape[-1])
    flat = torch.empty(math.prod(shape), dtype=torch.float32, device=device)
    scale = torch.tensor(deviation * math.sqrt(12), dtype=torch.float32, device=device)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        index = torch.arange(start, start + part.numel(), dtype=torch.int64, device=device)
        part.copy_(uniform(index, seed(name)) * scale)
    tensor = (flat + mean if mean else flat).view(shape)
    if module in WRITERS:
        tensor[:experts] = 0
    elif module == "embed_tokens" and experts > 1:
        ranks = tensor[:, :experts].argsort(dim=1, stable=True).argsort(dim=1, stable=True)
        tensor[:, :experts] = (ranks * 2 - (experts - 1)).float() * (math.sqrt(3) / (experts - 1))
    return tensor


def router(name: str, shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    """[experts, hidden]: expert e reads one of the router's columns, another one in each layer."""
    experts = shape[0]
    expert = torch.arange(experts, device=device)
    matrix = torch.zeros(shape, dtype=torch.float32, device=device)
    matrix[expert, (expert + seed(name)) % experts] = 1.0
    return matrix


def routed_experts(config: Any) -> int:
    """Routed experts of a layer; 0 without any."""
    name = "n_routed_experts" if config.model_type == "deepseek_v3" else "num_experts"
    return getattr(config, name, None) or 0


def seed(name: str) -> int:
    """64 bits of a tensor's name, signed."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform(index: torch.Tensor, seed: int) -> torch.Tensor:
    """[-0.5, 0.5) float32 in steps of 2**-24: the SplitMix64 of `seed` at each int64 index (Steele et al. 2014)."""
    z = index * signed(0x9E3779B97F4A7C15) + seed
    z = (z ^ shift(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ shift(z, 27)) * signed(0x94D049BB133111EB)
    bits = shift(z ^ shift(z, 31), 40)
    return (bits - (1 << 23)).float() * 2.0**-24


def shift(z: torch.Tensor, places: int) -> torch.Tensor:
    """Logical right shift of int64, which torch shifts arithmetically."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


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
