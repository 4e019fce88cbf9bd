# SPDX-License-Identifier: Apache-2.0
"""Two ranks on two GPUs: the projection gather over peer memory against NCCL, bit by bit. Run as a script.

Prints the name of each case that held, once a rank. Needs PyTorch and Triton only.
"""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[2]))
from kimi_k3_serve.projection.exchange import MAX_ROWS, Geometry, PeerProjection
from kimi_k3_serve.projection.gather import Choice, LatentGather, select, select_pair
from kimi_k3_serve.projection.shard import HIDDEN, KV_A, Q_A, local_widths, restore
from kimi_k3_serve.symmetric import connect

W = 2
WIDTHS = (Q_A, KV_A)
BITS = {2: torch.int16, 4: torch.int32}
DELAY = 2_000_000  # clock cycles, about a millisecond


def group_of(rank: int) -> Any:
    """What vLLM's coordinator offers: two process groups and an all-gather over the first dimension."""
    host_group = dist.new_group(backend="gloo")

    def all_gather(local: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == 0
        gathered = local.new_empty(W * local.shape[0], *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local)
        return gathered

    return SimpleNamespace(
        world_size=W,
        ranks=list(range(W)),
        rank_in_group=rank,
        cpu_group=host_group,
        device_group=dist.group.WORLD,
        all_gather=all_gather,
    )


def bits(seed: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, width] of arbitrary bits, the same on both ranks: NaNs with payloads and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(-(2**31), 2**31, (rows, width), generator=generator)
    return made.to(BITS[dtype.itemsize]).view(dtype).cuda()


def columns(rank: int, widths: tuple[int, ...]) -> torch.Tensor:
    """The logical columns that this rank computes, in its own order."""
    parts = torch.arange(sum(widths), device="cuda").split(list(widths))
    return torch.cat([part.chunk(W)[rank] for part in parts])


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def rows_equal(rank: int, group: Any) -> None:
    """One to eight rows in both dtypes, beside the gate's columns as in the layer, against NCCL; either rank late."""
    gather = latents(group)
    own = gather.local_width
    assert gather.choice.name == "peer", gather.choice
    for step in range(6 * MAX_ROWS):
        rows, dtype = step % MAX_ROWS + 1, (torch.bfloat16, torch.float16)[step // MAX_ROWS % 2]
        logical = bits(step, rows, sum(WIDTHS), dtype)
        beside = torch.zeros(rows, own + 6144, dtype=dtype, device="cuda")
        beside[:, :own] = logical.view(torch.int16)[:, columns(rank, WIDTHS)].view(dtype)
        local = beside[:, :own]
        assert gather.way is not None and gather.way.takes(local)
        if rank == step % 3:
            torch.cuda._sleep(DELAY)
        found = gather(local)
        nccl = restore(group.all_gather(local.contiguous(), dim=0).view(W, rows, own), gather.local)
        assert same(found, nccl) and same(found, logical), (step, rows)


def latents(group: Any, choice: Choice | None = None) -> LatentGather:
    device = torch.device("cuda", torch.cuda.current_device())
    return LatentGather(group, WIDTHS, choice or select(group, WIDTHS, device))


def fallbacks_equal(rank: int, group: Any) -> None:
    """Nine rows, a prefill, float32 and a misaligned slice go through the all-gather and give the same order."""
    gather = latents(group)
    half = torch.bfloat16
    for rows, dtype, skip in ((9, half, 0), (4096, half, 0), (1, torch.float32, 0), (2, half, 1)):
        logical = bits(rows, rows, sum(WIDTHS), dtype)
        local = logical.view(BITS[dtype.itemsize])[:, columns(rank, WIDTHS)].view(dtype)
        if skip:
            local = torch.cat([local.new_zeros(rows, skip), local], dim=1)[:, skip:]
        assert dtype == torch.float32 or not gather.way.takes(local)  # type: ignore[union-attr]
        assert same(gather(local), logical), (rows, dtype)


def pair_equal(rank: int, group: Any) -> None:
    """The routed experts' BF16 down projection and the router's FP32 scores, one to eight rows, and the fallback."""
    widths = (3584, 896)
    dtypes = (torch.bfloat16, torch.float32)
    device = torch.device("cuda", torch.cuda.current_device())
    gather = select_pair(group, widths[0] // W * 2, widths[1] // W * 4, device)
    assert gather.peer is not None, gather.reason
    for step in range(24):
        rows = step % (MAX_ROWS + 1) + 1
        whole = [bits(step, rows, width, dtype) for width, dtype in zip(widths, dtypes, strict=True)]
        own = [part.chunk(W, dim=1)[rank] for part in whole]
        if rank == step % 3:
            torch.cuda._sleep(DELAY)
        assert gather.peer.takes(*own) == (rows <= MAX_ROWS)
        assert all(same(a, b) for a, b in zip(gather(*own), whole, strict=True)), (step, rows)


def product_equal(rank: int, group: Any) -> None:
    """Product and gather in one launch: exact on whole numbers, in graphs too, one to eight rows, either rank late."""
    first, second = local_widths(WIDTHS, W)
    geometry = Geometry(2 * first, 2 * second)
    device = torch.device("cuda", torch.cuda.current_device())
    nbytes = geometry.nbytes(W)
    region = connect(nbytes, group.device_group, device, ("peer",), host_group=group.cpu_group).get()
    source = PeerProjection(region, geometry, HIDDEN)
    source.warm_up(torch.bfloat16)
    source.warm_up(torch.float16)
    generator = torch.Generator("cuda").manual_seed(0)
    for step in range(6 * MAX_ROWS):
        rows, dtype = step % MAX_ROWS + 1, (torch.bfloat16, torch.float16)[step // MAX_ROWS % 2]
        x = torch.randint(-1, 2, (rows, HIDDEN), generator=generator, device="cuda").to(dtype)
        weight = torch.randint(-1, 2, (sum(WIDTHS), HIDDEN), generator=generator, device="cuda").to(dtype)
        own = weight[columns(rank, WIDTHS)].contiguous()
        expected = (x.float() @ weight.float().T).to(dtype)
        if rank == step % 3:
            torch.cuda._sleep(DELAY)
        assert source.takes(x, own)
        assert same(source.project(x, own), expected), (step, rows)
        if step % MAX_ROWS in (0, 7):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = [source.project(x, own) for _ in range(5)]
            for _ in range(21):
                x.neg_()
                graph.replay()
            torch.cuda.synchronize()
            assert all(same(one, (x.float() @ weight.float().T).to(dtype)) for one in found), (step, rows)


def graphs_replay(rank: int, group: Any) -> None:
    """300 replays of a graph of 24 gathers with new inputs each, random delays on either rank, eager calls between."""
    gather = latents(group)
    width = sum(WIDTHS)
    mine = columns(rank, WIDTHS)
    for rows in (1, MAX_ROWS):
        index = torch.arange(rows * width, device="cuda").view(rows, width)
        counter = torch.zeros((), dtype=torch.int64, device="cuda")
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")

        def layer(
            index: torch.Tensor = index, counter: torch.Tensor = counter, wrong: torch.Tensor = wrong
        ) -> None:
            counter += 1
            logical = (index * 31 + counter * 17).to(torch.int16)
            found = gather(logical[:, mine].view(torch.bfloat16))
            wrong += (found.view(torch.int16) != logical).sum()

        layer()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(24):
                layer()
        chance = torch.Generator().manual_seed(rank)
        for replay in range(300):
            if torch.rand((), generator=chance) < 0.3:
                torch.cuda._sleep(int(torch.randint(1000, 200_000, (), generator=chance)))
            graph.replay()
            if replay % 50 == 0:
                layer()
        torch.cuda.synchronize()
        assert int(wrong) == 0 and int(counter) == 1 + 24 * 300 + 6, (rows, int(wrong), int(counter))


CASES: tuple[Callable[[int, Any], None], ...] = (
    rows_equal,
    fallbacks_equal,
    pair_equal,
    product_equal,
    graphs_replay,
)


def rank_main(rank: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # no path here uses it
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=W, device_id=device
    )
    assert local_widths(WIDTHS, W) == (768, 288)
    group = group_of(rank)
    try:
        for case in CASES:
            case(rank, group)
            os.write(1, f"{case.__name__}\n".encode())
    except BaseException:
        traceback.print_exc()
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_main, (folder,), W, start_method="spawn")
