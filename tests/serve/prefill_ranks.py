# SPDX-License-Identifier: Apache-2.0
"""W real ranks run vLLM's context-parallel prefill method and the one that replaces it, on the same cache.

Run as a script: `prefill_ranks.py WORLD_SIZE:TRANSPORT:KIND ...`. Prints each case in which, on every rank, the context
rows that `kv_b_proj` reads and the keys that attention reads are vLLM's byte for byte, and outputs and LSEs with them.
Two layers share one batch's maps. With `verify` as TRANSPORT also, that the comparison in the running engine finds a
damaged row.

    fp32, bf16      the cache in the model's dtype
    interleave4     bf16, each rank keeps the tokens in runs of four
    fp8             model bf16, cache e4m3 with a k_scale other than 1
    fp8-queries     the same with fp8 prefill queries and a fused key concatenation, as Kimi-K3's own layer has them
    sparse          bf16 through a sparse layer's implementation and its own metadata builder
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import get_dcp_group
from vllm.model_executor.layers.attention import mla_attention as mla
from vllm.model_executor.layers.attention import sparse_mla_attention as sparse
from vllm.v1.attention.ops.dcp import MLADCPManager

from kimi_k3_serve import cpu
from kimi_k3_serve.attention.cpu_mla import CPUDCPMLAImpl
from kimi_k3_serve.attention.ownership import ContextGather
from kimi_k3_serve.publish import choice, hook, verify
from kimi_k3_serve.slot_mapping import slot_mapping

LATENT, ROPE, NOPE, VALUE, HEADS, BLOCK, WORKSPACE = 512, 64, 16, 16, 2, 4, 32
CONTEXTS = [21, 0, 1, 70, 3]
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Kind:
    model_dtype: torch.dtype
    cache_dtype: str = "auto"
    k_scale: float = 1.0
    fp8_queries: bool = False
    interleave: int = 1
    sparse: bool = False


KINDS = {
    "fp32": Kind(torch.float32),
    "bf16": Kind(torch.bfloat16),
    "interleave4": Kind(torch.bfloat16, interleave=4),
    "fp8": Kind(torch.bfloat16, "fp8", 0.3717),
    "fp8-queries": Kind(torch.bfloat16, "fp8", 2.7, fp8_queries=True),
    "sparse": Kind(torch.bfloat16, sparse=True),
}


class PrefillBackend:
    """Attention of every query over every key of a chunk's own requests, in float32; keeps the keys it was given."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []

    def clone(self) -> "PrefillBackend":
        return PrefillBackend()

    def run_prefill_context_chunk(self, *, chunk: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        self.keys.append(k.clone())
        request_of_key = chunk.token_to_seq.long()
        lens = chunk.query_start_loc[1:] - chunk.query_start_loc[:-1]
        request_of_query = torch.repeat_interleave(torch.arange(len(lens)), lens.long())
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float())
        scores = scores.masked_fill(request_of_query[:, None] != request_of_key[None, :], -torch.inf)
        output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float())
        return output.to(torch.bfloat16 if q.dtype == FP8 else q.dtype).contiguous(), scores.logsumexp(-1)


class Projection:
    """`kv_b_proj`, which keeps the rows it was given."""

    def __init__(self, dtype: torch.dtype, generator: torch.Generator) -> None:
        self.weight = torch.randn(HEADS * (NOPE + VALUE), LATENT, generator=generator).to(dtype)
        self.rows: list[torch.Tensor] = []

    def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        self.rows.append(rows.reshape(-1, LATENT).clone())  # vLLM: [N, 1, L]
        return rows.to(self.weight.dtype) @ self.weight.T, None


class SparseImpl(sparse.SparseMLACommonImpl[Any]):
    def forward_mqa(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("no decode here")


class Manager(ContextGather, MLADCPManager):
    """A layer's manager, of which a sparse builder insists to be given one."""


def implementation(kind: Kind, projection: Projection) -> Any:
    names = ("q_lora_rank", "qk_head_dim")
    dims = dict.fromkeys(names) | {
        "kv_b_proj": projection,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": VALUE,
    }
    made = SparseImpl if kind.sparse else CPUDCPMLAImpl
    impl: Any = made(HEADS, LATENT + ROPE, 1.0, 1, None, None, "auto", None, "decoder", None, **dims)
    impl.kv_cache_dtype = kind.cache_dtype
    impl._use_flashinfer_concat_mla_k = False
    return impl


def sparse_builder(world_size: int) -> Any:
    """vLLM's own, of a configuration that is no larger than what it reads."""
    text = SimpleNamespace(
        index_topk=8, q_lora_rank=None, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE,
        v_head_dim=VALUE,
    )  # fmt: skip
    layer = SimpleNamespace(prefill_backend=PrefillBackend(), dcp_manager=Manager())
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4),
        model_config=SimpleNamespace(
            hf_text_config=text,
            dtype=torch.bfloat16,
            max_model_len=256,
            model_arch_config=SimpleNamespace(total_num_attention_heads=HEADS * world_size),
        ),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1,
            decode_context_parallel_size=world_size,
            cp_kv_cache_interleave_size=1,
            num_ubatches=0,
        ),
        cache_config=SimpleNamespace(block_size=BLOCK, cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
    )
    builder = sparse.SparseMLACommonMetadataBuilder(
        SimpleNamespace(block_size=BLOCK), ["layer"], config, torch.device("cpu")
    )
    assert builder.chunked_prefill_workspace_size == WORKSPACE
    return builder


def metadata(kind: Kind, rank: int, world_size: int, generator: torch.Generator) -> tuple[Any, Any, Any]:
    """This rank's paged cache of random context rows, vLLM's metadata over it, and queries."""
    starts = torch.arange(len(CONTEXTS) + 1, dtype=torch.int32) * 3
    context = mla.build_mla_chunked_context_metadata(
        context_lens_cpu=torch.tensor(CONTEXTS, dtype=torch.int32),
        prefill_query_start_loc_cpu=starts,
        chunked_prefill_workspace=torch.empty(
            WORKSPACE + WORKSPACE // world_size, LATENT + ROPE, dtype=kind.model_dtype
        ),
        chunked_prefill_workspace_size=WORKSPACE,
        block_size=BLOCK,
        align_chunk_to_block=False,
        device=torch.device("cpu"),
        dcp_world_size=world_size,
        dcp_local_block_size=kind.interleave,
        dcp_virtual_block_size=world_size * kind.interleave,
        dcp_manager=ContextGather(),
    )
    assert context is not None
    width = -(-max(CONTEXTS) // (BLOCK * world_size))
    table = torch.randperm(width * len(CONTEXTS), generator=generator).view(len(CONTEXTS), width).int()
    cached = FP8 if kind.cache_dtype == "fp8" else kind.model_dtype
    rows = torch.randn(sum(CONTEXTS), LATENT + ROPE, generator=generator).to(cached)
    slots = slot_mapping(
        torch.tensor([0, *CONTEXTS]).cumsum(0),
        torch.cat([torch.arange(n) for n in CONTEXTS]),
        table,
        block_size=BLOCK,
        world_size=world_size,
        rank=rank,
        interleave=kind.interleave,
    )
    cache = torch.full((width * len(CONTEXTS), BLOCK, LATENT + ROPE), torch.nan).to(cached)
    raw, here = cache.view(-1, LATENT + ROPE).view(torch.uint8), slots >= 0
    raw[slots[here]] = rows.view(torch.uint8)[here]
    query_dtype = FP8 if kind.fp8_queries else kind.model_dtype
    prefill = SimpleNamespace(
        prefill_backend=PrefillBackend(), chunked_context=context, q_data_type=query_dtype, block_table=table
    )
    query = torch.randn(3 * len(CONTEXTS), HEADS, NOPE + ROPE, generator=generator).to(query_dtype)
    return SimpleNamespace(prefill=prefill), cache, query


def fused_concat(kv_nope: torch.Tensor, k_pe: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What Kimi-K3's `_fused_mla_kv_concat` computes."""
    assert fp8
    k_nope, v = kv_nope.split([NOPE, VALUE], dim=-1)
    return torch.cat([k_nope, k_pe.expand(-1, HEADS, -1)], dim=-1).to(FP8), v.to(FP8)


def gather_and_maybe_dequant_cache(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor | None = None,
) -> None:
    """vLLM's kernel, which its CPU build lacks: float32(cached) * scale, rounded once to the workspace's dtype."""
    assert kv_cache_dtype == "fp8" and src_cache.dtype == FP8 and seq_starts is not None
    request = token_to_seq[:num_tokens].long()
    position = torch.arange(num_tokens) - cu_seq_lens[request] + seq_starts[request]
    rows = src_cache[block_table[request, position // BLOCK].long(), position % BLOCK]
    dst[:num_tokens] = (rows.float() * scale).to(dst.dtype)


def define_upstream_kernels() -> None:
    cpu.define_cp_gather_cache()
    if not hasattr(torch.ops._C_cache_ops, "gather_and_maybe_dequant_cache"):
        torch.library.define(
            "_C_cache_ops::gather_and_maybe_dequant_cache",
            "(Tensor src_cache, Tensor(a!) dst, Tensor block_table, Tensor cu_seq_lens, Tensor token_to_seq, "
            "int num_tokens, str kv_cache_dtype, Tensor scale, Tensor? seq_starts=None) -> ()",
        )
        torch.library.impl(
            "_C_cache_ops::gather_and_maybe_dequant_cache", "CPU", gather_and_maybe_dequant_cache
        )


def same(found: Any, wanted: Any) -> bool:
    return len(found) == len(wanted) and all(
        a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(found, wanted, strict=True)
    )


def rank_main(rank: int, world_size: int, transport: str, name: str, store: str) -> None:
    os.environ["VLLM_DIST_IDENT"] = Path(store).parent.name
    os.environ[choice.SWITCH] = "auto" if transport == "verify" else transport
    os.environ[verify.SWITCH] = str(int(transport == "verify"))
    kind = KINDS[name]
    parallel = ParallelConfig(tensor_parallel_size=world_size, decode_context_parallel_size=world_size)
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        init_distributed_environment(world_size, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(world_size, decode_context_model_parallel_size=world_size)
        define_upstream_kernels()
        stock = mla.MLACommonBaseImpl._context_parallel_compute_prefill_context
        hook.install("cpu")
        generator = torch.Generator().manual_seed(0)
        projection = Projection(kind.model_dtype, generator)
        impl = implementation(kind, projection)
        attention, cache, query = metadata(kind, rank, world_size, generator)
        context, backend = attention.prefill.chunked_context, attention.prefill.prefill_backend
        assert len(context.chunks) > 2

        def run(method: Any) -> list[torch.Tensor]:
            """Outputs and LSEs, every row that was projected, every key."""
            projection.rows, backend.keys = [], []
            scale = torch.tensor([kind.k_scale])
            concat = (fused_concat,) if kind.fp8_queries else ()
            answer = method(query, cache, attention, scale, world_size, *concat)
            return [*answer, *projection.rows, *backend.keys]

        wanted = run(lambda *arguments: stock(impl, *arguments))
        if kind.sparse:
            builder = sparse_builder(world_size)
            made = builder.dcp_manager.prefill_kv
            # vLLM's gather buffers are given back, but to the comparison, which needs them.
            kept = builder.chunked_prefill_workspace.untyped_storage().nbytes()
            row_bytes = (LATENT + ROPE) * kind.model_dtype.itemsize
            assert kept == (transport == "verify") * (WORKSPACE + WORKSPACE // world_size) * row_bytes, kept
        else:
            group = get_dcp_group()
            made = choice.select(
                device_group=group.device_group,
                host_group=group.cpu_group,
                device=torch.device("cpu"),
                capacity=WORKSPACE,
                latent=LATENT,
                rope=ROPE,
                cache_dtype=kind.cache_dtype,
                model_dtype=kind.model_dtype,
                ubatches=1,
            )
        assert made.transport == ("shared" if transport in ("auto", "verify") else transport)
        context.dcp_manager.prefill_kv = made
        if made.source is not None:
            hook.load(made, cache, context.dcp_manager.group)
        published = impl._context_parallel_compute_prefill_context
        if transport == "verify":
            run(published)
            assert verify.compared["chunks"] == len(context.chunks)
            damage(made.source)
            try:
                run(published)
            except verify.PublishedRowsDiffer as error:
                assert f"rank {rank}: kv_c of context chunk 0 differs from vLLM's in row 2 of" in str(
                    error
                ), error
                return
            raise AssertionError("a damaged row was not found")
        uploads, upload = [], hook.upload
        hook.upload = lambda *args, **kwargs: uploads.append(1) or upload(*args, **kwargs)
        for _ in range(2):  # two layers
            assert same(run(published), wanted)
            torch.distributed.barrier()
        assert len(uploads) == (made.source is not None), "maps are built once a batch"


def damage(source: Any) -> None:
    """From now on row 2 of every chunk is wrong by one bit."""
    gather = source.gather

    def damaged(*args: Any, **kwargs: Any) -> Any:
        planes = gather(*args, **kwargs)
        planes[0].view(torch.uint8)[2, 5] ^= 1
        return planes

    source.gather = damaged


if __name__ == "__main__":
    for case in sys.argv[1:]:
        size, transport, name = case.split(":")
        with tempfile.TemporaryDirectory() as folder:
            arguments = (int(size), transport, name, f"{folder}/store")
            mp.start_processes(rank_main, arguments, int(size), start_method="fork")
        print(case, flush=True)
