# SPDX-License-Identifier: Apache-2.0
"""Stock's way to bring a chunk's context rows to every rank, for the two-GPU test and the benchmark.

vLLM's own gather and `reorg_kvcache` where vLLM is importable, else stand-ins of the same operations.
"""

from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from publish_world import LATENT, ROPE, PagedWorld, reorganise

try:
    import vllm
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.attention.mla_attention import reorg_kvcache

    MISSING = ""
except ImportError as error:
    MISSING = str(error)


class Inputs:
    """One rank's cache, block table and maps of one chunk."""

    def __init__(
        self,
        contexts: list[int],
        dtype: torch.dtype,
        rank: int,
        world_size: int,
        *,
        seed: int = 0,
        starts: list[int] | None = None,
        scale: float = 0.37,
        model_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        device, row_bytes = (
            torch.device("cuda", torch.cuda.current_device()),
            (LATENT + ROPE) * dtype.itemsize,
        )
        self.dtype, self.quantised = dtype, dtype.itemsize == 1
        self.model_dtype = model_dtype if self.quantised else dtype
        self.world = PagedWorld(
            contexts, world_size, row_bytes, device=device, starts=starts, ranks=[rank], seed=seed
        )
        raw = self.world.caches[rank]
        if self.quantised:
            raw[(raw & 0x7F) == 0x7F] = 0x7E  # no e4m3 NaN, whose payload nobody promises
        self.cache, self.table = raw.view(dtype), self.world.tables[rank]
        self.chunk = self.world.chunk(rank, device, tiles=self.quantised, gathered=True)
        self.scale = torch.tensor([scale], device=device)
        padded, _, begins = self.world.geometry
        self.cu_seq_lens = torch.tensor(list(accumulate(padded, initial=0)), dtype=torch.int32, device=device)
        self.token_to_seq = self.chunk.rows[1, : self.chunk.local_rows].contiguous()
        self.starts = torch.tensor(begins, dtype=torch.int32, device=device)


class Stock:
    """Gather padded rows from the paged cache (e4m3: scaled to the model's dtype), all-gather, cut, concatenate."""

    def __init__(self, group: Any) -> None:
        self.group, self.workspaces = group, {}
        self.name = (
            f"stand-ins (vLLM is not importable: {MISSING})"
            if MISSING
            else f"vLLM {vllm.__version__}: cp_gather_cache, gather_and_maybe_dequant_cache, reorg_kvcache; NCCL"
        )

    def __call__(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """kv_c [N, L] and k_pe [N, P]. Collective."""
        local, gathered = self.workspace(inputs)
        (stand_in_gather if MISSING else gather)(inputs, local)
        dist.all_gather_into_tensor(gathered, local, group=self.group)
        return (stand_in_reorganise if MISSING else reorganised)(inputs, gathered)

    def workspace(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        key = (inputs.chunk.local_rows, inputs.model_dtype)
        if key not in self.workspaces:
            ranks = dist.get_world_size(self.group)
            self.workspaces[key] = tuple(
                torch.empty(
                    n * inputs.chunk.local_rows,
                    LATENT + ROPE,
                    dtype=inputs.model_dtype,
                    device=inputs.table.device,
                )
                for n in (1, ranks)
            )
        local, gathered = self.workspaces[key]
        return local, gathered


def gather(inputs: Inputs, out: torch.Tensor) -> None:
    """vLLM's, as its `_context_parallel_compute_prefill_context` calls it."""
    if inputs.quantised:
        ops.gather_and_maybe_dequant_cache(
            src_cache=inputs.cache.view(torch.uint8),
            dst=out,
            block_table=inputs.table,
            cu_seq_lens=inputs.cu_seq_lens,
            token_to_seq=inputs.token_to_seq,
            num_tokens=inputs.chunk.local_rows,
            kv_cache_dtype="fp8",
            scale=inputs.scale,
            seq_starts=inputs.starts,
        )
    else:
        ops.cp_gather_cache(
            src_cache=inputs.cache,
            dst=out,
            block_table=inputs.table,
            cu_seq_lens=inputs.cu_seq_lens,
            batch_size=len(inputs.starts),
            seq_starts=inputs.starts,
        )


def reorganised(inputs: Inputs, gathered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kv_c, k_pe = gathered.unsqueeze(1).split([LATENT, ROPE], dim=-1)
    padded, lens, starts = inputs.world.geometry
    valid = [
        sum(min(max(0, n - start), count) for n in context)
        for count, context, start in zip(padded, lens, starts, strict=True)
    ]
    kv_c, k_pe = reorg_kvcache(
        kv_c, k_pe, padded, lens, starts,
        sum_seq_len=inputs.chunk.num_rows, max_seq_len=max(valid), toks=inputs.chunk.local_rows,
    )  # fmt: skip
    return kv_c.squeeze(1), k_pe.squeeze(1)


def stand_in_gather(inputs: Inputs, out: torch.Tensor) -> None:
    rows = inputs.chunk.local_rows
    gather_kernel[(-(-rows // 4),)](
        inputs.cache, inputs.table, inputs.chunk.rows, out, inputs.scale, rows, inputs.chunk.capacity,
        inputs.table.stride(0), BLOCK=inputs.world.block, WIDTH=LATENT + ROPE, PADDED=1024,
        SCALED=inputs.quantised,
    )  # fmt: skip


def stand_in_reorganise(inputs: Inputs, gathered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kv_c, k_pe = gathered.split([LATENT, ROPE], dim=-1)
    chunk, world_size = inputs.world.geometry, inputs.world.world_size
    return reorganise(kv_c, chunk, world_size), reorganise(k_pe, chunk, world_size)


@triton.jit
def gather_kernel(cache_ptr, table_ptr, rows_ptr, out_ptr, scale_ptr, count, map_stride, table_stride,
                  BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Rows of a paged cache -> [count, WIDTH], scaled or not."""
    row = tl.program_id(0) * 4 + tl.arange(0, 4)
    real = row < count
    request = tl.load(rows_ptr + map_stride + row, mask=real, other=0).to(tl.int64)
    position = tl.load(rows_ptr + 2 * map_stride + row, mask=real, other=0)
    block = tl.load(table_ptr + request * table_stride + position // BLOCK, mask=real, other=0).to(tl.int64)
    column = tl.arange(0, PADDED)
    mask = real[:, None] & (column < WIDTH)[None, :]
    value = tl.load(
        cache_ptr + ((block * BLOCK + position % BLOCK) * WIDTH)[:, None] + column[None, :], mask=mask
    )
    if SCALED:
        value = (value.to(tl.float32) * tl.load(scale_ptr)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * WIDTH + column[None, :], value, mask=mask)
