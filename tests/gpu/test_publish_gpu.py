# SPDX-License-Identifier: Apache-2.0
"""The publication on one GPU: W ranks are W sets of buffers and W streams of one process, kernels co-resident.

What this shows: both kernels compiled for the GPU, their rendezvous with real concurrency, CUDA graphs, lifetimes.
(What is written where, ubatches and controls: test_publish_protocol.py.) What it cannot show: stores over NVLink, and
time. Needs PyTorch and Triton only.
"""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from publish_streams import CONTEXTS, CUDA, DELAY, Ranks, split
from publish_world import LATENT, ROPE, PagedWorld

from kimi_k3_serve.publish.collective_kernel import unpack_kernel
from kimi_k3_serve.publish.layout import SLOTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs an NVIDIA GPU of compute capability 9.0 or later",
    ),
]


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32])
def test_every_rank_holds_what_stock_yields(dtype: torch.dtype, world_size: int) -> None:
    ranks = Ranks(world_size, dtype, capacity=4096)
    for index, (contexts, starts) in enumerate(
        [(CONTEXTS, None), ([1], None), ([2000, 40], [64, 0]), (CONTEXTS, None), ([4096], None)]
    ):
        row_bytes = (LATENT + ROPE) * dtype.itemsize
        world = PagedWorld(contexts, world_size, row_bytes, device=CUDA, starts=starts, seed=index)
        ranks.bind(world)
        torch.cuda.synchronize()
        slot = index % SLOTS
        if index % 2:
            ranks.each(lambda rank, slot=slot: ranks.push(rank, slot, 0))
            ranks.each(lambda rank, slot=slot: ranks.wait(rank, slot, 0))
        else:
            ranks.each(lambda rank, slot=slot: ranks.push(rank, slot, 0, wait=True))
        torch.cuda.synchronize()
        for rank in range(world_size):
            for found, expected in zip(ranks.planes(rank, slot), split(world.expected()), strict=True):
                assert torch.equal(found, expected), (contexts, rank)


@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float16])
def test_e4m3_rows_are_scaled_with_one_rounding(model_dtype: torch.dtype) -> None:
    """Own and other ranks' rows, every byte but NaN, against PyTorch; the planes keep the cached bytes."""
    world_size = 2
    ranks = Ranks(world_size, torch.float8_e4m3fn, capacity=4096)
    scale = torch.tensor([0.3717], device=CUDA)
    for source in ranks.publishers:
        source.model_dtype = model_dtype
    ranks.load(lambda rank: ranks.gather(rank, 0, scale=scale), scale=scale)
    for index, contexts in enumerate([CONTEXTS, [1], [4096]]):
        world = PagedWorld(contexts, world_size, LATENT + ROPE, device=CUDA, seed=index)
        for raw in world.caches.values():
            raw[(raw & 0x7F) == 0x7F] = 0x7E
        ranks.bind(world)
        torch.cuda.synchronize()
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def gather(rank: int, slot: int = index % SLOTS, found: dict[int, Any] = found) -> None:
            found[rank] = ranks.gather(rank, slot, scale=scale)

        ranks.each(gather)
        torch.cuda.synchronize()
        for rank in range(world_size):
            for rows, raw in zip(found[rank], split(world.expected()), strict=True):
                wanted = (raw.view(torch.float8_e4m3fn).float() * scale).to(model_dtype)
                assert torch.equal(rows.view(torch.int16), wanted.view(torch.int16)), (contexts, rank)
            for plane, raw in zip(ranks.planes(rank, index % SLOTS), split(world.expected()), strict=True):
                assert torch.equal(plane, raw)


@pytest.mark.parametrize("where", ["before publishing", "before waiting", "while consuming"])
def test_lifetimes_hold_with_one_rank_late(where: str) -> None:
    """Layers of three chunks; what each rank sees at the end of its (late) consumption is kept and compared."""
    world_size, row_bytes = 4, (LATENT + ROPE) * 2
    ranks = Ranks(world_size, torch.bfloat16, capacity=4096)
    worlds = [PagedWorld(CONTEXTS, world_size, row_bytes, device=CUDA, seed=seed) for seed in range(9)]
    expected = [world.expected() for world in worlds]
    seen: list[tuple[int, torch.Tensor]] = []

    def delay(rank: int, here: str) -> None:
        if rank == world_size - 1 and here == where:
            torch.cuda._sleep(DELAY)

    torch.cuda.synchronize()
    for index, world in enumerate(worlds):
        ranks.bind(world)
        torch.cuda.current_stream().synchronize()
        slot = index % 3 % SLOTS

        def publish(rank: int, slot: int = slot) -> None:
            delay(rank, "before publishing")
            ranks.push(rank, slot, 0, wait=where != "before waiting")

        def consume(rank: int, slot: int = slot, index: int = index) -> None:
            if where == "before waiting":
                delay(rank, where)
                ranks.wait(rank, slot, 0)
            delay(rank, "while consuming")
            seen.append((index, torch.cat(ranks.planes(rank, slot), dim=1)))

        ranks.each(publish)
        ranks.each(consume)
        if index % 3 == 2:
            ranks.collective()
    torch.cuda.synchronize()
    assert len(seen) == 9 * world_size
    assert all(torch.equal(rows, expected[index]) for index, rows in seen)


def test_graphs_replay_with_other_chunks_in_the_same_buffers() -> None:
    """One graph a rank of two publications, 1,000 replays; maps, counts and rows change between them on the device."""
    world_size, dtype, capacity = 2, torch.bfloat16, 2048
    row_bytes = (LATENT + ROPE) * 2
    ranks = Ranks(world_size, dtype, capacity)
    pool = [
        PagedWorld(contexts, world_size, row_bytes, device=CUDA, seed=seed)
        for seed, contexts in enumerate([[2048], [1500], [7], [2047], [1]])
    ]
    static = PagedWorld([2048], world_size, row_bytes, device=CUDA, seed=99)
    ranks.bind(static)
    expected = torch.zeros(capacity, row_bytes, dtype=torch.uint8, device=CUDA)
    num_rows = torch.zeros(1, dtype=torch.int64, device=CUDA)
    wrong = torch.zeros(world_size, dtype=torch.int64, device=CUDA)
    row = torch.arange(capacity, device=CUDA)

    def load(world: PagedWorld) -> None:
        for rank in range(world_size):
            made, mine = world.chunk(rank, CUDA), ranks.chunks[rank]
            mine.rows[:, : made.rows.shape[1]].copy_(made.rows)
            mine.num_local_rows.copy_(made.num_local_rows)
            static.caches[rank][: len(world.caches[rank])].copy_(world.caches[rank])
            static.tables[rank][:, : world.tables[rank].shape[1]].copy_(world.tables[rank])
        rows = world.expected()
        expected[: len(rows)].copy_(rows)
        num_rows.fill_(len(rows))

    def check(rank: int, slot: int) -> None:
        ranks.wait(rank, slot, 0)
        planes = [plane.view(torch.uint8) for plane in ranks.publishers[rank].planes[0][slot]]
        differs = (torch.cat(planes, dim=1) != expected).any(dim=1) & (row < num_rows)
        wrong[rank] += differs.sum()

    load(pool[0])
    for slot in range(SLOTS):  # everything compiled and loaded before it is captured
        for rank in range(world_size):
            ranks.push(rank, slot, 0)
        for rank in range(world_size):
            check(rank, slot)
    torch.cuda.synchronize()
    graphs = []
    for rank in range(world_size):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            for slot in range(SLOTS):
                ranks.push(rank, slot, 0)
                check(rank, slot)
        graphs.append(graph)
    before = [int(source.rank.epochs[0]) for source in ranks.publishers]  # type: ignore[attr-defined]
    for replay in range(1000):
        if replay % 20 == 0:
            torch.cuda.synchronize()
            load(pool[replay // 20 % len(pool)])
            torch.cuda.synchronize()
        for graph, stream in zip(graphs, ranks.streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]
    after = [int(source.rank.epochs[0]) for source in ranks.publishers]  # type: ignore[attr-defined]
    assert [b - a for a, b in zip(before, after, strict=True)] == [2000, 2000]


def test_soak() -> None:
    """10,000 publications of random chunks with random delays on either rank: no row differs, nothing hangs."""
    world_size, publications = 2, 10_000
    ranks = Ranks(world_size, torch.bfloat16, capacity=2048)
    chance = random.Random(0)
    pool = []
    for seed in range(24):
        contexts = [chance.randrange(1, 400) for _ in range(chance.randrange(1, 6))]
        world = PagedWorld(contexts, world_size, (LATENT + ROPE) * 2, device=CUDA, seed=seed)
        ranks.bind(world)
        pool.append((world, ranks.chunks, world.expected()))
    wrong = torch.zeros(world_size, dtype=torch.int64, device=CUDA)
    torch.cuda.synchronize()
    index = 0
    for count in range(publications):
        ranks.world, ranks.chunks, expected = chance.choice(pool)
        slot, index = index % SLOTS, index + 1

        def delay() -> None:
            if chance.random() < 0.2:
                torch.cuda._sleep(chance.randrange(1000, 100_000))

        def publish(rank: int, slot: int = slot) -> None:
            delay()
            ranks.push(rank, slot, 0)

        def consume(rank: int, slot: int = slot, expected: torch.Tensor = expected) -> None:
            delay()
            ranks.wait(rank, slot, 0)
            delay()
            wrong[rank] += (torch.cat(ranks.planes(rank, slot), dim=1) != expected).any(dim=1).sum()

        ranks.each(publish)
        ranks.each(consume)
        if chance.random() < 0.3:  # the end of a layer
            ranks.collective()
            index = 0
        if count % 500 == 499:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fallback_scales_all_bytes(dtype: torch.dtype) -> None:
    raw = torch.arange(256, dtype=torch.uint8, device=CUDA).repeat(64).view(-1, 64)
    rows = raw.view(torch.float8_e4m3fn)
    order = torch.arange(len(raw), dtype=torch.int32, device=CUDA)
    for value in (1.0, 0.3717, 1e-3, 37.5):
        scale = torch.tensor([value], device=CUDA)
        kv_c, k_pe = (torch.empty(len(raw), width, dtype=dtype, device=CUDA) for width in (48, 16))
        addresses = [tensor.data_ptr() for tensor in (scale, kv_c, k_pe)]
        unpack_kernel[(-(-len(raw) // 8),)](
            raw.data_ptr(), order.data_ptr(), len(raw), *addresses,
            LATENT=48, ROPE=16, LATENT_PADDED=64, ROPE_PADDED=16, WORD=tl.uint8,
            OUT=getattr(tl, str(dtype).removeprefix("torch.")), SCALED=True, ROWS=8,
        )  # fmt: skip
        found, wanted = torch.cat([kv_c, k_pe], dim=1), (rows.float() * scale).to(dtype)
        same = (found.view(torch.int16) == wanted.view(torch.int16)) | (found.isnan() & wanted.isnan())
        assert bool(same.all())


LATE = """
import torch
from publish_streams import CUDA, Ranks
from publish_world import LATENT, ROPE, PagedWorld
ranks = Ranks(2, torch.bfloat16, 64)
ranks.bind(PagedWorld([9], 2, (LATENT + ROPE) * 2, device=CUDA))
ranks.publishers[0].rank.deadline.limit_s = 0.2
torch.cuda.synchronize()
ranks.push(0, 1, 0, wait=True)
try:
    torch.cuda.synchronize()
except Exception as error:
    print("CUDA error:", type(error).__name__)
try:
    ranks.publishers[0].rank.deadline.check()
except RuntimeError as error:
    print(error)
"""


def test_a_rank_that_never_comes_is_named() -> None:
    """In a process of its own, since the lost rendezvous costs the CUDA context."""
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent
    )
    assert "CUDA error:" in done.stdout, done.stderr[-2000:]
    assert "rank 0: rank 1 did not publish epoch 5 into slot 1 of ubatch 0 within 0.2 s" in done.stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(tmp_path: Path) -> None:
    """All of publish_two_gpus.py: stock's rows, what is written, lifetimes, graphs, soak, controls, late rank."""
    script = Path(__file__).parent / "publish_two_gpus.py"
    command = ["torchrun", "--nproc-per-node", "2", str(script), "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
