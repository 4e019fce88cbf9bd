# SPDX-License-Identifier: Apache-2.0
"""What a worker finds when it looks at its own loaded model, for its proof: the part that every device shares."""

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import vllm
from vllm.distributed.parallel_state import get_dcp_group, get_world_group

from kimi_k3_serve import __version__, plugin, proof
from kimi_k3_serve.publish import hook

Features = Mapping[str, Mapping[str, Any]]


class Proven:
    """Mixed into a vLLM worker: proves what is active once the model and the KV cache stand."""

    vllm_config: Any
    model_runner: Any

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        report = self.inspect()
        proofs: list[Any] = [None] * get_world_group().world_size
        dist.all_gather_object(proofs, report["features"], group=get_world_group().cpu_group)
        if any(features != proofs[0] for features in proofs):
            raise RuntimeError(f"ranks disagree on the active features: {proofs}")
        proof.publish(report)
        return times

    def inspect(self) -> dict[str, Any]:
        """Look at the loaded model itself, not at what was asked for."""
        config = self.vllm_config
        layers = mla_layers(config)
        world, dcp = get_world_group(), get_dcp_group()
        kv_cache = self.model_runner.kv_cache_config
        return {
            "rank": world.rank_in_group,
            "world_size": world.world_size,
            "dcp_world_size": dcp.world_size,
            "interleave": config.parallel_config.cp_kv_cache_interleave_size,
            "features": self.features(layers, dcp.world_size),
            "attention_backend": sorted({qualified_name(layer.attn_backend) for layer in layers}),
            "prefill_kv": hook.state(),
            "kv_blocks": kv_cache.num_blocks,
            "kv_tokens": self.kv_tokens(),
            # Each tensor states the size of the allocation that all of them lie in.
            "kv_bytes": max((tensor.size for tensor in kv_cache.kv_cache_tensors), default=0),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "vllm": vllm.__version__,
            "plugin": __version__,
            "plugin_sha256": proof.code_sha256(),
            "source_lock": plugin.lock_state(),
            "pid": os.getpid(),
        }

    def features(self, layers: list[Any], dcp_world_size: int) -> Features:
        """Name -> {"active", "reason"} for each behaviour that the plugin can add on this device."""
        raise NotImplementedError

    def kv_tokens(self) -> int | None:
        """Tokens that the KV cache holds over all ranks; None where a worker cannot tell."""
        return None


def mla_layers(config: Any) -> list[Any]:
    """The shared MLA layer's instances, and those of Kimi-K3's own, which is another class."""
    layers = config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if hasattr(layer, "kv_lora_rank") and hasattr(layer, "impl")]


def owned(layers: list[Any]) -> Mapping[str, Any]:
    """Whether the attention implementations own their decode collectives, and how those travel."""
    owners = bool(layers) and all(
        getattr(layer.impl, "owns_decode_dcp_collectives", False) for layer in layers
    )
    unmanaged = all(layer.dcp_manager is None for layer in layers)
    collectives = [getattr(layer.impl, "collectives", None) for layer in layers]
    ways = sorted({way for each in collectives if (way := getattr(each, "way", None))})
    manager = "no layer holds an MLADCPManager" if unmanaged else "a layer holds an MLADCPManager"
    return verdict(owners and unmanaged, "; ".join([manager, *ways]))


def published(dcp_world_size: int) -> Mapping[str, Any]:
    """Whether prefill context travels by this project's code."""
    state = hook.state()
    if dcp_world_size == 1 or not state:
        return verdict(False, "one rank holds the whole context")
    return verdict("stock" not in state["transport"], f"{state['transport']} ({state['reason']})")


def verdict(active: bool, reason: str) -> dict[str, Any]:
    return {"active": bool(active), "reason": reason}


def qualified_name(item: Any) -> str:
    return item if isinstance(item, str) else f"{item.__module__}.{item.__qualname__}"
