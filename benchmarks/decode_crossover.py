# SPDX-License-Identifier: Apache-2.0
"""From which context on a decode step's attention is faster under DCP than under TP: one MLA layer inside a CUDA graph.

    torchrun --nproc-per-node 2 benchmarks/decode_crossover.py --json results/decode-h200-x2/crossover.json

Kimi-K3's geometry: 96 heads over W ranks, cache rows of 576 BF16 values. For each batch and context, microseconds a
layer of the slowest rank, the median over replays:

    tp     vLLM's FLASH_ATTN_MLA kernel, this rank's heads over the whole context
    dcp    peer gather of the queries, the same kernel with all heads over this rank's W-th of the context, peer merge

Layers read caches of their own in turn, as a model's do, so that none is found in the L2 cache that is not in a model.
The rest of a layer is the same in both. The crossover of a batch is where a line between two measured contexts has
the two ways equal; None where one of them is faster at all. Needs vLLM on two or more Hopper GPUs.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from decode_dcp import LATENT, ROPE, largest, start, time_a_layer

from kimi_k3_serve.attention.peer_exchange import DEFAULT_TIMEOUT_S, Geometry, PeerExchange
from kimi_k3_serve.symmetric import connect

PAGE = 64  # rows
SPLITS = 32  # vLLM's bound inside CUDA graphs
SCALE = 192**-0.5
ERROR = 0.02  # largest accepted, of outputs of size 1 and less


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--heads", type=int, default=96, help="of the model, over all ranks")
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    options.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 4096, 16384, 32768, 65536, 122880, 196608]
    )
    options.add_argument("--caches", type=int, default=8, help="layers with a cache of their own")
    options.add_argument("--layers", type=int, default=24, help="in a graph")
    options.add_argument("--repeats", type=int, default=20)
    options.add_argument("--json", type=Path)
    args = options.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if any(context % (PAGE * world) for context in args.contexts):
        sys.exit(
            f"--contexts must be multiples of {PAGE * world}: pages of {PAGE} rows on each of {world} ranks"
        )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    group, stock = start(world, rank, device)
    if stock is None:
        sys.exit("vLLM is not installed: its attention kernel is what is timed")
    geometry = Geometry(args.heads // world, LATENT, ROPE, torch.bfloat16, torch.bfloat16, max(args.batches))
    region = connect(geometry.nbytes(world), group, device, ("peer",)).get()
    peer = PeerExchange(region, geometry, timeout_s=DEFAULT_TIMEOUT_S)

    rows: list[dict[str, Any]] = []
    for batch, context in itertools.product(args.batches, args.contexts):
        calls, error = ways(batch, context, args.caches, rank, world, peer, group)
        assert error <= ERROR, f"batch {batch}, context {context}: off by {error:.3g}"
        times = {way: time_a_layer(call, args.layers, args.repeats, group)[1] for way, call in calls.items()}
        rows.append({"batch": batch, "context": context, "error": error} | times)
        if rank == 0:
            both = ", ".join(f"{way} {us:7.2f} us" for way, us in times.items())
            print(f"batch {batch:2d}  context {context:7d}  {both}", flush=True)
    crossovers = {
        str(batch): crossover([row for row in rows if row["batch"] == batch]) for batch in args.batches
    }
    if rank == 0:
        print(f"crossover, tokens of context a request, by batch: {crossovers}")
        if args.json:
            facts = {"gpu": torch.cuda.get_device_name(device), "world_size": world, "heads": args.heads}
            facts |= {"torch": torch.__version__, "vllm": stock["version"]}
            args.json.write_text(
                json.dumps({**facts, "crossover": crossovers, "rows": rows}, indent=1) + "\n"
            )
    dist.destroy_process_group()


def ways(
    batch: int, context: int, caches: int, rank: int, world: int, peer: PeerExchange, group: Any
) -> tuple[dict[str, Any], float]:
    """One layer's attention either way, each call with the next cache; and how far the two are apart on any rank."""
    heads = peer.geometry.heads
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator(device).manual_seed(context)
    shape = (caches, batch, context, LATENT + ROPE)
    whole = torch.empty(shape, dtype=torch.bfloat16, device=device)
    for cache in whole:  # the same on every rank
        cache.normal_(generator=generator)
    shard = whole[:, :, rank::world].contiguous()
    queries = torch.randn(batch, world * heads, LATENT + ROPE, generator=generator, device=device).bfloat16()
    own = queries[:, rank * heads : (rank + 1) * heads].contiguous()
    nope, rope = own[..., :LATENT], own[..., LATENT:]
    lens = torch.full((batch,), context // world, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    alone = attention(whole, heads, 1, 0)
    sharded = attention(shard, world * heads, world, rank)
    turns = {"tp": itertools.cycle(range(caches)), "dcp": itertools.cycle(range(caches))}

    def tp() -> torch.Tensor:
        output: torch.Tensor = alone(next(turns["tp"]), rope, nope)[0]
        return output

    def dcp() -> torch.Tensor:
        gathered = peer.gather(nope, rope)
        output, lse = sharded(next(turns["dcp"]), gathered[..., LATENT:], gathered[..., :LATENT])
        return peer.merge(output, lse.transpose(0, 1), lens, starts)

    return {"tp": tp, "dcp": dcp}, largest(tp().double() - dcp().double(), group)


def attention(caches: torch.Tensor, heads: int, world: int, rank: int) -> Any:
    """vLLM's FLASH_ATTN_MLA decode over one rank's caches [N, B, rows, 576]: (cache, rope, nope) -> output, LSE."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata

    _, batch, rows, _ = caches.shape
    starts = torch.arange(batch + 1, dtype=torch.int32, device=caches.device)
    used = torch.full((batch,), rows, dtype=torch.int32, device=caches.device)
    pages = torch.arange(batch * rows // PAGE, dtype=torch.int32, device=caches.device).view(batch, -1)
    schedule = get_scheduler_metadata(
        batch_size=batch,
        max_seqlen_q=1,
        max_seqlen_k=rows,
        num_heads_q=heads,
        num_heads_kv=1,
        headdim=ROPE,
        cache_seqlens=used,
        qkv_dtype=torch.bfloat16,
        headdim_v=LATENT,
        page_size=PAGE,
        cu_seqlens_q=starts,
        causal=True,
        num_splits=SPLITS,
    )
    attend = partial(
        flash_attn_varlen_func,
        max_seqlen_q=1,
        cu_seqlens_q=starts,
        max_seqlen_k=rows,
        seqused_k=used,
        block_table=pages,
        softmax_scale=SCALE,
        causal=True,
        return_softmax_lse=True,
        fa_version=3,
        scheduler_metadata=schedule,
        num_splits=SPLITS,
        cp_world_size=world,
        cp_rank=rank,
        cp_tot_seqused_k=used * world if world > 1 else None,
    )

    def call(index: int, rope: torch.Tensor, nope: torch.Tensor) -> Any:
        cache = caches[index].view(-1, PAGE, 1, LATENT + ROPE)
        return attend(q=rope, k=cache[..., LATENT:], v=cache[..., :LATENT], q_v=nope)

    return call


def crossover(rows: Sequence[dict[str, Any]]) -> int | None:
    """Context from which on `dcp` is not slower than `tp`, by a line between two neighbours."""
    for left, right in itertools.pairwise(sorted(rows, key=lambda row: row["context"])):
        behind, ahead = left["dcp"] - left["tp"], right["tp"] - right["dcp"]
        if behind > 0 and ahead >= 0:
            share = behind / (behind + ahead)
            return int(left["context"] + share * (right["context"] - left["context"]))
    return None


if __name__ == "__main__":
    main()
