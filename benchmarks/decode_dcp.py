# SPDX-License-Identifier: Apache-2.0
"""What one layer's decode collectives cost under DCP: stock against peer, inside CUDA graphs, in one run.

    torchrun --nproc-per-node 2 benchmarks/decode_dcp.py --json results/decode-h200-x2/decode_dcp.json
    python benchmarks/decode_dcp.py            # one GPU, W = 1: the kernels' own cost, nothing crosses NVLink

Kimi-K3's geometry: 96 heads over W ranks, queries of 576 and outputs of 512 BF16 values a head. For each batch, in
microseconds a layer: device time of a CUDA graph of --layers layers, replayed --repeats times, the median over
replays of the slowest rank; and what the host takes to enqueue one layer without a graph. Every way is held against
float64 first, and ag_rs step by step; one that is wrong is timed but is no rival. New memory holds NaN meanwhile, so
that what nobody has written is not taken for an answer that lay there before: its error is null.

    gather   nccl         all-gather of the queries, then heads made rank-major
             vllm         the same by vLLM's group, as its MLADCPManager calls it without multicast
             peer         one Triton launch (kimi_k3_serve.attention.peer_gather)
    both     vllm+ag_rs   and: all-gather of LSEs, correction, reduce-scatter   (vLLM's cp_lse_ag_out_rs)
             vllm+a2a     and: pack, all-to-all over NCCL, merge                (vLLM's dcp_a2a_lse_reduce)
             vllm+direct  and: vLLM's direct all-to-all over peer memory, its default inside one node
             peer         gather and merge, one Triton launch each

Bars: at batch 1 to 8 the peer gather at least 2x faster than vLLM's, gather and merge at least 1.4x faster than the
fastest right stock way; at every batch never slower. Exit status 1 where one is missed. The stock ways need vLLM;
without it they are left out and no bar is judged. They get this project's cures (kimi_k3_serve/attention/cures.py);
--uncured takes vLLM as it is, where ag_rs is wrong if vLLM's NCCL wrapper is disabled (VLLM_DISABLE_PYNCCL=1).
"""

import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from kimi_k3_serve.attention.peer_exchange import DEFAULT_TIMEOUT_S, Geometry, PeerExchange
from kimi_k3_serve.symmetric import Region, connect

LATENT, ROPE = 512, 64
ERROR = 0.05  # largest accepted error of a merged output; right ways round two values of size 4 to BF16
BARS = {"gather": 2.0, "both": 1.4}
Call = Callable[[], torch.Tensor]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--heads", type=int, default=96, help="of the model, over all ranks")
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    options.add_argument("--layers", type=int, default=24, help="in a graph")
    options.add_argument("--repeats", type=int, default=50)
    options.add_argument("--uncured", action="store_true", help="vLLM's own text, without the cures")
    options.add_argument("--json", type=Path)
    args = options.parse_args()

    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    group = stock = None
    if world > 1:
        group, stock = start(world, rank, device, cured=not args.uncured)
    heads = args.heads // world
    geometry = Geometry(heads, LATENT, ROPE, torch.bfloat16, torch.bfloat16, max_tokens=max(args.batches))
    if group is None:
        region: Any = Region.group(1, geometry.nbytes(1), device)[0]
    else:
        region = connect(geometry.nbytes(world), group, device, ("peer",)).get()
    peer = PeerExchange(region, geometry, timeout_s=DEFAULT_TIMEOUT_S)

    rows = []
    for batch in args.batches:
        for name, (call, error, steps) in ways(batch, heads, rank, world, device, peer, group, stock).items():
            host, graph = time_a_layer(call, args.layers, args.repeats, group)
            row = {
                "batch": batch,
                "way": name,
                "us": round(graph, 2),
                "host_us": round(host, 1),
                "error": finite(error),
            }
            if steps:
                row["steps"] = {step: finite(size) for step, size in steps.items()}
            rows.append(row)
            if rank == 0:
                verdict = "" if error <= ERROR else f"  WRONG by {error:.3g}"
                if verdict and steps:
                    verdict += ": " + "; ".join(f"{step} off by {size:.2g}" for step, size in steps.items())
                print(
                    f"batch {batch:3d}  {name:18s} {graph:8.2f} us, host {host:7.1f} us{verdict}", flush=True
                )
    bars = list(judge(rows))
    if rank == 0:
        for bar in bars:
            print(f"{'met   ' if bar['met'] else 'MISSED'}  {bar['text']}")
        if args.json:
            facts = {
                "gpu": torch.cuda.get_device_name(device),
                "world_size": world,
                "heads": args.heads,
                "layers": args.layers,
                "repeats": args.repeats,
                "torch": torch.__version__,
                "vllm": None if stock is None else stock["version"],
                "vllm_nccl": None if stock is None else stock["vllm_nccl"],
                "cured": None if stock is None else stock["cured"],
            }
            text = json.dumps({**facts, "bars": bars, "rows": rows}, indent=1, allow_nan=False)
            args.json.write_text(text + "\n")
    if group is not None:
        dist.destroy_process_group()
    if not all(bar["met"] for bar in bars):
        sys.exit(1)


def judge(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One verdict a batch and bar: {"batch", "what", "ratio", "bar", "met", "text"}."""
    for batch in sorted({row["batch"] for row in rows}):
        right = {
            row["way"]: row["us"]
            for row in rows
            if row["batch"] == batch and row["error"] is not None and row["error"] <= ERROR
        }
        for what, fast in BARS.items():
            rivals = {way: us for way, us in right.items() if way.startswith(f"{what} vllm")}
            if not rivals:
                continue
            best = min(rivals, key=lambda way: rivals[way])
            ratio = rivals[best] / right.get(f"{what} peer", float("inf"))
            bar = fast if batch <= 8 else 1.0
            text = f"batch {batch}: {what} {ratio:.2f}x faster than {best.split()[1]} (bar {bar:g}x)"
            yield {
                "batch": batch,
                "what": what,
                "ratio": ratio,
                "bar": bar,
                "met": ratio >= bar,
                "text": text,
            }


def start(
    world: int, rank: int, device: torch.device, *, cured: bool = True
) -> tuple[Any, dict[str, Any] | None]:
    """The NCCL group of all ranks, and vLLM's collectives over it, `cured` or not, where vLLM is installed."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # no path here uses it
    if importlib.util.find_spec("vllm") is None:
        if rank == 0:
            print("vLLM is not installed: its merges are left out")
        dist.init_process_group("nccl", device_id=device)
        return dist.group.WORLD, None
    import vllm

    from kimi_k3_serve import vllm_nccl
    from kimi_k3_serve.attention import cures

    if cured:
        cures.install()
    from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import get_dcp_group, init_distributed_environment, initialize_model_parallel
    from vllm.v1.attention.ops import dcp

    parallel = ParallelConfig(tensor_parallel_size=world, decode_context_parallel_size=world)
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        init_distributed_environment(world, rank, "env://", device.index, "nccl")
        initialize_model_parallel(world, decode_context_model_parallel_size=world)
    group = get_dcp_group()
    facts = {"version": vllm.__version__, "vllm_nccl": vllm_nccl.state(), "cured": cured}
    return group.device_group, facts | {"dcp": dcp, "group": group}


def ways(
    batch: int,
    heads: int,
    rank: int,
    world: int,
    device: torch.device,
    peer: PeerExchange,
    group: Any,
    stock: dict[str, Any] | None,
) -> dict[str, tuple[Call, float, dict[str, float]]]:
    """Name -> one layer's collectives, their largest error on any rank, and that of each step of ag_rs."""
    generator = torch.Generator(device).manual_seed(batch)
    queries = torch.randn(batch, world * heads, LATENT + ROPE, generator=generator, device=device).bfloat16()
    outputs = torch.randn(world, batch, world * heads, LATENT, generator=generator, device=device).bfloat16()
    lses = 3 * torch.randn(world, batch, world * heads, generator=generator, device=device)
    own = slice(rank * heads, (rank + 1) * heads)
    query = queries[:, own].contiguous()
    partial, lse = outputs[rank].clone(), lses[rank].clone()
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

    calls: dict[str, Call] = {"gather peer": peer_gather, "both peer": peer_both}
    steps: dict[str, float] = {}
    if group is not None:
        calls["gather nccl"] = nccl_gather
    if stock is not None:
        dcp, vllm_group = stock["dcp"], stock["group"]
        masks = {"seq_lens": lens, "query_start_loc": starts}
        direct = dcp.DirectDCPA2AWorkspace(
            group, device, peer.geometry.max_tokens, heads, LATENT, partial.dtype
        )
        # The correction of ag_rs works in place: right on fresh outputs, then the same work on ever smaller values.
        scratch = partial.clone()

        def after_gather(merge: Call) -> Call:
            def both() -> torch.Tensor:
                vllm_group.all_gather(query, dim=1)
                return merge()

            return both

        calls["gather vllm"] = lambda: vllm_group.all_gather(query, dim=1)
        calls["both vllm+ag_rs"] = after_gather(
            lambda: dcp.cp_lse_ag_out_rs(scratch, lse, vllm_group, **masks)
        )
        calls["both vllm+a2a"] = after_gather(
            lambda: dcp.dcp_a2a_lse_reduce(partial, lse, vllm_group, **masks)
        )
        calls["both vllm+direct"] = after_gather(lambda: direct.lse_reduce(partial, lse, True, lens, starts))
        steps = ag_rs_steps(stock, group, partial, lse, outputs, lses, rank)

    shares = torch.softmax(lses[:, :, own].double(), 0).unsqueeze(-1)
    merged = (shares * outputs[:, :, own].double()).sum(0)
    found = {}
    for name, call in calls.items():
        truth = queries if name.startswith("gather") else merged
        with unwritten_is_nan():
            result = call()
        error = largest(result.double() - truth.double(), group)
        found[name] = (call, error, steps if name.endswith("ag_rs") else {})
    return found


def ag_rs_steps(
    stock: dict[str, Any],
    group: Any,
    partial: torch.Tensor,
    lse: torch.Tensor,
    outputs: torch.Tensor,
    lses: torch.Tensor,
    rank: int,
) -> dict[str, float]:
    """The largest error of each step of vLLM's ag_rs: gathered LSEs, correction, reduce-scatter by either NCCL."""
    dcp, vllm_group = stock["dcp"], stock["group"]
    heads = partial.shape[1] // len(outputs)
    shares = torch.softmax(lses.double(), 0).unsqueeze(-1)
    truth = shares[rank] * outputs[rank].double()
    # What a reduce-scatter of the right addends would give this rank.
    total = (shares * outputs.double()).sum(0)[:, rank * heads : (rank + 1) * heads]
    addend = truth.bfloat16()
    with unwritten_is_nan():
        gathered = vllm_group.all_gather(lse.contiguous(), dim=0).view_as(lses)
        corrected, _ = dcp.correct_attn_out(partial.clone(), gathered.clone(), rank, None)
        by_vllm = vllm_group.reduce_scatter(addend.clone(), dim=1)
        by_torch = addend.new_empty(heads, *addend[:, 0].shape)
        dist.reduce_scatter_tensor(by_torch, addend.movedim(1, 0).contiguous(), group=group)
    errors = {
        "gathered LSEs": gathered.double() - lses.double(),
        "correction": corrected.double() - truth,
        "reduce-scatter by vLLM": by_vllm.double() - total,
        "reduce-scatter by torch": by_torch.movedim(0, 1).double() - total,
    }
    return {name: largest(error, group) for name, error in errors.items()}


@contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """New memory is filled with NaN: what a collective left unwritten could else be an earlier, right result."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def largest(error: torch.Tensor, group: Any) -> float:
    """Largest magnitude on any rank; infinite where it is not a number."""
    size = error.abs().max().nan_to_num(nan=torch.inf).float()
    if group is not None:
        dist.all_reduce(size, dist.ReduceOp.MAX, group=group)
    return size.item()


def finite(error: float) -> float | None:
    """JSON has no infinity."""
    return error if math.isfinite(error) else None


def time_a_layer(call: Call, layers: int, repeats: int, group: Any) -> tuple[float, float]:
    """Microseconds a call, of the slowest rank: host time to enqueue it, and device time inside a CUDA graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(layers):
        call()
    host = (time.perf_counter() - begun) * 1e6 / layers
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
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(begin.elapsed_time(end) * 1000 / layers, device="cuda")
        if group is not None:
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        times.append(slowest.item())
    return host, statistics.median(times)


if __name__ == "__main__":
    main()
