# SPDX-License-Identifier: Apache-2.0
"""Would publishing chunk i + 1 on a side stream, while chunk i is attended to, be worth it?

    torchrun --nproc-per-node 2 benchmarks/publish_overlap.py --json results/publish/h200-x2-overlap.json

A layer as Kimi-K3's at TP2 sees it: --chunks chunks of 65,536 context rows; of each, publication, `kv_b_proj` for 48
heads, key concatenation and attention of --queries queries (SDPA stands for vLLM's FlashAttention), at the end an
all-reduce. Milliseconds a layer, the median of --repeats on the slowest rank:

    serial      the product's order: one stream, two slots
    overlapped  publications on a side stream, one chunk ahead, three slots
    free        no publication at all: what overlap could save at best

Overlapped, a signal for chunk i no longer says that its rank has consumed chunk i - 1, since that rank may have sent it
before. It says so of chunk i - 2, because each publication waits, by an event, for this rank's own consumption of the
chunk two before; hence a third slot. As a control the same with two slots must yield wrong rows. Outputs are compared.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[1]))
from publish import CAPACITY, join
from publish_stock import Inputs
from publish_world import LATENT, ROPE

from kimi_k3_serve.publish.layout import Layout
from kimi_k3_serve.publish.publisher import Publisher
from kimi_k3_serve.symmetric import connect

HEADS, NOPE, VALUE = 48, 128, 128
DELAY = 20_000_000
"""Clock cycles by which one rank consumes late in the control: about 10 ms."""

Planes = tuple[torch.Tensor, torch.Tensor]


class Layer:
    """What consumes a chunk: projection, concatenation, attention."""

    def __init__(self, queries: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
        self.query = torch.randn(1, HEADS, queries, NOPE + ROPE, **options)
        self.kv_b = torch.randn(LATENT, HEADS * (NOPE + VALUE), **options) * LATENT**-0.5

    def __call__(self, planes: Planes) -> torch.Tensor:
        """[1, HEADS, queries, NOPE + ROPE] attention over one chunk."""
        kv_c, k_pe = planes
        projected = (kv_c @ self.kv_b).view(len(kv_c), HEADS, NOPE + VALUE)
        key = torch.cat((projected[..., :NOPE], k_pe[:, None].expand(-1, HEADS, -1)), dim=-1)
        value = torch.nn.functional.pad(projected[..., NOPE:], (0, ROPE))
        key, value = (heads.transpose(0, 1).unsqueeze(0) for heads in (key, value))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(self.query, key, value)


def serial(source: Publisher, chunks: list[Inputs], consume: Callable[[Planes], Any]) -> list[Any]:
    return [consume(gather(source, inputs, i % 2)) for i, inputs in enumerate(chunks)]


def overlapped(
    source: Publisher, chunks: list[Inputs], consume: Callable[[Planes], Any], side: torch.cuda.Stream
) -> list[Any]:
    """One chunk ahead, in as many slots as the publisher has."""
    main, slots = torch.cuda.current_stream(), source.layout.slots
    consumed: list[Any] = []
    arrived: list[tuple[Planes, Any]] = []
    side.wait_stream(main)  # behind the last layer's output collective

    def publish(i: int) -> None:
        with torch.cuda.stream(side):
            if i >= 2:
                side.wait_event(consumed[i - 2])
            planes = gather(source, chunks[i], i % slots)
            arrived.append((planes, side.record_event()))

    publish(0)
    outputs = []
    for i in range(len(chunks)):
        if i + 1 < len(chunks):
            publish(i + 1)
        planes, event = arrived[i]
        main.wait_event(event)
        outputs.append(consume(planes))
        consumed.append(main.record_event())
    return outputs


def free(copies: list[Planes], consume: Callable[[Planes], Any]) -> list[Any]:
    return [consume(planes) for planes in copies]


def gather(source: Publisher, inputs: Inputs, slot: int) -> Planes:
    return source.gather(inputs.cache, inputs.table, inputs.chunk, slot=slot)


def median_ms(layer: Callable[[], Any], repeats: int) -> float:
    """Median time of a layer and its output collective, the slowest rank's. Collective."""
    one, times = torch.ones(1, device="cuda"), []
    for repeat in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        layer()
        dist.all_reduce(one)
        end.record()
        torch.cuda.synchronize()
        if repeat >= 2:
            times.append(begin.elapsed_time(end))
    slowest = torch.tensor([statistics.median(times)], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return round(float(slowest), 3)


def wrong_rows(source: Publisher, chunks: list[Inputs], wanted: list[Planes], rank: int, side: Any) -> int:
    """Rows that differ when one rank after the other consumes late."""
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for late in range(dist.get_world_size()):

        def consume(planes: Planes, late: int = late) -> Planes:
            if rank == late:
                torch.cuda._sleep(DELAY)
            return planes[0].clone(), planes[1].clone()

        for found, rows in zip(overlapped(source, chunks, consume, side), wanted, strict=True):
            for a, b in zip(found, rows, strict=True):
                wrong += (a.view(torch.int16) != b.view(torch.int16)).any(dim=1).sum()
        dist.all_reduce(torch.ones(1, device="cuda"))
    dist.all_reduce(wrong)
    return int(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--queries", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if torch.cuda.device_count() < 2:
        raise SystemExit("error: this needs two GPUs; start it with torchrun --nproc-per-node 2")
    rank, world_size, host_group = join()
    device = torch.device("cuda", torch.cuda.current_device())

    def publisher(slots: int) -> Publisher:
        layout = Layout(world_size, CAPACITY, LATENT * 2, ROPE * 2, slots=slots)
        region = connect(layout.nbytes, dist.group.WORLD, device, ("peer",), host_group=host_group).get()
        return Publisher(region, layout, torch.bfloat16, transport="peer", implementation="triton")

    two, three, side = publisher(2), publisher(3), torch.cuda.Stream()
    chunks = [
        finite(Inputs([CAPACITY], torch.bfloat16, rank, world_size, seed=i)) for i in range(args.chunks)
    ]
    copies: list[Planes] = []
    serial(two, chunks, lambda planes: copies.append((planes[0].clone(), planes[1].clone())))
    dist.all_reduce(torch.ones(1, device="cuda"))
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "command": " ".join(sys.argv),
        "chunks": args.chunks,
        "wrong_rows_three_slots": wrong_rows(three, chunks, copies, rank, side),
        "wrong_rows_two_slots": wrong_rows(two, chunks, copies, rank, side),
        "layers": [],
    }
    for queries in args.queries:
        layer = Layer(queries)
        same = all(
            torch.equal(a, b)
            for a, b in zip(serial(two, chunks, layer), overlapped(three, chunks, layer, side), strict=True)
        )
        row: dict[str, Any] = {"queries": queries, "same_outputs": same}
        row["serial_ms"] = median_ms(partial(serial, two, chunks, layer), args.repeats)
        row["overlapped_ms"] = median_ms(partial(overlapped, three, chunks, layer, side), args.repeats)
        row["free_ms"] = median_ms(partial(free, copies, layer), args.repeats)
        facts["layers"].append(row)
        if rank == 0:
            print(json.dumps(row), flush=True)
    sound = facts["wrong_rows_three_slots"] == 0 and all(row["same_outputs"] for row in facts["layers"])
    if rank == 0:
        print(
            f"wrong rows: three slots {facts['wrong_rows_three_slots']}, two {facts['wrong_rows_two_slots']}"
        )
        if args.json:
            args.json.write_text(json.dumps(facts, indent=1) + "\n")
    dist.destroy_process_group()
    if not sound or not facts["wrong_rows_two_slots"]:
        raise SystemExit(1)


def finite(inputs: Inputs) -> Inputs:
    """Rows of about unit scale instead of random bytes, which hold infinities."""
    inputs.cache.copy_(torch.randn(inputs.cache.shape, device=inputs.cache.device, dtype=torch.float32))
    return inputs


if __name__ == "__main__":
    main()
