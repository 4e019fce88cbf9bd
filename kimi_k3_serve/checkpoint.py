# SPDX-License-Identifier: Apache-2.0
"""A small MLA checkpoint with informative weights, written without any download.

DeepSeek-V3 architecture (the one whose MLA layer Kimi-K3 shares), dense, with the latent widths of the real
model: kv_lora_rank 512 and RoPE 64. Weights are normal with standard deviation gain / sqrt(fan_in), norms 1.
The gains make attention sharp enough that answers depend on every part of the prompt: with vLLM's dummy
weights, prompts that share their last token all answer alike and parity shows nothing.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GAINS = {"q_b_proj": 3.0, "kv_b_proj": 1.5, "o_proj": 2.0, "lm_head": 3.0}

VOCAB, HIDDEN, MLP, LAYERS, HEADS = 2048, 256, 512, 2, 4
Q_LORA, KV_LORA, NOPE, ROPE, VALUE = 128, 512, 128, 64, 128

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,  # no routed experts
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": Q_LORA,
    "kv_lora_rank": KV_LORA,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 16384,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def config(heads: int = HEADS) -> dict[str, Any]:
    return CONFIG | {"num_attention_heads": heads, "num_key_value_heads": heads}


def layer_shapes(heads: int) -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_a_proj": (Q_LORA, HIDDEN),
        "self_attn.q_a_layernorm": (Q_LORA,),
        "self_attn.q_b_proj": (heads * (NOPE + ROPE), Q_LORA),
        "self_attn.kv_a_proj_with_mqa": (KV_LORA + ROPE, HIDDEN),
        "self_attn.kv_a_layernorm": (KV_LORA,),
        "self_attn.kv_b_proj": (heads * (NOPE + VALUE), KV_LORA),
        "self_attn.o_proj": (HIDDEN, heads * VALUE),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
    }


def shapes(heads: int = HEADS) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, named as the released DeepSeek-V3 checkpoints name them."""
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for index in range(LAYERS):
        named |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer_shapes(heads).items()}
    return {**named, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """One tensor, float32: ones for a norm, else normal with deviation gain / sqrt(fan_in)."""
    module = name.split(".")[-2]
    if module.endswith("norm"):
        return torch.ones(shape)
    # An embedding looks a row up instead of summing over one: its rows are unit-scale as they are.
    fan_in = 1 if module == "embed_tokens" else shape[-1]
    return torch.randn(shape, generator=generator) * GAINS.get(module, 1.0) / math.sqrt(fan_in)


def write_checkpoint(folder: Path, seed: int = 0, heads: int = HEADS) -> None:
    """Write config.json and model.safetensors (about 9 MB); the same bytes for the same seed, heads and torch."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: weight(name, shape, generator) for name, shape in shapes(heads).items()}
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors leaves it to the owner alone; a container's user is another
    # Last, so that a folder with a config.json is a whole checkpoint.
    (folder / "config.json").write_text(json.dumps(config(heads), indent=1) + "\n")
