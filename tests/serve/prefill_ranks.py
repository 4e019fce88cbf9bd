# SPDX-License-Identifier: Apache-2.0
"""W real ranks run vLLM's context-parallel prefill method and the one that replaces it, on the same cache.

Run as a script: `prefill_ranks.py WORLD_SIZE:TRANSPORT:DTYPE ...`. Prints each case whose outputs and LSEs are equal
bit for bit on every rank; for `verify` as TRANSPORT, that the comparison in the running engine finds a damaged row.
"""

import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.distributed.parallel_state import get_dcp_group
from vllm.model_executor.layers.attention import mla_attention as mla

from kimi_k3_serve import cpu
from kimi_k3_serve.attention.cpu_mla import CPUDCPMLAImpl
from kimi_k3_serve.attention.ownership import ContextGather
from kimi_k3_serve.publish import choice, hook, verify
from kimi_k3_serve.slot_mapping import slot_mapping

LATENT, ROPE, NOPE, VALUE, HEADS, BLOCK, WORKSPACE = 512, 64, 16, 16, 2, 4, 32
CONTEXTS = [21, 0, 1, 70, 3]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PrefillBackend:
    """Attention of every query over every key of a chunk's own requests, in float32."""

    def run_prefill_context_chunk(self, *, chunk: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        request_of_key = chunk.token_to_seq.long()
        lens = chunk.query_start_loc[1:] - chunk.query_start_loc[:-1]
        request_of_query = torch.repeat_interleave(torch.arange(len(lens)), lens.long())
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float())
        scores = scores.masked_fill(request_of_query[:, None] != request_of_key[None, :], -torch.inf)
        output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float())
        return output.to(q.dtype).contiguous(), scores.logsumexp(-1)


def metadata(
    rank: int, world_size: int, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, Any, Any]:
    """This rank's paged cache of random context rows, vLLM's metadata over it, and queries."""
    starts = torch.arange(len(CONTEXTS) + 1, dtype=torch.int32) * 3
    context = mla.build_mla_chunked_context_metadata(
        context_lens_cpu=torch.tensor(CONTEXTS, dtype=torch.int32),
        prefill_query_start_loc_cpu=starts,
        chunked_prefill_workspace=torch.empty(
            WORKSPACE + WORKSPACE // world_size, LATENT + ROPE, dtype=dtype
        ),
        chunked_prefill_workspace_size=WORKSPACE,
        block_size=BLOCK,
        align_chunk_to_block=False,
        device=torch.device("cpu"),
        dcp_world_size=world_size,
        dcp_local_block_size=1,
        dcp_virtual_block_size=world_size,
        dcp_manager=ContextGather(),
    )
    assert context is not None
    width = -(-max(CONTEXTS) // (BLOCK * world_size))
    table = torch.randperm(width * len(CONTEXTS), generator=generator).view(len(CONTEXTS), width).int()
    rows = torch.randn(sum(CONTEXTS), LATENT + ROPE, generator=generator).to(dtype)
    slots = slot_mapping(
        torch.tensor([0, *CONTEXTS]).cumsum(0),
        torch.cat([torch.arange(n) for n in CONTEXTS]),
        table,
        block_size=BLOCK,
        world_size=world_size,
        rank=rank,
    )
    cache = torch.full((width * len(CONTEXTS), BLOCK, LATENT + ROPE), torch.nan, dtype=dtype)
    cache.view(-1, LATENT + ROPE)[slots[slots >= 0]] = rows[slots >= 0]
    prefill = SimpleNamespace(
        prefill_backend=PrefillBackend(), chunked_context=context, q_data_type=dtype, block_table=table
    )
    query = torch.randn(3 * len(CONTEXTS), HEADS, NOPE + ROPE, generator=generator).to(dtype)
    return SimpleNamespace(prefill=prefill), cache, query


def rank_main(rank: int, world_size: int, transport: str, dtype_name: str, store: str) -> None:
    os.environ["VLLM_DIST_IDENT"] = Path(store).parent.name
    os.environ[choice.SWITCH] = "auto" if transport == "verify" else transport
    dtype = DTYPES[dtype_name]
    parallel = ParallelConfig(tensor_parallel_size=world_size, decode_context_parallel_size=world_size)
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        init_distributed_environment(world_size, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(world_size, decode_context_model_parallel_size=world_size)
        generator = torch.Generator().manual_seed(0)
        projection = SimpleNamespace(
            weight=torch.randn(HEADS * (NOPE + VALUE), LATENT, generator=generator).to(dtype),
        )

        class Projection:
            weight = projection.weight

            def __call__(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
                return rows @ self.weight.T, None

        names = ("q_lora_rank", "qk_head_dim")
        dims = dict.fromkeys(names) | {
            "kv_b_proj": Projection(),
            "kv_lora_rank": LATENT,
            "qk_rope_head_dim": ROPE,
            "qk_nope_head_dim": NOPE,
            "v_head_dim": VALUE,
        }
        impl = CPUDCPMLAImpl(HEADS, LATENT + ROPE, 1.0, 1, None, None, "auto", None, "decoder", None, **dims)
        impl._use_flashinfer_concat_mla_k = False
        cpu.define_cp_gather_cache()
        attention, cache, query = metadata(rank, world_size, dtype, generator)
        context = attention.prefill.chunked_context
        assert len(context.chunks) > 2

        stock = mla.MLACommonBaseImpl._context_parallel_compute_prefill_context
        arguments = (query, cache, attention, torch.ones(1), world_size)
        wanted = stock(impl, *arguments)
        group = get_dcp_group()
        made = choice.select(
            device_group=group.device_group,
            host_group=group.cpu_group,
            device=torch.device("cpu"),
            capacity=WORKSPACE,
            latent=LATENT,
            rope=ROPE,
            cache_dtype="auto",
            model_dtype=dtype,
            ubatches=1,
        )
        assert made.transport == ("shared" if transport in ("auto", "verify") else transport)
        context.dcp_manager.prefill_kv = made
        published = hook.publishing(stock)
        if transport == "verify":
            verify.ON = True
            published(impl, *arguments)
            damage(made.source)
            try:
                published(impl, *arguments)
            except verify.PublishedRowsDiffer as error:
                assert f"rank {rank}: kv_c of context chunk 0 differs from vLLM's in row 2 of" in str(
                    error
                ), error
                return
            raise AssertionError("a damaged row was not found")
        for _ in range(2):  # two layers
            found = published(impl, *arguments)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
            torch.distributed.barrier()


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
        size, transport, dtype = case.split(":")
        with tempfile.TemporaryDirectory() as folder:
            arguments = (int(size), transport, dtype, f"{folder}/store")
            mp.start_processes(rank_main, arguments, int(size), start_method="fork")
        print(case, flush=True)
