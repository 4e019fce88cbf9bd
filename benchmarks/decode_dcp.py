# SPDX-License-Identifier: Apache-2.0
"""What one layer's decode collectives cost under DCP: stock against peer, inside CUDA graphs, in one run.

    torchrun --nproc-per-node 2 benchmarks/decode_dcp.py --json results/decode-dcp-h200-x2.json
    python benchmarks/decode_dcp.py            # one GPU, W = 1: the kernels' own cost, nothing crosses NVLink

Kimi-K3's geometry: 96 heads over W ranks, queries of 576 and outputs of 512 BF16 values a head. For each batch, the
device time a layer in microseconds: a graph of --layers layers, replayed --repeats times, the median over replays of
the slowest rank. Every way is checked against a float64 merge before it is timed.

    gather   nccl         all-gather of the queries, then heads made rank-major, as vLLM's group does
             peer         one Triton launch (kimi_k3_serve.attention.peer_kernels)
    both     nccl+ag_rs   and: all-gather of LSEs, correction, reduce-scatter   (vLLM's cp_lse_ag_out_rs)
             nccl+a2a     and: pack, all-to-all over NCCL, merge                (vLLM's dcp_a2a_lse_reduce)
             nccl+direct  and: vLLM's direct all-to-all over peer memory, its default inside one node
             peer         gather and merge, one Triton launch each

The three stock merges need vLLM; without it they are left out and the report says so. A gather alone is timed with
unchanging inputs: the protocol wants a merge between two gathers only so that new data cannot overtake old.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from kimi_k3_serve.attention.peer_exchange import Geometry, PeerExchange
from kimi_k3_serve.symmetric import LocalRegion, allocate

LATENT, ROPE = 512, 64
Call = Callable[[], torch.Tensor]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--heads", type=int, default=96, help="of the model, over all ranks")
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    options.add_argument("--layers", type=int, default=24, help="in a graph")
    options.add_argument("--repeats", type=int, default=50)
    options.add_argument("--json", type=Path)
    args = options.parse_args()

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    group = stock = None
    if world > 1:
        group, stock = start(world, rank, device)
    heads = args.heads // world
    geometry = Geometry(heads, LATENT, ROPE, torch.bfloat16, torch.bfloat16, max_tokens=max(args.batches))
    if group is None:
        region: Any = LocalRegion.group(1, geometry.nbytes(1), device)[0]
    else:
        region = allocate("peer", geometry.nbytes(world), group, device, host_group=group)
    peer = PeerExchange(region, geometry)

    table = []
    for batch in args.batches:
        for name, call in ways(batch, heads, rank, world, device, peer, group, stock).items():
            microseconds = time_a_layer(call, args.layers, args.repeats, group)
            table.append({"batch": batch, "way": name, "us": round(microseconds, 2)})
            if rank == 0:
                print(f"batch {batch:3d}  {name:20s} {microseconds:8.2f} us", flush=True)
    if rank == 0 and args.json:
        facts = {
            "gpu": torch.cuda.get_device_name(device),
            "world_size": world,
            "heads": args.heads,
            "layers": args.layers,
            "repeats": args.repeats,
            "torch": torch.__version__,
            "vllm": None if stock is None else stock["version"],
        }
        args.json.write_text(json.dumps({**facts, "rows": table}, indent=1) + "\n")
    if group is not None:
        dist.destroy_process_group()


def start(world: int, rank: int, device: torch.device) -> tuple[Any, dict[str, Any] | None]:
    """The NCCL group of all ranks, and vLLM's collectives over it where vLLM is installed."""
    if importlib.util.find_spec("vllm") is None:
        if rank == 0:
            print("vLLM is not installed: its merges are left out")
        dist.init_process_group("nccl", device_id=device)
        return dist.group.WORLD, None
    import vllm
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import get_dcp_group, init_distributed_environment, initialize_model_parallel
    from vllm.v1.attention.ops import dcp

    parallel = ParallelConfig(tensor_parallel_size=world, decode_context_parallel_size=world)
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        init_distributed_environment(world, rank, "env://", device.index, "nccl")
        initialize_model_parallel(world, decode_context_model_parallel_size=world)
    return get_dcp_group().device_group, {"dcp": dcp, "group": get_dcp_group(), "version": vllm.__version__}


def ways(
    batch: int,
    heads: int,
    rank: int,
    world: int,
    device: torch.device,
    peer: PeerExchange,
    group: Any,
    stock: dict[str, Any] | None,
) -> dict[str, Call]:
    """Name -> one layer's collectives, each of which has just given the right answer."""
    generator = torch.Generator(device).manual_seed(batch)
    queries = torch.randn(batch, world * heads, LATENT + ROPE, generator=generator, device=device).bfloat16()
    outputs = torch.randn(world, batch, world * heads, LATENT, generator=generator, device=device).bfloat16()
    lses = 3 * torch.randn(world, batch, world * heads, generator=generator, device=device)
    own = slice(rank * heads, (rank + 1) * heads)
    query = queries[:, own].contiguous()
    partial, lse = outputs[rank], lses[rank]
    lens = torch.ones(batch, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def peer_gather() -> torch.Tensor:
        return peer.gather(query[..., :LATENT], query[..., LATENT:])

    def peer_both() -> torch.Tensor:
        peer_gather()
        return peer.merge(partial, lse, lens, starts)

    def nccl_gather() -> torch.Tensor:
        gathered = query.new_empty(world, *query.shape)
        dist.all_gather_into_tensor(gathered, query, group=group)
        return gathered.movedim(0, 1).reshape(batch, world * heads, LATENT + ROPE)

    gathers: dict[str, Call] = {"gather peer": peer_gather}
    boths: dict[str, Call] = {"both peer": peer_both}
    if group is not None:
        gathers["gather nccl"] = nccl_gather
    if stock is not None:
        dcp, vllm_group = stock["dcp"], stock["group"]
        masks = {"seq_lens": lens, "query_start_loc": starts}
        direct = dcp.DirectDCPA2AWorkspace(
            group, device, peer.geometry.max_tokens, heads, LATENT, partial.dtype
        )

        def nccl_then(merge: Call) -> Call:
            def both() -> torch.Tensor:
                vllm_group.all_gather(query, dim=1)
                return merge()

            return both

        # The correction of ag_rs works in place: right once, then the same work on ever smaller values.
        scratch = partial.clone()
        gathers["gather nccl (vllm)"] = lambda: vllm_group.all_gather(query, dim=1)
        boths["both nccl+ag_rs"] = nccl_then(lambda: dcp.cp_lse_ag_out_rs(scratch, lse, vllm_group, **masks))
        boths["both nccl+a2a"] = nccl_then(lambda: dcp.dcp_a2a_lse_reduce(partial, lse, vllm_group, **masks))
        boths["both nccl+direct"] = nccl_then(lambda: direct.lse_reduce(partial, lse, True, lens, starts))

    for name, gather in gathers.items():
        assert torch.equal(gather(), queries), f"{name} gives other queries"
        peer_both()  # between two gathers stands a merge
    weights = torch.softmax(lses[:, :, own].double(), 0).unsqueeze(-1)
    expected = (weights * outputs[:, :, own].double()).sum(0)
    for name, both in boths.items():
        error = (both().double() - expected).abs().max().item()
        assert error < 0.05, f"{name} is off by {error}"
    return gathers | boths


def time_a_layer(call: Call, layers: int, repeats: int, group: Any) -> float:
    """Median device time of one call in microseconds, of the slowest rank, in a CUDA graph of `layers` calls."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(layers):
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        if group is not None:
            dist.barrier(group)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end) * 1000 / layers, device="cuda")
        if group is not None:
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        times.append(slowest.item())
    return statistics.median(times)


if __name__ == "__main__":
    main()
