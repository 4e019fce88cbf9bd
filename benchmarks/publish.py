# SPDX-License-Identifier: Apache-2.0
"""What it costs to bring one chunk's context rows to every rank: stock, NCCL fallback, peer, and the copy floor.

    torchrun --nproc-per-node 2 benchmarks/publish.py --json results/publish/h200-x2.json    # also 4, 8
    python benchmarks/publish.py            # one GPU, W = 1: the kernels' own cost, nothing crosses NVLink

For each chunk and KV dtype the time of one call, the median of --repeats over --sets caches in turn, on the slowest
rank, microseconds:

    stock      gather padded rows from the paged cache (fp8: scaled to bfloat16), all-gather, cut and concatenate
    nccl       the collective fallback: all-gather of the cached bytes, one launch before it and one after (fp8: scaled)
    peer       the publication: publish and wait (fp8: and scale)
    floor      a contiguous copy of this rank's rows to each other rank (W = 1: to itself), no rendezvous

twice: as the host launches it, call after call; and ("dev.") with the host kept ahead and the ranks aligned, which is
device time alone. Stock is vLLM's own gather and `reorg_kvcache` where vLLM is importable, else their stand-ins; the
output says which. Rows of all ways are compared bit for bit first; a difference makes the exit status 1.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from publish_stock import Inputs, Stock
from publish_world import LATENT, ROPE

from kimi_k3_serve.publish.collective import Collective
from kimi_k3_serve.publish.layout import SLOTS, Layout
from kimi_k3_serve.publish.publisher import Publisher
from kimi_k3_serve.symmetric import Region, connect

CHUNKS = {
    "1 x 65536": [65536],
    "16 x 4096": [4096] * 16,
    "64 x 1000": [1000] * 64,
    "5 mixed": [100, 8192, 20000, 30000, 7244],
}
CAPACITY = 65536
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
WAYS = ("stock", "nccl", "peer", "floor")
AHEAD_CYCLES = 12_000_000
"""About 6 ms: longer than any way's host time."""


@dataclass(frozen=True)
class Bar:
    """What one chunk and dtype must reach: how many times the time of `peer` another way takes, or at most."""

    text: str
    chunk: str
    kv: str
    of: str
    over: str
    limit: float
    at_most: bool = False

    def reached(self, times: Mapping[str, float]) -> float:
        return round(times[self.of] / times[self.over], 3)

    def met(self, reached: float) -> bool:
        return reached <= self.limit if self.at_most else reached >= self.limit


BARS = {
    2: (
        Bar("peer at most 1.12 x floor", "1 x 65536", "bf16", "peer", "floor", 1.12, at_most=True),
        Bar("stock at least 10 x peer", "64 x 1000", "bf16", "stock", "peer", 10),
        Bar("stock at least 3.3 x peer", "1 x 65536", "fp8", "stock", "peer", 3.3),
    ),
    8: (
        Bar("stock at least 2 x peer", "1 x 65536", "bf16", "stock", "peer", 2),
        Bar("peer at most 1.15 x floor", "1 x 65536", "bf16", "peer", "floor", 1.15, at_most=True),
    ),
}
"""By world size; others have none."""


class Case:
    """One chunk of one dtype, over several caches in turn, and the ways to bring it over."""

    def __init__(self, sets: list[Inputs], stock: Stock) -> None:
        self.sets, self.path = sets, stock
        self.turn, self.slot = count(), 0

    def inputs(self) -> Inputs:
        return self.sets[next(self.turn) % len(self.sets)]

    def stock(self, inputs: Inputs | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return self.path(inputs or self.inputs())

    def through(self, source: Any, inputs: Inputs | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = inputs or self.inputs()
        self.slot = (self.slot + 1) % SLOTS
        scale = inputs.scale if inputs.dtype.itemsize == 1 else None
        rows: tuple[torch.Tensor, torch.Tensor] = source.gather(
            inputs.cache, inputs.table, inputs.chunk, slot=self.slot, scale=scale
        )
        return rows

    def floor(self, peers: list[torch.Tensor]) -> Callable[[], None]:
        nbytes = self.sets[0].chunk.local_rows * (LATENT + ROPE) * self.sets[0].dtype.itemsize
        sources = [torch.empty(nbytes, dtype=torch.uint8, device=peers[0].device) for _ in self.sets]

        def copy() -> None:
            source = sources[next(self.turn) % len(sources)]
            for peer in peers:
                peer[:nbytes].copy_(source)

        return copy


def median_us(work: Callable[[], object], repeats: int, align: Callable[[], None] | None = None) -> float:
    """Median time between events around `work`, the slowest rank's. Collective.

    Args:
        align: a rendezvous of all ranks on the device. With it the device is kept busy until the host has enqueued
            everything, as in an engine whose host runs ahead, and the ranks begin together: device time alone.
            Without it a slow host shows.
    """
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    dist.barrier()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for begin, end in marks:
        if align is not None:
            torch.cuda._sleep(AHEAD_CYCLES)
            align()
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    mine = statistics.median(begin.elapsed_time(end) for begin, end in marks) * 1e3
    slowest = torch.tensor([mine], device=torch.cuda.current_device())
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return round(float(slowest), 1)


def differing_rows(case: Case, sources: dict[str, Any]) -> dict[str, int]:
    """Rows of each way that are not stock's, over all sets and ranks."""
    found = {}
    for name, source in sources.items():
        wrong = torch.zeros(1, dtype=torch.int64, device=case.sets[0].table.device)
        for inputs in case.sets:
            for wanted, rows in zip(case.stock(inputs), case.through(source, inputs), strict=True):
                wrong += (wanted.view(torch.int16) != rows.view(torch.int16)).any(dim=1).sum()
        dist.all_reduce(wrong)
        found[name] = int(wrong)
    return found


class Ranks:
    """One rank's publisher and fallback of a dtype, and a rendezvous on the device."""

    def __init__(self, dtype: torch.dtype, rank: int, world_size: int, host_group: Any) -> None:
        device, group = torch.device("cuda", torch.cuda.current_device()), dist.group.WORLD
        layout = Layout(world_size, CAPACITY, LATENT * dtype.itemsize, ROPE * dtype.itemsize)
        self.region: Any = (
            Region.group(1, layout.nbytes, device)[0]
            if world_size == 1
            else connect(layout.nbytes, group, device, ("peer",), host_group=host_group).get()
        )
        self.publisher = Publisher(self.region, layout, dtype, transport="peer", implementation="triton")
        self.collective = Collective(group, dtype, LATENT, ROPE, implementation="triton")
        others = [peer for i, peer in enumerate(self.region.peers) if i != rank] or list(self.region.peers)
        # Slot 1's planes behind its signals, whose rows nobody compares again.
        begin = layout.slot_offset(0, 1) + layout.kv_c_offset
        self.scratch = [peer[begin:] for peer in others]

    def align(self) -> None:
        if len(self.region.peers) > 1:
            self.region.owner.barrier()


def measure(args: argparse.Namespace, rank: int, world_size: int, host_group: Any) -> list[dict[str, Any]]:
    stock, table = Stock(dist.group.WORLD), []
    if rank == 0:
        print(f"stock: {stock.name}")
        titles = [f"{way}{suffix}" for suffix in ("", " dev.") for way in WAYS]
        print(f"{'chunk':<10} {'kv':<5}" + "".join(f"{title:>11}" for title in titles))
    for dtype_name, dtype in DTYPES.items():
        ranks = Ranks(dtype, rank, world_size, host_group)
        for name, contexts in CHUNKS.items():
            sets = [Inputs(contexts, dtype, rank, world_size, seed=seed) for seed in range(args.sets)]
            case = Case(sets, stock)
            torch.cuda.synchronize()
            dist.barrier()
            different = differing_rows(case, {"peer": ranks.publisher, "nccl": ranks.collective})
            ways: dict[str, Callable[[], object]] = {
                "stock": case.stock,
                "nccl": partial(case.through, ranks.collective),
                "peer": partial(case.through, ranks.publisher),
                "floor": case.floor(ranks.scratch),
            }
            row: dict[str, Any] = {"chunk": name, "kv": dtype_name, "different_rows": different}
            row["launched_us"] = {way: median_us(work, args.repeats) for way, work in ways.items()}
            row["device_us"] = {way: median_us(work, args.repeats, ranks.align) for way, work in ways.items()}
            table.append(row)
            if rank == 0:
                values = [row[kind][way] for kind in ("launched_us", "device_us") for way in WAYS]
                note = "" if not any(different.values()) else f"  ROWS DIFFER {different}"
                print(
                    f"{name:<10} {dtype_name:<5}" + "".join(f"{v:>11.1f}" for v in values) + note, flush=True
                )
    return table


def bars(table: list[dict[str, Any]], world_size: int) -> list[dict[str, Any]]:
    """Every bar of this world size with what was reached, as launched and on the device."""
    answer = []
    for bar in BARS.get(world_size, ()):
        [row] = [row for row in table if (row["chunk"], row["kv"]) == (bar.chunk, bar.kv)]
        for kind in ("launched_us", "device_us"):
            reached = bar.reached(row[kind])
            text = f"{bar.kv} {bar.chunk}: {bar.text}"
            answer.append({"bar": text, "by": kind, "reached": reached, "met": bar.met(reached)})
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=99)
    parser.add_argument("--sets", type=int, default=3, help="caches and block tables, taken in turn")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: no GPU here; run this where torch.cuda.is_available()")
    rank, world_size, host_group = join()
    if rank == 0:
        print(f"W = {world_size}, {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, microseconds")
    table = measure(args, rank, world_size, host_group)
    verdicts = bars(table, world_size)
    if rank == 0:
        for verdict in verdicts:
            answer = "met" if verdict["met"] else "MISSED"
            print(f"{verdict['bar']}, {verdict['by']}: {verdict['reached']} {answer}")
    if rank == 0 and args.json:
        facts = {
            "world_size": world_size,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "stock": Stock(dist.group.WORLD).name,
            "repeats": args.repeats,
            "sets": args.sets,
            "command": " ".join(sys.argv),
            "rows": table,
            "bars": verdicts,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    dist.destroy_process_group()
    if any(n for row in table for n in row["different_rows"].values()):
        raise SystemExit(1)


def join() -> tuple[int, int, Any]:
    """This process's rank, the world size and a group for host objects; one rank where torchrun has set none."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    defaults = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29517",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), dist.new_group(backend="gloo")


if __name__ == "__main__":
    main()
