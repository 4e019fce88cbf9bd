# SPDX-License-Identifier: Apache-2.0
"""B12X_MLA: dense MLA decode on SM120/SM121 with b12x 1.5.1 (`pip install b12x==1.5.1`), an owner of its collectives.

b12x works in four steps: declare (`plan`), prepare (`PreparationRequest` -> compiled launchers), bind (live tensors
and caller-owned scratch), run. A plan is made for capacities: all decode slots, the longest *local* context, the
page table's width. It is prepared at the first eager step, which vLLM runs before it captures any graph.

NOT RUN: no SM120 machine has run this file. The rules (`b12x_rules.py`), the padding, the merge and, against b12x's own
plans and bindings, the calls are tested on the CPU.
"""

import functools
import importlib
import importlib.util
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf

from kimi_k3_serve.attention import b12x_rules as rules
from kimi_k3_serve.attention.b12x_collectives import B12xCollectives
from kimi_k3_serve.attention.peer import DecodeCollectives, asked_tokens
from kimi_k3_serve.proof import mark_used

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what its own logger's children say

USE_COLLECTIVES = "VLLM_USE_B12X_DCP_A2A"  # 1: small batches go over b12x's PCIe channel, not NCCL
COLLECTIVE_MAX_TOKENS = "VLLM_DCP_A2A_MAX_TOKENS"  # the largest such batch


class B12xMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Shared MLA metadata, one query token a request; context rows are gathered without a manager."""

    supports_direct_dcp_kv_gather = True
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class B12xMLABackend(MLACommonBackend):
    """Registered as B12X_MLA; vLLM's own backend named B12X is paged attention without MLA."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        return "B12X_MLA"

    @staticmethod
    def get_impl_cls() -> type["B12xMLAImpl"]:
        return B12xMLAImpl

    @staticmethod
    def get_builder_cls() -> type[B12xMLAMetadataBuilder]:
        return B12xMLAMetadataBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return (capability.major, capability.minor) in ((12, 0), (12, 1))

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """The first reason against it, each in its own words; vLLM shows it beside its own."""
        if not cls.supports_compute_capability(device_capability):
            found = f"SM{device_capability.major}{device_capability.minor}"
            return f"B12X_MLA runs on SM120 and SM121 only, this GPU is {found}"
        if importlib.util.find_spec("b12x") is None:
            return "B12X_MLA needs the package b12x; install b12x==1.5.1"
        config = get_current_vllm_config()
        dims = {name: getattr(config.model_config.hf_text_config, name, None) for name in rules.MLA_DIMS}
        if dims != rules.MLA_DIMS:
            return f"B12X_MLA takes MLA of {rules.MLA_DIMS}, this model has {dims}"
        parallel = config.parallel_config
        return rules.geometry_refusal(
            local_heads=config.model_config.get_num_attention_heads(parallel),
            dcp=parallel.decode_context_parallel_size,
            pcp=parallel.prefill_context_parallel_size,
            interleave=parallel.cp_kv_cache_interleave_size,
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs,
        )


class B12xMLAImpl(MLACommonImpl[MLACommonMetadata]):
    """Gather rank-local heads, run the kernel on this rank's shard, merge by LSE."""

    owns_decode_dcp_collectives = True
    can_return_lse_for_decode = True
    supports_dcp = True
    supports_pcp = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        self.collectives: Any = None
        if self.dcp_world_size > 1:
            self.collectives = decode_collectives(get_dcp_group(), self.num_heads)
        self.capacity = Capacity(
            heads=rules.padded_heads(self.num_heads * self.dcp_world_size),
            rows=config.scheduler_config.max_num_seqs,
            tokens=rules.longest_local(
                config.model_config.max_model_len,
                self.dcp_world_size,
                config.parallel_config.cp_kv_cache_interleave_size,
            ),
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Decode: rank-local queries [B, H, L + P] in, combined output [B, H, L] out."""
        decode = attn_metadata.decode
        assert decode is not None
        latent = self.kv_lora_rank
        nope, rope = q if isinstance(q, tuple) else (q[..., :latent], q[..., latent:])
        query = torch.cat([nope, rope], dim=-1)
        if self.collectives is not None:
            query = self.collectives.gather(nope, rope)
        heads = query.shape[1]
        query = pad(query, self.capacity.heads)
        step = operands(self.capacity, kv_c_and_k_pe_cache, decode, layer, self.scale)
        output, lse = strip(*kernel(self.capacity, query, step).run(query, step), heads)
        mark_used("b12x_mla_decode")
        if self.collectives is None:
            return output, None
        merged = self.collectives.merge(
            output,
            lse,
            seq_lens=decode.seq_lens,
            query_start_loc=attn_metadata.query_start_loc[: attn_metadata.num_decodes + 1],
            base_e=True,
        )
        return merged, None


def pad(query: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, H, D] -> [B, heads, D]: synthetic heads of zeros behind the real ones."""
    if query.shape[1] == heads:
        return query.contiguous()
    padded = query.new_zeros(query.shape[0], heads, query.shape[2])
    padded[:, : query.shape[1]] = query
    return padded


def strip(output: torch.Tensor, lse: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop the synthetic heads of output [B, padded, L] and LSE [B, padded].

    The kernel leaves an empty shard's output unwritten beside its LSE of -inf; here it becomes 0.
    """
    output, lse = output[:, :heads], lse[:, :heads]
    return torch.where(torch.isneginf(lse).unsqueeze(-1), 0.0, output), lse.contiguous()


@dataclass(frozen=True)
class Capacity:
    """What a plan is made for: padded query heads, decode slots, longest local context in tokens."""

    heads: int
    rows: int
    tokens: int


def operands(
    capacity: Capacity, cache: torch.Tensor, decode: Any, layer: Any, scale: float
) -> dict[str, Any]:
    """What `dense_mla.bind` takes of one step beside query, output and scratch; one query row a request."""
    fp8 = cache.dtype == torch.float8_e4m3fn
    return {
        "kv_cache": cache,
        "page_table": decode.block_table,
        "cache_seqlens": decode.seq_lens,
        "cu_seqlens_q": rows_of_one(capacity.rows, cache.device)[: decode.seq_lens.shape[0] + 1],
        "kv_scale": layer._k_scale.reshape(1) if fp8 else None,
        "q_scale": layer._q_scale.reshape(1) if fp8 else None,
        "sm_scale": scale,
    }


@functools.cache
def rows_of_one(rows: int, device: torch.device) -> torch.Tensor:
    """[rows + 1] int32: where each request's single query row begins."""
    return torch.arange(rows + 1, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Kernel:
    """One prepared plan and the scratch that all layers with its capacities share: they run one after another."""

    plan: Any
    scratch: torch.Tensor

    def run(self, query: torch.Tensor, step: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, heads, L + P] -> output [B, heads, L] BF16 and LSE [B, heads] float32, natural logarithm."""
        dense_mla = importlib.import_module("b12x.attention.dense_mla")
        output = empty_output(query)
        binding = dense_mla.bind(self.plan, scratch=self.scratch, q=query, output=output, **step)
        merged, lse = dense_mla.run(plan=self.plan, binding=binding)
        return merged, lse


def empty_output(query: torch.Tensor) -> torch.Tensor:
    shape = (*query.shape[:2], rules.MLA_DIMS["kv_lora_rank"])
    return torch.empty(shape, dtype=torch.bfloat16, device=query.device)


_kernels: dict[Any, Kernel] = {}


def kernel(capacity: Capacity, query: torch.Tensor, step: dict[str, Any]) -> Kernel:
    """The kernel prepared for these capacities, dtypes and this cache's layout."""
    cache = step["kv_cache"]
    key = (capacity, query.dtype, cache.dtype, cache.shape, cache.stride(), step["page_table"].shape[1])
    if key not in _kernels:
        _kernels[key] = prepare(capacity, query, step)
    return _kernels[key]


def prepare(capacity: Capacity, query: torch.Tensor, step: dict[str, Any]) -> Kernel:
    """Declare and prepare: compiles, then runs once on the live operands. Not inside a CUDA graph capture."""
    dense_mla = importlib.import_module("b12x.attention.dense_mla")
    preparation = importlib.import_module("b12x.preparation")
    cache, table = step["kv_cache"], step["page_table"]
    caps = dense_mla.Caps(
        device=cache.device,
        mode="decode",
        q_dtype=query.dtype,
        kv_dtype=cache.dtype,
        num_q_heads=capacity.heads,
        page_size=cache.shape[1],
        max_total_q=capacity.rows,
        max_batch=capacity.rows,
        max_cache_tokens=min(capacity.tokens, table.shape[1] * cache.shape[1]),
        max_page_table_width=table.shape[1],
        num_cache_pages=cache.shape[0],
        use_cuda_graph=True,
    )
    tensors = {"q": query, "output": empty_output(query), **step}
    scale = tensors.pop("sm_scale")
    plan = dense_mla.plan(caps, invocation=dense_mla.invocation_from_tensors(caps, **tensors))
    scratch: list[torch.Tensor] = []

    def prepare_call(state: Any) -> Any:
        (spec,) = state.scratch_specs()
        scratch.append(torch.empty(spec.shape, dtype=spec.dtype, device=cache.device))
        binding = state.bind(scratch=scratch[-1], sm_scale=scale, **tensors)
        state.prime(binding)
        return preparation.PreparedCall(run=lambda: state.run(binding), output=tensors["output"])

    request = preparation.PreparationRequest(name="kimi_k3.b12x_mla", plan=plan, prepare_call=prepare_call)
    preparation.prepare_default(request)
    logger.info_once("B12X_MLA prepared: %s, scratch %.1f MiB.", str(capacity), scratch[-1].nbytes / 2**20)
    return Kernel(plan, scratch[-1])


@functools.cache
def decode_collectives(group: Any, heads: int) -> Any:
    """b12x's PCIe channel for small batches where it is asked for and can be, else NCCL; the log says which and why."""
    reason = None
    if os.environ.get(USE_COLLECTIVES) != "1":
        reason = f"{USE_COLLECTIVES} is not 1"
    elif group.world_size not in rules.COLLECTIVE_WORLD_SIZES:
        reason = f"b12x exchanges between {rules.COLLECTIVE_WORLD_SIZES} ranks, not {group.world_size}"
    if reason is not None:
        logger.info_once("B12X_MLA gathers and merges over NCCL: %s.", reason)
        return DecodeCollectives(group, None, f"decode over NCCL ({reason})")
    return B12xCollectives(group, heads, max_tokens=asked_tokens(COLLECTIVE_MAX_TOKENS) or 1)
