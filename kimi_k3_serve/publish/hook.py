# SPDX-License-Identifier: Apache-2.0
"""The one method of vLLM that the publication replaces, and where its publisher is made.

`MLACommonBaseImpl._context_parallel_compute_prefill_context` serves the shared MLA layers, dense and sparse, and
Kimi-K3's own layer, which passes its key concatenation. A sparse layer takes it for prompts no longer than its top-k;
what is longer attends to the chosen rows alone and gathers no context. The publisher is made when the first metadata
builder is: then every rank is there, the workspace's size is known, and a refusal still stops the start.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from kimi_k3_serve.proof import mark_used
from kimi_k3_serve.publish import timing, verify
from kimi_k3_serve.publish.choice import Choice, asked, select, timeout_s
from kimi_k3_serve.publish.chunks import DeviceChunk, upload
from kimi_k3_serve.publish.layout import SLOTS

logger = logging.getLogger("vllm.kimi_k3_serve.publish")

_choices: dict[tuple[Any, ...], Choice] = {}
"""Builders of equal geometry (layers of one kind, ubatches) share a publisher: they run one after the other."""


def install(device_type: str) -> None:
    """Replace the method and make the publisher with the first metadata builder. Idempotent.

    After `ownership.install`, which edits the same builder's text.

    Raises:
        UserError: KIMI_K3_PREFILL_KV asks for what this kind of device cannot do, or another switch has no such value.
    """
    from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention

    asked(device_type)
    timeout_s()
    verify.asked()
    folder = timing.asked(device_type)
    impl = mla_attention.MLACommonBaseImpl
    stock = impl._context_parallel_compute_prefill_context
    if getattr(stock, "publishes", False):
        return
    impl._context_parallel_compute_prefill_context = publishing(stock)
    if folder is not None:
        impl._context_parallel_compute_prefill_context = timing.timed(
            impl._context_parallel_compute_prefill_context, folder
        )
    for builder in (
        mla_attention.MLACommonMetadataBuilder,
        sparse_mla_attention.SparseMLACommonMetadataBuilder,
    ):
        builder.__init__ = choosing(builder.__init__)
        builder.build = loading(builder.build)


def state() -> dict[str, str] | None:
    """How prefill KV travels in this process, for the worker's proof; None where no context is sharded.

    Where layers of several kinds differ in it, all their transports and reasons.
    """
    if not _choices:
        return None
    facts: dict[str, list[str]] = {"transport": [], "reason": []}
    for choice in _choices.values():
        for name, told in facts.items():
            if (value := getattr(choice, name)) not in told:
                told.append(value)
    return {name: ", ".join(told) for name, told in facts.items()}


def choosing(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a metadata builder's `__init__`: its gathering manager also holds the choice, as `prefill_kv`."""

    @functools.wraps(init)
    def __init__(
        self: Any, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, *more: Any, **named: Any
    ) -> None:
        init(self, kv_cache_spec, layer_names, vllm_config, *more, **named)
        if self.dcp_world_size > 1 and self._prefill_backend is not None:
            choice = self.dcp_manager.prefill_kv = choice_for(self)
            if choice.source is None and choice.verified:
                logger.warning(
                    "%s=1 compares nothing: prefill KV goes by %s (%s)",
                    verify.SWITCH,
                    choice.transport,
                    choice.reason,
                )
            if choice.source is not None and not choice.verified:
                # Rows come straight from the paged cache: nothing reads vLLM's gather buffers, so give them back.
                self.chunked_prefill_workspace = self.chunked_prefill_workspace[:0].clone()
            if choice.source is not None:
                self.unloaded = vllm_config.compilation_config.static_forward_context[layer_names[0]]

    return __init__


def loading(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a metadata builder's `build`: by its first call the KV cache is bound, and nothing is being captured yet."""

    @functools.wraps(build)
    def build_loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(self, "unloaded", None)
        if layer is not None and layer.kv_cache.numel():
            self.unloaded = None
            load(self.dcp_manager.prefill_kv, layer.kv_cache, self.dcp_manager.group)
        return build(self, *args, **kwargs)

    return build_loaded


def load(choice: Choice, cache: torch.Tensor, group: Any) -> None:
    """Gather one row a rank, and forget it: the first context chunk would else wait for compilers. Collective.

    Args:
        cache: [blocks, block_size, L + P], the paged cache of a layer.
        group: vLLM's coordinator of the ranks.
    """
    assert choice.source is not None
    ranks, device = group.world_size, cache.device
    [chunk] = upload(
        [([1], [[1] * ranks], [0])],
        rank=group.rank_in_group,
        world_size=ranks,
        device=device,
        tiles=choice.scaled,
        gathered=choice.source.needs_gathered_rows,
    )
    table = torch.zeros((1, 1), dtype=torch.int32, device=device)
    scale = torch.ones(1, device=device) if choice.scaled else None
    choice.source.gather(
        cache.view(torch.float8_e4m3fn) if choice.scaled else cache, table, chunk, slot=0, scale=scale
    )


def choice_for(builder: Any) -> Choice:
    """The choice for a metadata builder's layers, made with the first builder of their geometry. Collective then."""
    from vllm.distributed.parallel_state import get_dcp_group

    group, config = get_dcp_group(), builder.vllm_config
    arguments = {
        "device": torch.device(builder.device),
        "capacity": builder.chunked_prefill_workspace_size,
        "latent": builder.mla_dims.kv_lora_rank,
        "rope": builder.mla_dims.qk_rope_head_dim,
        # The layers' own: some of a model may keep another cache than the rest.
        "cache_dtype": getattr(builder.kv_cache_spec, "cache_dtype_str", None)
        or config.cache_config.cache_dtype,
        "model_dtype": config.model_config.dtype,
        "ubatches": max(config.parallel_config.num_ubatches, 1),
    }
    key = (group.unique_name, *arguments.values())
    if key not in _choices:
        made = select(device_group=group.device_group, host_group=group.cpu_group, **arguments)
        logger.info(
            "Prefill KV by %s for chunks of up to %d rows (%s)",
            made.transport,
            builder.chunked_prefill_workspace_size,
            made.reason,
        )
        _choices[key] = made
    return _choices[key]


def device_chunks(prefill: Any, choice: Choice) -> list[tuple[torch.Tensor, DeviceChunk]]:
    """Block table and maps of each of this batch's chunks: made by its first layer, kept with its metadata."""
    context = prefill.chunked_context
    kept = getattr(context, "device_chunks", None)
    if kept is not None:
        return kept  # type: ignore[no-any-return]
    assert choice.source is not None
    group = context.dcp_manager.group
    made = upload(
        [
            (chunk.padded_local_seq_lens, chunk.local_context_lens_allranks, chunk.local_starts)
            for chunk in context.chunks
        ],
        rank=group.rank_in_group,
        world_size=group.world_size,
        device=context.workspace.device,
        tiles=choice.scaled,
        gathered=choice.source.needs_gathered_rows,
    )
    tables = [prefill.block_table[chunk.request_slice] for chunk in context.chunks]
    context.device_chunks = list(zip(tables, made, strict=True))
    return context.device_chunks  # type: ignore[no-any-return]


@functools.cache
def report_stock(manager: str) -> None:
    logger.warning(
        "Prefill KV by stock: a metadata builder that this plugin does not know made the %s at hand", manager
    )


def publishing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement: vLLM's loop over context chunks, with rows taken from the publisher."""

    @functools.wraps(stock)
    def _context_parallel_compute_prefill_context(
        self: Any,
        q: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        dcp_world_size: int,
        fused_mla_kv_concat_fn: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from vllm.model_executor.layers.attention import mla_attention as mla
        from vllm.platforms import current_platform
        from vllm.v1.worker.ubatching import dbo_current_ubatch_id

        prefill = attn_metadata.prefill
        context = prefill.chunked_context
        choice = getattr(context.dcp_manager, "prefill_kv", None)
        if choice is None:
            report_stock(type(context.dcp_manager).__name__)
        if choice is None or choice.source is None:
            answer: tuple[torch.Tensor, torch.Tensor] = stock(
                self,
                q,
                kv_c_and_k_pe_cache,
                attn_metadata,
                k_scale,
                dcp_world_size,
                fused_mla_kv_concat_fn,
            )
            return answer

        fp8_prefill = prefill.q_data_type == current_platform.fp8_dtype()
        projection_dtype = mla._get_kv_b_proj_input_dtype(self.kv_b_proj, fp8_prefill)
        output = output_lse = None
        for chunk, (block_table, rows) in zip(context.chunks, device_chunks(prefill, choice), strict=True):
            kv_c, k_pe = choice.source.gather(
                kv_c_and_k_pe_cache,
                block_table,
                rows,
                slot=chunk.index % SLOTS,
                ubatch=dbo_current_ubatch_id(),
                scale=k_scale if choice.scaled else None,
            )
            if choice.verified:
                verify.compare(self, chunk, kv_c_and_k_pe_cache, block_table, context, k_scale, kv_c, k_pe)
            k_pe = k_pe.unsqueeze(1)
            if projection_dtype is not None:
                kv_c = kv_c.to(projection_dtype)

            # From here on as upstream.
            kv_nope = self.kv_b_proj(kv_c)[0].view(
                -1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim
            )
            if fused_mla_kv_concat_fn is not None:
                k, v = fused_mla_kv_concat_fn(kv_nope, k_pe, fp8_prefill)
            else:
                if fp8_prefill:
                    kv_nope, k_pe = kv_nope.to(prefill.q_data_type), k_pe.to(prefill.q_data_type)
                k_nope, v = kv_nope.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
                k = self._concat_k_nope_k_pe(k_nope, k_pe)
            partial, lse = prefill.prefill_backend.run_prefill_context_chunk(
                chunk=chunk, q=q[chunk.token_slice], k=k, v=v
            )
            if output is None:
                if len(context.chunks) == 1 and not context.empty_token_slices:
                    output, output_lse = partial, lse
                    break
                output, output_lse = mla.init_mla_context_partial(
                    context, partial, lse, num_tokens=q.shape[0]
                )
            mla.accumulate_mla_context_chunk(chunk, partial, lse, output, output_lse)
        mark_used("prefill_context_gather")
        mark_used(f"prefill_kv_{choice.transport}")
        assert output is not None and output_lse is not None
        return output, output_lse

    _context_parallel_compute_prefill_context.publishes = True  # type: ignore[attr-defined]
    return _context_parallel_compute_prefill_context
