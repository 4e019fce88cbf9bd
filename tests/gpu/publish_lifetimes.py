# SPDX-License-Identifier: Apache-2.0
"""Checks of publish_two_gpus.py: lifetimes with a rank late, the same with faults, and what is written where."""

from typing import Any

import torch
import torch.distributed as dist
from publish_group import BF16, DELAY, FP8, World, differing
from publish_stock import Inputs
from publish_world import LATE, MUTATIONS, SENTINEL, STEPS, Protocol, changed_elsewhere

from kimi_k3_serve.publish.layout import SLOTS
from kimi_k3_serve.publish.publisher import Publisher

Pool = list[tuple[Inputs, tuple[torch.Tensor, ...]]]
LIMIT_S = 20
"""Of a wait."""
TURNS = (
    (0, 0, [2000, 3]),
    (1, 0, [700]),
    (0, 1, [1300, 64, 1]),
    (0, 0, [5]),
    (1, 1, [1999]),
    (0, 1, [1]),
)
"""Ubatch, slot and contexts of each publication."""


def pool_of(world: World, chunks: int) -> Pool:
    """Chunks of about 3,000 rows and stock's rows of each."""
    pool = [world.inputs([3000 + 7 * seed, 11], BF16, seed=seed) for seed in range(chunks)]
    return [(inputs, tuple(plane.clone() for plane in world.stock(inputs))) for inputs in pool]


def layers(
    world: World, source: Publisher, pool: Pool, late: int, where: str, mutate: str = "", cycles: int = DELAY
) -> torch.Tensor:
    """Rows that are wrong in layers of three chunks, with rank `late` late by `cycles` at every step `where`."""
    wrong = torch.zeros((), dtype=torch.int64, device=world.device)
    protocol = Protocol(mutate, source.rank.epochs)

    def delay(here: str) -> None:
        if world.rank == late and here == where:
            torch.cuda._sleep(cycles)

    for (inputs, wanted), (slot, ends_layer) in zip(pool, protocol.turns(len(pool)), strict=True):
        delay("before publishing")
        protocol.before_push()
        wait = where != "before waiting" and protocol.waits
        source.rank.push(inputs.cache, inputs.table, inputs.chunk, slot, 0, wait=wait)
        if where == "before waiting":
            delay(where)
            source.rank.wait(slot, 0)
        delay("while consuming")
        wrong += differing(source.valid(inputs.chunk, slot, 0), wanted)
        if ends_layer:
            world.output_collective()
    return wrong


def lifetimes_hold(world: World) -> dict[str, Any]:
    """Any rank late before publishing, before waiting or while consuming."""
    source, pool = world.publisher(BF16, timeout_s=LIMIT_S), pool_of(world, 9)
    wrong = [layers(world, source, pool, late, where) for late in range(world.size) for where in STEPS]
    return {"wrong": sum(wrong), "publications": len(wrong) * len(pool)}


def broken(world: World, mutate: str) -> dict[str, Any]:
    """A control: the protocol with one fault, the last rank late where it must show."""
    source, pool = world.publisher(BF16, timeout_s=LIMIT_S), pool_of(world, 9)
    torch.cuda.synchronize()
    dist.barrier()
    wrong = layers(world, source, pool, world.size - 1, MUTATIONS[mutate], mutate, LATE)
    torch.cuda.synchronize()
    dist.barrier()  # a rank that is late still stores into the others' memory
    return {"wrong": wrong, "publications": len(pool)}


def nothing_else_is_written(world: World) -> dict[str, Any]:
    """Planes are symmetric memory itself; every other byte of it stays: rows beyond N, the other slot and ubatch."""
    wrong, publications = torch.zeros((), dtype=torch.int64, device=world.device), 0
    for dtype in (BF16, FP8):
        source = world.publisher(dtype, timeout_s=LIMIT_S, ubatches=2)
        own = source.rank.region.own  # type: ignore[attr-defined]
        for plane in (plane for ubatch in source.planes for slot in ubatch for plane in slot):
            plane.view(torch.uint8).fill_(SENTINEL)
        for seed, (ubatch, slot, contexts) in enumerate(TURNS):
            inputs = world.inputs(contexts, dtype, seed=seed)
            wanted = world.stock(inputs)
            torch.cuda.synchronize()
            dist.barrier()
            before = own.clone()
            torch.cuda.synchronize()
            dist.barrier()
            planes = source.gather(inputs.cache, inputs.table, inputs.chunk, slot=slot, ubatch=ubatch)
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = own.data_ptr(), own.data_ptr() + own.numel()
            assert all(begin <= plane.data_ptr() < end and plane.is_contiguous() for plane in planes)
            rows = len(planes[0])
            assert rows == inputs.chunk.num_rows
            wrong += changed_elsewhere(source.layout, before, own, ubatch, slot, rows)
            if inputs.quantised:
                planes = tuple((p.float() * inputs.scale).to(inputs.model_dtype) for p in planes)  # type: ignore[assignment]
            wrong += differing(planes, wanted)
            publications += 1
        assert source.rank.epochs.tolist() == [4, 2]
    return {"wrong": wrong, "publications": publications}


def ubatches_interleave(world: World) -> dict[str, Any]:
    """Two ubatches under way at once, the last rank late: each sees its own rows."""
    source, pool = world.publisher(BF16, timeout_s=LIMIT_S, ubatches=2), pool_of(world, 8)
    wrong = torch.zeros((), dtype=torch.int64, device=world.device)
    for turn in range(4):
        slot, pair = turn % SLOTS, pool[2 * turn :][:2]
        for ubatch, (inputs, _) in enumerate(pair):
            if world.rank == world.size - 1:
                torch.cuda._sleep(DELAY)
            source.rank.push(inputs.cache, inputs.table, inputs.chunk, slot, ubatch)
        for ubatch, (inputs, wanted) in enumerate(pair):
            source.rank.wait(slot, ubatch)
            wrong += differing(source.valid(inputs.chunk, slot, ubatch), wanted)
    torch.cuda.synchronize()
    dist.barrier()
    assert source.rank.epochs.tolist() == [4, 4]
    return {"wrong": wrong, "publications": len(pool)}
