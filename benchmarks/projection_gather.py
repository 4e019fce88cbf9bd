# SPDX-License-Identifier: Apache-2.0
"""What a column-sharded latent projection costs and saves: its gather, and its GEMM with and without, in one run.

    torchrun --nproc-per-node 2 benchmarks/projection_gather.py --json results/projection/h200-x2.json

Kimi-K3's widths over W ranks. Device time of one call in microseconds: a CUDA graph of --layers calls, replayed
--repeats times, the median over replays of the slowest rank. Every way is compared bit by bit before it is timed, and
the peer ways again after a replay of their graph with other inputs.

    gather  nccl          all-gather of the local rows alone: rank-major, as it arrives
            nccl+restore  and put into the logical order, as the fallback does
            peer          one Triton launch, in the logical order (kimi_k3_serve.projection)
    pair    the same for two projections, BF16 [rows, 3584] and FP32 [rows, 896]; nccl: two all-gathers
    gemm    x [rows, 7168] times the latent weight (2,112 columns), alone or with the output gate's 12,288 / W beside it
            replicated    every rank computes all latent columns
            sharded       every rank computes 1/W of them, and the peer gather; "fused" is both in one launch, taking
                          so many inputs at a time
            Each layer of the graph has weights of its own, so that they come from memory, not from the cache. "dsv3" is
            vLLM's low-latency GEMM, left out where vLLM is not installed or does not take the shape; else cuBLAS.

The bar: at one row, peer at least twice as fast as NCCL's all-gather alone.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from kimi_k3_serve.projection import shard
from kimi_k3_serve.projection.exchange import Geometry, PeerGather, PeerProjection
from kimi_k3_serve.symmetric import connect

BAR = 2.0
GATE = 96 * 128
STEPS = (512, 1024)
PAIR = ((3584, torch.bfloat16), (896, torch.float32))
Call = Callable[[int], Any]
"""One call of a layer, whose number it gets."""


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8], help="at most 8")
    options.add_argument("--layers", type=int, default=24, help="in a graph")
    options.add_argument("--repeats", type=int, default=100)
    options.add_argument("--json", type=Path)
    args = options.parse_args()

    group, device = start()
    rank, world = dist.get_rank(), dist.get_world_size()
    bench = Bench(group, device, args.layers, args.repeats)
    for section in (bench.merged, bench.pair, bench.gemm):
        for rows in args.rows:
            section(rows)
        if rank == 0:
            facts = report(bench.table, world, device, args)
    if rank == 0:
        print(json.dumps(facts))
    dist.destroy_process_group()


def start() -> tuple[Any, torch.device]:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # no path here uses it
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return dist.group.WORLD, device


def report(
    table: list[dict[str, Any]], world: int, device: torch.device, args: argparse.Namespace
) -> dict[str, Any]:
    """Write what has been measured so far; the facts about the run."""
    at_one = {row["way"]: row["us"] for row in table if row["section"] == "gather" and row["rows"] == 1}
    facts: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(device),
        "world_size": world,
        "layers": args.layers,
        "repeats": args.repeats,
        "torch": torch.__version__,
        "saved_gib_whole_model": round(shard.saved_gib(world), 4),
    }
    if at_one:
        ratio = at_one["nccl"] / at_one["peer"]
        facts["bar"] = {"required": BAR, "ratio": round(ratio, 2), "met": ratio >= BAR}
    if args.json:
        args.json.write_text(json.dumps({**facts, "rows": table}, indent=1) + "\n")
    return facts


class Bench:
    """Measures on all ranks; rank 0's table is the result."""

    def __init__(self, group: Any, device: torch.device, layers: int, repeats: int) -> None:
        self.group, self.device, self.layers, self.repeats = group, device, layers, repeats
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.local = shard.local_widths((shard.Q_A, shard.KV_A), self.world)
        self.peer = self.build(*(2 * width for width in self.local))
        self.peer_pair = self.build(*(width // self.world * dtype.itemsize for width, dtype in PAIR))
        self.fused = {step: self.build_fused(step) for step in STEPS}
        self.dsv3 = dsv3()
        self.weights: dict[int, list[torch.Tensor]] = {}
        self.table: list[dict[str, Any]] = []

    def build(self, first: int, second: int) -> PeerGather:
        geometry = Geometry(first, second)
        nbytes = geometry.nbytes(self.world)
        return PeerGather(connect(nbytes, self.group, self.device, ("peer",)).get(), geometry)

    def build_fused(self, step: int) -> PeerProjection:
        first, second = self.local
        geometry = Geometry(2 * first, 2 * second)
        nbytes = geometry.nbytes(self.world)
        region = connect(nbytes, self.group, self.device, ("peer",)).get()
        return PeerProjection(region, geometry, shard.HIDDEN, step=step)

    def bits(self, rows: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
        """[rows, width] of arbitrary bits, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        made = torch.randint(-(2**31), 2**31, (rows, width), generator=generator).to(integer)
        return made.view(dtype).to(self.device)

    def nccl(self, local: torch.Tensor) -> torch.Tensor:
        gathered = local.new_empty(self.world * local.shape[0], local.shape[1])
        dist.all_gather_into_tensor(gathered, local, group=self.group)
        return gathered.view(self.world, *local.shape)

    def merged(self, rows: int) -> None:
        width = shard.Q_A + shard.KV_A
        logical = self.bits(rows, width, torch.bfloat16, seed=rows)
        local = self.columns(logical)

        def restored(_: int) -> torch.Tensor:
            return shard.restore(self.nccl(local), self.local)

        ways: dict[str, Call] = {
            "nccl": lambda _: self.nccl(local),
            "nccl+restore": restored,
            "peer": lambda _: self.peer.merged(local),
        }
        assert same(restored(0), logical) and same(ways["peer"](0), logical), "the gathers differ"
        for name, call in ways.items():
            results = self.time("gather", rows, name, call)
            if name != "nccl":
                local.copy_(self.columns(again := self.bits(rows, width, torch.bfloat16, seed=100 + rows)))
                self.replay()
                assert same(results[-1], again), f"{name} differs in a graph"
                local.copy_(self.columns(logical))

    def columns(self, logical: torch.Tensor) -> torch.Tensor:
        """This rank's columns of each part, side by side."""
        parts = logical.split([shard.Q_A, shard.KV_A], dim=1)
        return torch.cat([part.chunk(self.world, dim=1)[self.rank] for part in parts], dim=1)

    def pair(self, rows: int) -> None:
        whole = [self.bits(rows, width, dtype, seed=200 + rows) for width, dtype in PAIR]
        own = [part.chunk(self.world, dim=1)[self.rank].contiguous() for part in whole]

        def restored(_: int) -> list[torch.Tensor]:
            return [shard.restore(self.nccl(part), part.shape[1:]) for part in own]

        ways: dict[str, Call] = {
            "nccl": lambda _: [self.nccl(part) for part in own],
            "nccl+restore": restored,
            "peer": lambda _: self.peer_pair.pair(own[0], own[1]),
        }
        for name in ("nccl+restore", "peer"):
            for found, expected in zip(ways[name](0), whole, strict=True):
                assert same(found, expected), f"{name} differs"
        for name, call in ways.items():
            self.time("pair", rows, name, call)

    def gemm(self, rows: int) -> None:
        latent, own, gate = shard.Q_A + shard.KV_A, sum(self.local), GATE // self.world
        generator = torch.Generator(self.device).manual_seed(rows)  # the same rows on every rank
        x = torch.randn(rows, shard.HIDDEN, generator=generator, device=self.device).bfloat16()
        for step, fused in self.fused.items():
            weights = self.weight(own)
            found = fused.project(x, weights[0])
            expected = shard.restore(self.nccl(x.float() @ weights[0].float().t()), self.local)
            assert torch.allclose(found.float(), expected, rtol=2e-2, atol=2e-2), f"fused {step} differs"
            self.time("gemm", rows, f"latent sharded fused {step}", partial(project, fused, x, weights))
        for beside, label in ((0, "latent"), (gate, "latent+gate")):
            for gemm in ("cublas", "dsv3"):
                multiply = self.multiplier(gemm)
                for columns, name in ((latent + beside, "replicated"), (own + beside, "sharded")):
                    weights = self.weight(columns)
                    if multiply is None or not works(multiply, x, weights[0]):
                        continue

                    def call(
                        layer: int,
                        multiply: Any = multiply,
                        weights: Any = weights,
                        name: str = name,
                    ) -> torch.Tensor:
                        y: torch.Tensor = multiply(x, weights[layer])
                        return y if name == "replicated" else self.peer.merged(y[:, :own])

                    self.time("gemm", rows, f"{label} {name} {gemm}", call)

    def weight(self, columns: int) -> list[torch.Tensor]:
        """[layers] weights [columns, 7168] that give outputs of unit scale."""
        if columns not in self.weights:
            shape = (columns, shard.HIDDEN)
            self.weights[columns] = [
                torch.randn(shape, device=self.device, dtype=torch.bfloat16) / 85 for _ in range(self.layers)
            ]
        return self.weights[columns]

    def multiplier(self, gemm: str) -> Any:
        return F.linear if gemm == "cublas" else self.dsv3

    def time(self, section: str, rows: int, way: str, call: Call) -> list[Any]:
        """Time a way and note it; what its last replay gave, a result a layer."""
        microseconds, results, self.replay = time_in_graph(call, self.layers, self.repeats, self.group)
        self.table.append({"section": section, "rows": rows, "way": way, "us": round(microseconds, 2)})
        if self.rank == 0:
            print(f"{section:7s} {rows} rows  {way:32s} {microseconds:8.2f} us", flush=True)
        return results


def project(fused: PeerProjection, x: torch.Tensor, weights: list[torch.Tensor], layer: int) -> torch.Tensor:
    return fused.project(x, weights[layer])


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit by bit: NaN equals itself."""
    return found.shape == expected.shape and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def dsv3() -> Any:
    """vLLM's low-latency GEMM for a few rows, or None."""
    if importlib.util.find_spec("vllm") is None:
        return None
    from vllm import _custom_ops as ops

    if not hasattr(torch.ops._C, "dsv3_fused_a_gemm"):
        return None

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(x.shape[0], weight.shape[0])
        ops.dsv3_fused_a_gemm(out, x, weight.t(), enable_pdl=True)
        return out

    return multiply


def works(multiply: Any, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a GEMM takes this shape and gives what it should."""
    try:
        found = multiply(x, weight)
    except RuntimeError:
        return False
    return torch.allclose(found.float(), x.float() @ weight.float().t(), rtol=2e-2, atol=2e-2)


def time_in_graph(
    call: Call, layers: int, repeats: int, group: Any
) -> tuple[float, list[Any], Callable[[], None]]:
    """Median device time of one call in microseconds, of the slowest rank; the graph's results; and its replay."""
    for layer in range(min(layers, 3)):
        call(layer)
    torch.cuda.synchronize()
    dist.barrier(group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(layer) for layer in range(layers)]

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    replay()
    times = []
    for _ in range(repeats):
        dist.barrier(group)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / layers)
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return statistics.median(slowest.tolist()), results, replay


if __name__ == "__main__":
    main()
