# SPDX-License-Identifier: Apache-2.0
"""vLLM's GPU worker, which proves what is active in it once the model and the KV cache stand.

It cannot tell how many tokens the KV cache holds (a hybrid model's blocks belong to layers of two kinds): the engine
core can, and says so in its log.
"""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from kimi_k3_serve import vllm_nccl
from kimi_k3_serve.inspection import Features, Proven, owned, published, verdict
from kimi_k3_serve.projection.gather import inspect as projections


class ProvenGPUWorker(Proven, Worker):
    """`--worker-cls kimi_k3_serve.gpu_worker.ProvenGPUWorker`."""

    def features(self, layers: list[Any], dcp_world_size: int) -> Features:
        config = self.vllm_config
        budget = config.scheduler_config.max_num_batched_tokens
        graphs = config.compilation_config.cudagraph_mode
        return {
            "mla_layers": verdict(bool(layers), f"{len(layers)} MLA layers"),
            "owned_decode_collectives": owned(layers),
            "prefill_context_gather": published(dcp_world_size),
            "sharded_projections": projections(layers),
            "chunked_prefill": verdict(
                config.scheduler_config.enable_chunked_prefill, f"{budget} tokens a step"
            ),
            "vllm_nccl": vllm_nccl.state(),
            "cuda_graphs": verdict(bool(graphs), str(graphs)),
        }
