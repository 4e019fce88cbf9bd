# SPDX-License-Identifier: Apache-2.0
"""What it costs to bring one chunk's context rows to every rank: stock, NCCL fallback, peer, and the copy floor.

    torchrun --nproc-per-node 2 benchmarks/publish.py --json results/publish-h200-x2.json
    python benchmarks/publish.py            # one GPU, W = 1: the kernels' own cost, nothing crosses NVLink

Needs PyTorch and Triton only. For each chunk and KV dtype, device time of one call, the median of --repeats on the
slowest rank, microseconds:

    stock      gather padded rows from the paged cache (fp8: scaled to bfloat16), all-gather, cut and concatenate
    nccl       the collective fallback: all-gather of the cached bytes, one indexed copy a plane
    peer       the publication: publish and wait (fp8: and scale, as its consumer does)
    floor      a contiguous copy of this rank's rows to each other rank (W = 1: to itself), no rendezvous

The columns "dev." are the same with the host kept ahead: device time alone, without waiting for launches.
Ranks are aligned by what they run: every way but the floor is itself a rendezvous.
"""

import argparse
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
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from publish_world import LATENT, ROPE, PagedWorld, reorganise

from kimi_k3_serve.publish.collective import Collective
from kimi_k3_serve.publish.layout import SLOTS, Layout
from kimi_k3_serve.publish.publisher import Publisher, dequantise
from kimi_k3_serve.symmetric import LocalRegion, allocate

CHUNKS = {
    "1 x 65536": [65536],
    "16 x 4096": [4096] * 16,
    "64 x 1000": [1000] * 64,
    "5 mixed": [100, 8192, 20000, 30000, 7244],
}
CAPACITY = 65536
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@triton.jit
def gather_kernel(cache_ptr, table_ptr, rows_ptr, out_ptr, scale_ptr, count, map_stride, table_stride,
                  BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, SCALED: tl.constexpr):  # fmt: skip
    """Rows of a paged cache -> [count, WIDTH], scaled or not: stands for vLLM's compiled gather."""
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


COLUMNS = ("stock_us", "nccl_us", "peer_us", "floor_us", "stock_device_us", "peer_device_us")


class Case:
    """One chunk of one dtype: its caches, and the ways to bring it over."""

    def __init__(
        self, contexts: list[int], dtype: torch.dtype, rank: int, world_size: int, group: Any
    ) -> None:
        self.dtype, self.rank, self.world_size, self.group = dtype, rank, world_size, group
        self.device = torch.device("cuda", torch.cuda.current_device())
        row_bytes = (LATENT + ROPE) * dtype.itemsize
        self.world = PagedWorld(contexts, world_size, row_bytes, device=self.device, ranks=[rank])
        self.chunk = self.world.chunk(rank, self.device, gathered=True)
        self.cache = self.world.caches[rank].view(dtype)
        self.table = self.world.tables[rank]
        self.scale = torch.tensor([0.37], device=self.device)
        local, width = self.chunk.local_rows, LATENT + ROPE
        self.local = torch.empty(local, width, dtype=torch.bfloat16, device=self.device)
        self.gathered = torch.empty(world_size * local, width, dtype=torch.bfloat16, device=self.device)
        self.slot = 0

    def stock(self) -> tuple[torch.Tensor, torch.Tensor]:
        count = self.chunk.local_rows
        gather_kernel[(-(-count // 4),)](
            self.cache, self.table, self.chunk.rows, self.local, self.scale, count, self.chunk.rows.shape[1],
            self.table.stride(0), BLOCK=self.world.block, WIDTH=LATENT + ROPE, PADDED=1024,
            SCALED=self.dtype.itemsize == 1,
        )  # fmt: skip
        dist.all_gather_into_tensor(self.gathered, self.local, group=self.group)
        kv_c, k_pe = self.gathered.split([LATENT, ROPE], dim=-1)
        chunk = self.world.geometry
        return reorganise(kv_c, chunk, self.world_size), reorganise(k_pe, chunk, self.world_size)

    def through(self, source: Any) -> tuple[torch.Tensor, torch.Tensor]:
        planes: tuple[torch.Tensor, torch.Tensor] = source.gather(
            self.cache, self.table, self.chunk, slot=self.slot
        )
        self.slot = (self.slot + 1) % SLOTS
        if self.dtype.itemsize == 1:
            planes = dequantise(*planes, self.scale, torch.bfloat16)
        return planes

    def floor(self, peers: list[torch.Tensor]) -> Callable[[], None]:
        nbytes = self.chunk.local_rows * (LATENT + ROPE) * self.dtype.itemsize
        source = torch.empty(nbytes, dtype=torch.uint8, device=self.device)

        def copy() -> None:
            for peer in peers:
                peer[:nbytes].copy_(source)

        return copy


AHEAD_CYCLES = 8_000_000  # about 4 ms: longer than any way's host time


def median_us(
    work: Callable[[], object], repeats: int, rank_device: torch.device, *, ahead: bool = False
) -> float:
    """Median time between events around `work`, the slowest rank's. Collective.

    Without `ahead` a slow host shows: the device waits for launches. With it the device is kept busy until the
    host has enqueued everything, as in an engine whose host runs ahead: what is left is device time.
    """
    for _ in range(10):
        work()
    torch.cuda.synchronize()
    dist.barrier()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)
    ]
    for begin, end in marks:
        if ahead:
            torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    mine = statistics.median(begin.elapsed_time(end) for begin, end in marks) * 1e3
    slowest = torch.tensor([mine], device=rank_device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return round(float(slowest), 1)


def measure(args: argparse.Namespace, rank: int, world_size: int, host_group: Any) -> list[dict[str, Any]]:
    device = torch.device("cuda", torch.cuda.current_device())
    group, rows = dist.group.WORLD, []
    for dtype_name, dtype in DTYPES.items():
        layout = Layout(world_size, CAPACITY, LATENT * dtype.itemsize, ROPE * dtype.itemsize)
        region: Any = (
            LocalRegion.group(1, layout.nbytes, device)[0]
            if world_size == 1
            else allocate("peer", layout.nbytes, group, device, host_group=host_group)
        )
        publisher = Publisher(region, layout, dtype, transport="peer", implementation="triton")
        collective = Collective(group, dtype, LATENT)
        others = [peer for i, peer in enumerate(region.peers) if i != rank] or list(region.peers)
        for name, contexts in CHUNKS.items():
            case = Case(contexts, dtype, rank, world_size, group)
            torch.cuda.synchronize()
            dist.barrier()
            for wanted, found, other in zip(
                case.stock(), case.through(publisher), case.through(collective), strict=True
            ):
                for planes in (found, other):
                    assert torch.equal(planes.view(torch.int16), wanted.view(torch.int16)), (name, dtype_name)
            row: dict[str, Any] = {
                "chunk": name,
                "kv": dtype_name,
                "stock_us": median_us(case.stock, args.repeats, device),
                "nccl_us": median_us(partial(case.through, collective), args.repeats, device),
                "peer_us": median_us(partial(case.through, publisher), args.repeats, device),
            }
            # Into slot 1's planes, whose rows nobody compares again.
            row["floor_us"] = median_us(case.floor(scratch(region, layout, others)), args.repeats, device)
            ahead = partial(median_us, repeats=args.repeats, rank_device=device, ahead=True)
            row["stock_device_us"], row["peer_device_us"] = (
                ahead(case.stock),
                ahead(partial(case.through, publisher)),
            )
            row["stock_over_peer"] = round(row["stock_us"] / row["peer_us"], 2)
            row["peer_over_floor"] = round(row["peer_us"] / row["floor_us"], 3)
            rows.append(row)
            if rank == 0:
                print(
                    f"{name:<10} {dtype_name:<5}"
                    + "".join(f"{row[key]:>12.1f}" for key in COLUMNS)
                    + f"{row['stock_over_peer']:>12.2f}{row['peer_over_floor']:>12.3f}",
                    flush=True,
                )
    return rows


def scratch(region: Any, layout: Layout, peers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Slot 1's planes on the given ranks, behind its signals."""
    begin = layout.slot_offset(0, 1) + layout.kv_c_offset
    return [peer[begin:] for peer in peers]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: no GPU here; run this where torch.cuda.is_available()")
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
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    host_group = dist.new_group(backend="gloo")
    if rank == 0:
        print(f"W = {world_size}, {torch.cuda.get_device_name()}, PyTorch {torch.__version__}, microseconds")
        titles = ("stock", "nccl", "peer", "floor", "stock dev.", "peer dev.", "stock/peer", "peer/floor")
        print(f"{'chunk':<10} {'kv':<5}" + "".join(f"{title:>12}" for title in titles))
    rows = measure(args, rank, world_size, host_group)
    if rank == 0 and args.json:
        facts = {
            "world_size": world_size,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "repeats": args.repeats,
            "command": " ".join(sys.argv),
            "rows": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
