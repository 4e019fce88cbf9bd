# SPDX-License-Identifier: Apache-2.0
"""The protocol's promises on one GPU: what a publication writes and what not, ubatches apart, and that faults show."""

from typing import Any

import pytest
import torch
from publish_streams import CONTEXTS, CUDA, DELAY, Ranks, split
from publish_world import LATE, LATENT, MUTATIONS, ROPE, SENTINEL, PagedWorld, Protocol, changed_elsewhere

from kimi_k3_serve.publish.layout import SLOTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs an NVIDIA GPU of compute capability 9.0 or later",
    ),
]


class Batch:
    """A chunk of every rank, its expected planes, and room for what each rank sees: nothing is allocated under way."""

    def __init__(self, ranks: Ranks, seed: int) -> None:
        row_bytes = (LATENT + ROPE) * ranks.dtype.itemsize
        world = PagedWorld(CONTEXTS, ranks.world_size, row_bytes, device=CUDA, seed=seed)
        ranks.bind(world)
        self.world, self.chunks, self.expected = world, ranks.chunks, split(world.expected())
        self.seen = [[torch.empty_like(plane) for plane in self.expected] for _ in range(ranks.world_size)]

    def use(self, ranks: Ranks) -> None:
        ranks.world, ranks.chunks = self.world, self.chunks

    def see(self, ranks: Ranks, rank: int, slot: int, ubatch: int = 0) -> None:
        for kept, plane in zip(self.seen[rank], ranks.planes(rank, slot, ubatch), strict=True):
            kept.copy_(plane)

    def wrong(self) -> int:
        """Rows, over all ranks."""
        return sum(
            int((found != wanted).any(dim=1).sum())
            for seen in self.seen
            for found, wanted in zip(seen, self.expected, strict=True)
        )


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_nothing_but_the_chunks_rows_is_written(dtype: torch.dtype, world_size: int) -> None:
    """Planes are symmetric memory itself; every other byte of it stays: rows beyond N, the other slot and ubatch."""
    ranks = Ranks(world_size, dtype, capacity=2100, ubatches=2)
    before_all = [[int(epoch) for epoch in source.rank.epochs] for source in ranks.publishers]
    for source in ranks.publishers:
        for plane in (plane for ubatch in source.planes for slot in ubatch for plane in slot):
            plane.view(torch.uint8).fill_(SENTINEL)
    for seed, (ubatch, slot, contexts) in enumerate(
        [(0, 0, CONTEXTS), (1, 0, [700]), (0, 1, [2000, 3]), (0, 0, [5]), (1, 1, [1999]), (0, 1, [1])]
    ):
        world = PagedWorld(contexts, world_size, (LATENT + ROPE) * dtype.itemsize, device=CUDA, seed=seed)
        ranks.bind(world)
        memories = [source.rank.region.own for source in ranks.publishers]  # type: ignore[attr-defined]
        before = [own.clone() for own in memories]
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        torch.cuda.synchronize()

        def gather(rank: int, slot: int = slot, ubatch: int = ubatch, found: dict[int, Any] = found) -> None:
            found[rank] = ranks.gather(rank, slot, ubatch)

        ranks.each(gather)
        torch.cuda.synchronize()
        for rank, own in enumerate(memories):
            for plane, rows in zip(found[rank], split(world.expected()), strict=True):
                assert torch.equal(plane.view(torch.uint8), rows), (contexts, rank)
                assert own.data_ptr() <= plane.data_ptr() < own.data_ptr() + own.numel()
                assert plane.is_contiguous()
            layout, rows = ranks.publishers[rank].layout, len(found[rank][0])
            assert int(changed_elsewhere(layout, before[rank], own, ubatch, slot, rows)) == 0
    after_all = [[int(epoch) for epoch in source.rank.epochs] for source in ranks.publishers]
    advanced = [
        [b - a for a, b in zip(*pair, strict=True)] for pair in zip(before_all, after_all, strict=True)
    ]
    assert advanced == [[4, 2]] * world_size


@pytest.mark.parametrize("world_size", [2, 8])
def test_ubatches_interleave(world_size: int) -> None:
    """Two ubatches under way at once, the last rank late: each sees its own rows."""
    ranks = Ranks(world_size, torch.bfloat16, capacity=2100, ubatches=2)
    batches = [Batch(ranks, seed) for seed in range(8)]
    torch.cuda.synchronize()
    for turn in range(4):
        slot, pair = turn % SLOTS, list(enumerate(batches[2 * turn :][:2]))

        def publish(rank: int, ubatch: int, slot: int = slot) -> None:
            if rank == world_size - 1:
                torch.cuda._sleep(DELAY)
            ranks.push(rank, slot, ubatch)

        def consume(rank: int, ubatch: int, batch: Batch, slot: int = slot) -> None:
            ranks.wait(rank, slot, ubatch)
            batch.see(ranks, rank, slot, ubatch)

        for ubatch, batch in pair:
            batch.use(ranks)
            ranks.each(lambda rank, ubatch=ubatch: publish(rank, ubatch))
        for ubatch, batch in pair:
            batch.use(ranks)
            ranks.each(lambda rank, ubatch=ubatch, batch=batch: consume(rank, ubatch, batch))
    torch.cuda.synchronize()
    assert [batch.wrong() for batch in batches] == [0] * 8


def wrong_rows(ranks: Ranks, batches: list[Batch], where: str, mutate: str = "") -> int:
    """Rows that any rank sees wrong in layers of three chunks, with the last rank late at every step `where`."""
    protocols = [Protocol(mutate, source.rank.epochs) for source in ranks.publishers]

    def delay(rank: int, here: str) -> None:
        if rank == ranks.world_size - 1 and here == where:
            torch.cuda._sleep(LATE)

    torch.cuda.synchronize()
    for batch, (slot, ends_layer) in zip(batches, protocols[0].turns(len(batches)), strict=True):
        batch.use(ranks)

        def publish(rank: int, slot: int = slot) -> None:
            delay(rank, "before publishing")
            protocols[rank].before_push()
            ranks.push(rank, slot, 0, wait=protocols[rank].waits)

        def consume(rank: int, slot: int = slot, batch: Batch = batch) -> None:
            delay(rank, "while consuming")
            batch.see(ranks, rank, slot)

        ranks.each(publish)
        ranks.each(consume)
        if ends_layer:
            ranks.collective()
    torch.cuda.synchronize()
    return sum(batch.wrong() for batch in batches)


@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("mutate", MUTATIONS)
def test_a_broken_protocol_shows(mutate: str, world_size: int) -> None:
    """And the same run without the fault does not: so it is the fault that shows."""
    ranks = Ranks(world_size, torch.bfloat16, capacity=2100)
    batches = [Batch(ranks, seed) for seed in range(9)]
    assert wrong_rows(ranks, batches, MUTATIONS[mutate]) == 0
    assert wrong_rows(ranks, batches, MUTATIONS[mutate], mutate) > 0
