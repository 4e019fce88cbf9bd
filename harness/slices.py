# SPDX-License-Identifier: Apache-2.0
"""Slices of Kimi-K3: real widths in eight layers, which two GPUs hold, and a layer costs what it costs in the model.

The widths are those of the released configuration. What differs from the model, besides the number of layers: 32
routed experts (of 896) with 8 active (of 16), SiLU in place of SiTU, no attention residuals.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.files import write_bytes

LAYERS = 8
FULL_ATTENTION = {
    "kimi-k3": (4, 8),  # as in the model: every fourth layer is MLA, the others are KDA
    "mla": tuple(range(1, LAYERS + 1)),  # MLA everywhere, for the attention path alone
}
VOCAB_SIZE = 163_840


def slice_config(name: str) -> dict[str, Any]:
    """The slice's config.json. Raises UserError for a slice that is not known."""
    if name not in FULL_ATTENTION:
        raise UserError(f"slice {name!r} is not known; choose one of {', '.join(FULL_ATTENTION)}")
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 7168,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 163_584,
        "eos_token_id": 163_586,
        "pad_token_id": 163_838,
        "num_nextn_predict_layers": 0,
        **_attention(FULL_ATTENTION[name]),
        **_experts(),
    }


def write_slice(name: str, folder: Path) -> Path:
    """`folder`/<name>/config.json, which is a whole model for a loader that makes its weights; returns its folder."""
    made = folder / f"slice-{name}"
    made.mkdir(parents=True, exist_ok=True)
    write_bytes(made / "config.json", (json.dumps(slice_config(name), indent=1) + "\n").encode())
    return made


def _attention(full: Sequence[int]) -> dict[str, Any]:
    """MLA in the layers `full`, KDA in the others; layers count from 1."""
    heads, head = 96, 128
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": head,
        "qk_rope_head_dim": 64,
        "v_head_dim": head,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "rope_theta": 10_000.0,
        "linear_attn_config": {
            "kda_layers": [layer for layer in range(1, LAYERS + 1) if layer not in full],
            "full_attn_layers": list(full),
            "num_heads": heads,
            "head_dim": head,
            "short_conv_kernel_size": 4,
        },
    }


def _experts() -> dict[str, Any]:
    """The first layer is dense; in the others routed experts work in the latent."""
    return {
        "first_k_dense_replace": 1,
        "intermediate_size": 33_792,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "num_experts": 32,
        "num_experts_per_token": 8,
        "num_shared_experts": 2,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
    }
