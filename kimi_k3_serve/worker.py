# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker, which proves what is active in it once the model and the KV cache stand."""

from typing import Any

from vllm.distributed.parallel_state import get_dcp_group
from vllm.triton_utils import dispatcher
from vllm.v1.worker.cpu_worker import CPUWorker

from kimi_k3_serve import cpu
from kimi_k3_serve.attention.cpu_mla import CPUDCPMLAImpl
from kimi_k3_serve.inspection import Features, Proven, owned, published, qualified_name, verdict

SLOT_MAPPING_KERNEL = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"


class ProvenCPUWorker(Proven, CPUWorker):
    """`--worker-cls kimi_k3_serve.worker.ProvenCPUWorker`."""

    def kv_tokens(self) -> int | None:
        """Blocks hold block_size rows on each rank; W ranks keep different rows."""
        blocks = self.model_runner.kv_cache_config.num_blocks
        tokens: int = blocks * self.vllm_config.cache_config.block_size * get_dcp_group().world_size
        return tokens

    def features(self, layers: list[Any], dcp_world_size: int) -> Features:
        config = self.vllm_config
        ours = all(isinstance(layer.impl, CPUDCPMLAImpl) for layer in layers) and bool(layers)
        slots = dispatcher._registry.get(SLOT_MAPPING_KERNEL, (None, None))[1]
        chunked = config.scheduler_config.enable_chunked_prefill
        budget = config.scheduler_config.max_num_batched_tokens
        custom_ops = config.compilation_config.custom_ops
        return {
            "cpu_dcp_mla": verdict(ours, f"{len(layers)} MLA layers"),
            "owned_decode_collectives": owned(layers),
            "prefill_context_gather": published(dcp_world_size),
            "dcp_slot_mapping": verdict(
                slots is cpu.compute_slot_mapping,
                f"slots computed by {qualified_name(slots or SLOT_MAPPING_KERNEL)}",
            ),
            "chunked_prefill": verdict(chunked, f"{budget} tokens a step"),
            "native_ops": verdict("none" in custom_ops, f"custom_ops {custom_ops}"),
        }
