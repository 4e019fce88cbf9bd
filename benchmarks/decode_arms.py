# SPDX-License-Identifier: Apache-2.0
"""What `decode_parity.py` compares, and `prefill_profile.py`: the slice, the prompts' lengths, and the arms."""

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 32768,
    "hidden_size": 7168,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 96,
    "num_key_value_heads": 96,
    "head_dim": 128,
    "num_shared_experts": 1,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "num_nextn_predict_layers": 0,
    "routed_expert_hidden_size": 1024,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    },
}

LENGTHS = (40, 127, 513, 1290, 1800, 4100, 9000, 12000)
OUTPUT_TOKENS = 32

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}


def stock(backend: str, exchange: str) -> dict[str, Any]:
    return {"backend": backend, "dcp_comm_backend": exchange, "env": {"KIMI_K3_PREFILL_KV": "stock"}}


STOCK = {
    "fa3+ag_rs": stock("FLASH_ATTN_MLA", "ag_rs"),
    "fa3+a2a": stock("FLASH_ATTN_MLA", "a2a"),
    "flashmla+ag_rs": stock("FLASHMLA", "ag_rs"),
    "flashmla+a2a": stock("FLASHMLA", "a2a"),
    "triton+ag_rs": stock("TRITON_MLA", "ag_rs"),
    "triton+a2a": stock("TRITON_MLA", "a2a"),
}
UNCURED = {f"{name} uncured": arm | {"uncured": True} for name, arm in STOCK.items()}
"""vLLM's own text, without this project's cures: these arms may be wrong, and may die."""

ARMS: dict[str, dict[str, Any]] = {
    "tp2": {"backend": "FLASH_ATTN_MLA"},
    **STOCK,
    **UNCURED,
    "peer fa3": {"backend": "PEER_FLASH_ATTN_MLA"},
    "peer flashmla": {"backend": "PEER_FLASHMLA"},
    "peer triton": {"backend": "PEER_TRITON_MLA"},
    "peer fa3 graphs": {"backend": "PEER_FLASH_ATTN_MLA", "graphs": True},
}


def engine_arguments(name: str) -> dict[str, Any]:
    """What every offline engine of an arm is made with; its model, sizes and graphs come on top."""
    arm = ARMS[name]
    dcp: dict[str, Any] = {}
    if name != "tp2":
        dcp = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 1}
    if "dcp_comm_backend" in arm:
        dcp["dcp_comm_backend"] = arm["dcp_comm_backend"]
    return {
        "skip_tokenizer_init": True,
        "load_format": "kimi_k3_seeded",
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "attention_backend": arm["backend"],
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "seed": 0,
        **dcp,
    }


def environment() -> dict[str, str]:
    """This process's, in which Python finds the repository and these scripts: vLLM's workers import their probes."""
    return os.environ | {"PYTHONPATH": f"{ROOT}/benchmarks:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}


def arm_environment(name: str, index: int) -> dict[str, str]:
    """With an arm's own, and ports of its own: `index` tells arms apart that run at once."""
    arm = ARMS[name]
    own: dict[str, str] = {
        **arm.get("env", {}),
        "VLLM_PORT": str(21000 + 200 * index),
        "MASTER_PORT": str(20500 + index),
        "DECODE_PROBE_UNCURED": "1" if arm.get("uncured") else "0",
    }
    return environment() | own


def slug(name: str) -> str:
    return name.replace(" ", "-").replace("+", "-")
