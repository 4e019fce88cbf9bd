# SPDX-License-Identifier: Apache-2.0
"""Backend-owned decode collectives: what vLLM 0.32.0 lacks, as edits of six of its functions.

An attention implementation with `owns_decode_dcp_collectives = True` is handed **rank-local** queries
[B, H, L + P] and returns the **combined** output [B, H, L]; for it no `MLADCPManager` is built or called. A
metadata builder with `supports_direct_dcp_kv_gather = True` gathers prefill context without one. Whatever
declares neither runs the upstream text: each edit adds one condition that is false for it.

`impl.dcp_world_size` stays W for an owner, so that prefill goes on through vLLM's context-parallel path.
"""

from typing import Any

import torch
import torch.distributed as dist

from kimi_k3_serve.patch import Edit, edit_function
from kimi_k3_serve.proof import mark_used

SHARED = "vllm.model_executor.layers.attention.mla_attention"
SPARSE = "vllm.model_executor.layers.attention.sparse_mla_attention"
KIMI = "vllm.models.kimi_k3.nvidia.mla"

OWNER = 'getattr(self.impl, "owns_decode_dcp_collectives", False)'

GATHER = Edit(
    '        self.dcp_manager = getattr(attention_layer, "dcp_manager", None)\n'
    "        assert isinstance(self.dcp_manager, MLADCPManager)\n",
    "        from kimi_k3_serve.attention.ownership import context_gather\n\n"
    "        self.dcp_manager = context_gather(self, attention_layer)\n",
)

EDITS: dict[str, list[Edit]] = {
    # The shared layer builds no manager for an owner ...
    f"{SHARED}.MLAAttention.__init__": [
        Edit(
            "    if self.impl.dcp_world_size > 1:\n        query_dtype = (",
            f"    owner = {OWNER}\n"
            "    if owner:\n"
            "        from kimi_k3_serve.attention.ownership import check_owner\n\n"
            "        check_owner(self)\n"
            "    if self.impl.dcp_world_size > 1 and not owner:\n        query_dtype = (",
        )
    ],
    # ... hands it local queries and takes its output as final.
    f"{SHARED}.MLAAttention.forward_impl": [
        Edit(
            "        if self.impl.dcp_world_size > 1:\n            assert self.dcp_manager is not None\n"
            "            if self.use_pcp:",
            f"        managed = self.impl.dcp_world_size > 1 and not {OWNER}\n"
            "        if managed:\n            assert self.dcp_manager is not None\n"
            "            if self.use_pcp:",
        ),
        Edit(
            "        if self.impl.dcp_world_size > 1:\n            assert lse is not None",
            "        if managed:\n            assert lse is not None",
        ),
    ],
    # A metadata builder, dense or sparse, may gather context itself.
    f"{SHARED}.MLACommonMetadataBuilder.__init__": [GATHER],
    f"{SPARSE}.SparseMLACommonMetadataBuilder.__init__": [GATHER],
    # Kimi-K3's own layer: the same two steps.
    f"{KIMI}.MultiHeadLatentAttention.__init__": [
        Edit(
            "    if self.dcp_world_size > 1:\n        query_dtype = (",
            f"    if self.dcp_world_size > 1 and not {OWNER}:\n        query_dtype = (",
        )
    ],
    f"{KIMI}.MultiHeadLatentAttention._attention": [
        Edit(
            "        if self.dcp_world_size > 1:\n            assert self.dcp_manager is not None\n"
            "            assert self.dcp_manager.query_gather",
            f"        managed = self.dcp_world_size > 1 and not {OWNER}\n"
            "        if managed:\n            assert self.dcp_manager is not None\n"
            "            assert self.dcp_manager.query_gather",
        ),
        Edit(
            "        if self.dcp_world_size > 1:\n            assert lse is not None",
            "        if managed:\n            assert lse is not None",
        ),
    ],
}


def install(*, kimi: bool) -> None:
    """Teach the shared MLA layer and metadata builders the contract, and Kimi-K3's own layer with `kimi`. Idempotent.

    Kimi-K3's module is for GPUs: vLLM's CPU worker does not start in a process that has imported it.
    """
    for name, edits in EDITS.items():
        if kimi or not name.startswith(KIMI):
            edit_function(name, edits)


class ContextGatherError(RuntimeError):
    """Under DCP nothing can gather the context that a prefill needs."""


def context_gather(builder: Any, layer: Any) -> Any:
    """What gathers prefill context for this builder: itself where it declares so, else the layer's manager.

    Raises:
        ContextGatherError: neither; raised while the builder is made, long before context attention.
    """
    from vllm.v1.attention.ops.dcp import MLADCPManager

    if getattr(builder, "supports_direct_dcp_kv_gather", False):
        return ContextGather()
    manager = getattr(layer, "dcp_manager", None)
    if not isinstance(manager, MLADCPManager):
        raise ContextGatherError(
            f"{type(builder).__name__} cannot gather prefill context under decode context parallelism: its layer "
            "has no MLADCPManager and it does not declare supports_direct_dcp_kv_gather"
        )
    return manager


class ContextGather:
    """All-gather of context rows over the DCP group; nothing else of an `MLADCPManager`."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_dcp_group

        self.group = get_dcp_group()

    def init_kv_gather(self, workspace: torch.Tensor, max_gathered_tokens: int) -> None:
        """The all-gather writes straight into the builder's workspace: nothing to prepare."""

    def kv_gather(self, gathered: torch.Tensor, local: torch.Tensor) -> None:
        """All-gather `local` [rows, L + P] rank-major into `gathered` [W * rows, L + P]."""
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=self.group.device_group)
        mark_used("prefill_context_gather")


def check_owner(layer: Any) -> None:
    """Refuse what would hand an owner anything but rank-local queries.

    Raises:
        NotImplementedError: prefill context parallelism, or replicated query projections.
    """
    owner = type(layer.impl).__name__
    if layer.use_pcp:
        raise NotImplementedError(
            f"{owner} owns its decode collectives and does not run with prefill context parallelism; "
            "set prefill_context_parallel_size=1"
        )
    if layer.dcp_q_replicate:
        raise NotImplementedError(
            f"{owner} owns its decode collectives and takes rank-local queries; unset dcp_q_replicate"
        )
