# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker, which proves what is active in it once the model and the KV cache stand."""

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import vllm
from vllm.distributed.parallel_state import get_dcp_group, get_world_group
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.triton_utils import dispatcher
from vllm.v1.worker.cpu_worker import CPUWorker

from kimi_k3_serve import __version__, cpu, plugin, proof
from kimi_k3_serve.attention.cpu_mla import CPUDCPMLAImpl
from kimi_k3_serve.publish import hook

SLOT_MAPPING_KERNEL = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"


class ProvenCPUWorker(CPUWorker):
    """`--worker-cls kimi_k3_serve.worker.ProvenCPUWorker`."""

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
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
        layers = [
            layer
            for layer in config.compilation_config.static_forward_context.values()
            if isinstance(layer, MLAAttention)
        ]
        world, dcp = get_world_group(), get_dcp_group()
        kv_cache = self.model_runner.kv_cache_config
        # Blocks hold block_size rows on each rank; W ranks keep different rows.
        kv_tokens = kv_cache.num_blocks * config.cache_config.block_size * dcp.world_size
        return {
            "rank": world.rank_in_group,
            "world_size": world.world_size,
            "dcp_world_size": dcp.world_size,
            "interleave": config.parallel_config.cp_kv_cache_interleave_size,
            "features": self.features(layers, dcp.world_size),
            "attention_backend": sorted({qualified_name(layer.attn_backend) for layer in layers}),
            "prefill_kv": hook.state(),
            "kv_blocks": kv_cache.num_blocks,
            "kv_tokens": kv_tokens,
            "kv_bytes": sum(tensor.size for tensor in kv_cache.kv_cache_tensors),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "vllm": vllm.__version__,
            "plugin": __version__,
            "source_lock": plugin.lock_state(),
            "pid": os.getpid(),
        }

    def features(self, layers: list[Any], dcp_world_size: int) -> Mapping[str, Mapping[str, Any]]:
        """Name -> {"active", "reason"} for each behaviour the plugin can add."""
        config = self.vllm_config
        owners = all(isinstance(layer.impl, CPUDCPMLAImpl) for layer in layers) and bool(layers)
        unmanaged = all(layer.dcp_manager is None for layer in layers)
        slots = dispatcher._registry.get(SLOT_MAPPING_KERNEL, (None, None))[1]
        chunked = config.scheduler_config.enable_chunked_prefill
        budget = config.scheduler_config.max_num_batched_tokens
        custom_ops = config.compilation_config.custom_ops
        prefill_kv = hook.state()
        return {
            "cpu_dcp_mla": verdict(owners, f"{len(layers)} MLA layers"),
            "owned_decode_collectives": verdict(
                owners and unmanaged, "no layer holds an MLADCPManager" if unmanaged else "a layer holds one"
            ),
            "prefill_context_gather": verdict(
                owners and dcp_world_size > 1 and bool(prefill_kv),
                f"{prefill_kv['transport']} ({prefill_kv['reason']})"
                if prefill_kv
                else "one rank holds the whole context",
            ),
            "dcp_slot_mapping": verdict(
                slots is cpu.compute_slot_mapping,
                f"slots computed by {qualified_name(slots or SLOT_MAPPING_KERNEL)}",
            ),
            "chunked_prefill": verdict(chunked, f"{budget} tokens a step"),
            "native_ops": verdict("none" in custom_ops, f"custom_ops {custom_ops}"),
        }


def verdict(active: bool, reason: str) -> dict[str, Any]:
    return {"active": bool(active), "reason": reason}


def qualified_name(item: Any) -> str:
    return item if isinstance(item, str) else f"{item.__module__}.{item.__qualname__}"
