# SPDX-License-Identifier: Apache-2.0
"""The publication over NVLink: one process a GPU, against stock's path over NCCL.

    torchrun --nproc-per-node 2 tests/gpu/publish_two_gpus.py --json FILE

Prints one line a check and exits with 1 if one failed. All rows are compared on the device, with nothing that would
keep the ranks in step: what they share is the publication and, at a layer's end, its output collective.
"""

import argparse
import faulthandler
import functools
import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from publish_group import BF16, CAPACITY, FP8, FP16, World, differing, gather
from publish_lifetimes import broken, lifetimes_hold, nothing_else_is_written, ubatches_interleave
from publish_world import LATENT, MUTATIONS, ROPE

from kimi_k3_serve.publish.collective import Collective
from kimi_k3_serve.publish.layout import SLOTS

KINDS = ((BF16, BF16, 1.0), (FP16, FP16, 1.0), (FP8, BF16, 1.0), (FP8, BF16, 0.37), (FP8, FP16, 0.0123))
"""Dtypes of cache and model, and `k_scale`."""
CHUNKS: tuple[tuple[list[int], list[int] | None], ...] = (
    ([700, 1, 64, 1300, 3], None),
    ([1], None),  # this rank or the other has no row at all
    ([2000, 40], [64, 0]),  # a continuation
    ([CAPACITY], None),
    ([1000] * 64, None),
)
CHECK_LIMIT_S = 120
"""Of a check: a rank whose host stands still says where, and ends the run."""


def rows_are_stocks(world: World) -> dict[str, Any]:
    """bf16, fp16, fp8 of several scales and model dtypes; chunks of 1 row to a full workspace; also by the fallback."""
    wrong, rows = torch.zeros((), dtype=torch.int64, device=world.device), 0
    for dtype, model_dtype, scale in KINDS:
        source = world.publisher(dtype, model_dtype)
        fallback = Collective(dist.group.WORLD, dtype, LATENT, ROPE, model_dtype, implementation="triton")
        for index, (contexts, starts) in enumerate(CHUNKS):
            inputs = world.inputs(
                contexts, dtype, seed=index, starts=starts, scale=scale, model_dtype=model_dtype
            )
            wanted = world.stock(inputs)
            for way in (source, fallback):
                wrong += differing(gather(way, inputs, index % SLOTS), wanted)
            if inputs.quantised:  # and the planes hold the cached bytes
                planes = source.valid(inputs.chunk, index % SLOTS, 0)
                wrong += differing(tuple((p.float() * inputs.scale).to(model_dtype) for p in planes), wanted)
            rows += inputs.chunk.num_rows
        torch.cuda.synchronize()
        dist.barrier()
    return {"wrong": wrong, "rows": rows, "stock": world.stock.name}


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """The work as a CUDA graph: call to replay."""
    gc.collect()  # regions that are freed during a capture would end it
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog queries events
        work()
    return graph.replay


def graphs_replay(world: World, dtype: torch.dtype, replays: int) -> dict[str, Any]:
    """A graph of two publications; maps, counts and rows change between replays, on the device."""
    source, contexts = world.publisher(dtype), [[2048], [1500], [7], [2047], [1]]
    pool = [world.inputs(context, dtype, seed=seed) for seed, context in enumerate(contexts)]
    expected = [tuple(plane.clone() for plane in world.stock(inputs)) for inputs in pool]
    static = world.inputs([2048], dtype, seed=99)
    wanted = tuple(torch.zeros_like(plane) for plane in expected[0])
    num_rows = torch.zeros((), dtype=torch.int64, device=world.device)
    wrong, row = (
        torch.zeros((), dtype=torch.int64, device=world.device),
        torch.arange(2048, device=world.device),
    )

    def load(which: int) -> None:
        inputs, target = pool[which], static.chunk
        target.rows[:, : inputs.chunk.capacity].copy_(inputs.chunk.rows)
        target.num_local_rows.copy_(inputs.chunk.num_local_rows)
        target.memory[2].copy_(inputs.chunk.memory[2])  # how many tiles
        target.tiles[: inputs.chunk.num_tiles].copy_(inputs.chunk.tiles)
        static.cache.view(torch.uint8)[: len(inputs.cache)].copy_(inputs.cache.view(torch.uint8))
        static.table[:, : inputs.table.shape[1]].copy_(inputs.table)
        for plane, rows in zip(wanted, expected[which], strict=True):
            plane[: len(rows)].copy_(rows)
        num_rows.fill_(inputs.chunk.num_rows)

    def step(slot: int) -> None:
        for found, plane in zip(gather(source, static, slot), wanted, strict=True):
            differs = (found.view(torch.uint8) != plane.view(torch.uint8)).any(dim=1)
            wrong.add_((differs & (row < num_rows)).sum())

    load(0)
    for slot in range(SLOTS):  # everything compiled and loaded before it is captured
        step(slot)
    before, replay_both = int(source.rank.epochs[0]), captured(lambda: [step(slot) for slot in range(SLOTS)])
    chance = random.Random(world.rank)
    for replay in range(replays):
        if replay % 20 == 0:
            torch.cuda.synchronize()
            dist.barrier()
            load(replay // 20 % len(pool))
            torch.cuda.synchronize()
            dist.barrier()
        if chance.random() < 0.1:
            torch.cuda._sleep(chance.randrange(1000, 200_000))
        replay_both()
    torch.cuda.synchronize()
    assert int(source.rank.epochs[0]) - before == SLOTS * replays, "the epoch did not advance as it should"
    return {"wrong": wrong, "replays": replays}


def soak(world: World, dtype: torch.dtype, publications: int) -> dict[str, Any]:
    """Random chunks, random layers, random delays on either rank."""
    source, shared = world.publisher(dtype), random.Random(1)
    mine, pool = random.Random(2 + world.rank), []
    for seed in range(24):
        contexts = [shared.randrange(1, 1200) for _ in range(shared.randrange(1, 6))] if seed else [CAPACITY]
        inputs = world.inputs(contexts, dtype, seed=seed)
        pool.append((inputs, tuple(plane.clone() for plane in world.stock(inputs))))
    wrong, slot, longest = torch.zeros((), dtype=torch.int64, device=world.device), 0, 0
    torch.cuda.synchronize()
    dist.barrier()

    def delay() -> None:
        if mine.random() < 0.2:
            torch.cuda._sleep(mine.randrange(1000, 200_000))

    for done in range(publications):
        inputs, wanted = shared.choice(pool)
        longest = max(longest, inputs.chunk.num_rows)
        delay()
        found = gather(source, inputs, slot)
        delay()
        wrong += differing(found, wanted)
        slot = (slot + 1) % SLOTS
        if shared.random() < 0.3:
            world.output_collective()
            slot = 0
        if done % 1000 == 999:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return {"wrong": wrong, "publications": publications, "rows_of_largest": longest}


def late_rank_is_named(world: World) -> dict[str, Any]:
    """The last check: it costs rank 0 its CUDA context. In a graph, whose waits have their limit in each replay."""
    source, inputs = world.publisher(BF16), world.inputs([9], BF16)
    world.kept = source, inputs  # freeing symmetric memory without a context would end the process
    gather(source, inputs, 0)
    torch.cuda.synchronize()
    dist.barrier(world.host_group)
    said = ""
    if world.rank == 0:
        source.rank.deadline.limit_s = 0.5  # type: ignore[attr-defined]
        replay = captured(lambda: gather(source, inputs, 1))
        replay()
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            said = "CUDA error; "
        try:
            source.rank.deadline.check()  # type: ignore[attr-defined]
        except RuntimeError as error:
            said += str(error)
    dist.barrier(world.host_group)
    wanted = "CUDA error; rank 0: rank 1 did not publish epoch 2 into slot 1 of ubatch 0 within 0.5 s"
    assert world.rank != 0 or said.startswith(wanted), said
    return {"said": said}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--publications", type=int, default=10_000)
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    world, verdicts = World(), {}
    device_name = torch.cuda.get_device_name()
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "rows are stock's": lambda: rows_are_stocks(world),
        "nothing but a chunk's rows is written": lambda: nothing_else_is_written(world),
        "ubatches interleave": lambda: ubatches_interleave(world),
        "lifetimes hold with any rank late": lambda: lifetimes_hold(world),
        **{f"control: {mutate}": functools.partial(broken, world, mutate) for mutate in MUTATIONS},
        "graph replays bf16": lambda: graphs_replay(world, BF16, args.replays),
        "graph replays fp8, scaled": lambda: graphs_replay(world, FP8, args.replays),
        "soak bf16": lambda: soak(world, BF16, args.publications),
        "soak fp8, scaled": lambda: soak(world, FP8, args.publications // 2),
        "a late rank is named": lambda: late_rank_is_named(world),
    }
    for name, check in checks.items():
        begun = time.monotonic()
        faulthandler.dump_traceback_later(CHECK_LIMIT_S, exit=True)
        try:
            facts = check()
            if (wrong := facts.pop("wrong", None)) is not None:
                dist.all_reduce(wrong)
                facts["wrong_rows"] = int(wrong)
            ok = (facts.get("wrong_rows", 0) == 0) != name.startswith("control")
        except (
            RuntimeError,
            AssertionError,
        ) as error:  # what follows cannot run: the ranks are no longer in step
            facts, ok = {"error": f"{type(error).__name__}: {error}"}, False
        verdicts[name] = {"ok": ok, **facts, "seconds": round(time.monotonic() - begun, 1)}
        if world.rank == 0 or "error" in facts:
            print(f"{'ok' if ok else 'FAILED':<6} {name}: {verdicts[name]}", flush=True)
        if "error" in facts:
            break
    passed = len(verdicts) == len(checks) and all(verdict["ok"] for verdict in verdicts.values())
    if world.rank == 0 and args.json:
        facts = {
            "world_size": world.size,
            "device": device_name,
            "torch": torch.__version__,
            "passed": passed,
            "checks": verdicts,
        }
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0 if passed else 1)  # no clean-up: rank 0 has lost its CUDA context


if __name__ == "__main__":
    main()
