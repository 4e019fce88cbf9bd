# SPDX-License-Identifier: Apache-2.0
"""W processes publish context to one another over shared memory and compare every chunk with `reorg_kvcache`.

Run as a script: `publish_ranks.py WORLD_SIZE ...`; it needs TRITON_INTERPRET=1, so that the Triton kernel's own source
runs on the CPU. Prints one JSON line: {world size: {case name: "ok" | what differed}}.

A case named `mutation: ...` breaks the protocol on purpose, with one rank delayed where that must show.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from context_cases import chunks, geometry
from vllm.model_executor.layers.attention.mla_attention import reorg_kvcache

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from publish_world import LATENT, MUTATIONS, ROPE, SENTINEL, STEPS, Protocol

from kimi_k3_serve.publish.chunks import upload
from kimi_k3_serve.publish.collective import Collective
from kimi_k3_serve.publish.layout import SLOTS, Layout
from kimi_k3_serve.publish.publisher import Publisher
from kimi_k3_serve.symmetric import Region, connect
from kimi_k3_serve.symmetric.deadline import RendezvousTimeout

BLOCK, CPU = 4, torch.device("cpu")
DELAY_S = 0.1
MUTATION_DELAY_S = 0.8
"""Once, where the fault must show: long enough for ranks that share a core, at W = 8 twice as long."""


class Differs(Exception):
    """A chunk is not what stock yields."""


@dataclass
class World:
    """What every rank knows of all ranks: random caches and block tables, and from them stock's answer."""

    rank: int
    world_size: int
    dtype: torch.dtype
    contexts: list[int]
    workspace: int
    seed: int = 0
    interleave: int = 1
    chunks: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = chunks(self.contexts, self.world_size, self.interleave, self.workspace)
        generator = torch.Generator().manual_seed(self.seed)
        local = self.interleave * -(-max(self.contexts) // (self.world_size * self.interleave))
        width = -(-local // BLOCK) + 1
        blocks = width * len(self.contexts)
        # Blocks lie apart, as in a cache whose groups share pages.
        shape = (self.world_size, blocks, BLOCK + 1, (LATENT + ROPE) * self.dtype.itemsize)
        self.raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)[:, :, :BLOCK]
        self.tables = torch.stack(
            [
                torch.randperm(blocks, generator=generator).view(len(self.contexts), width).int()
                for _ in range(self.world_size)
            ]
        )
        self.device_chunks = upload(
            [geometry(chunk) for chunk in self.chunks],
            rank=self.rank,
            world_size=self.world_size,
            device=CPU,
            tiles=True,
            gathered=True,
        )

    @property
    def cache(self) -> torch.Tensor:
        """[blocks, BLOCK, L + P] of this rank, strided over its blocks; vLLM's fp8 caches are uint8."""
        mine = self.raw[self.rank]
        return mine if self.dtype.itemsize == 1 else mine.view(self.dtype)

    def expected(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stock's bytes of a chunk: every rank's padded rows, rank-major, then `reorg_kvcache`."""
        chunk = self.chunks[index]
        rows = []
        for rank in range(self.world_size):
            table = self.tables[rank][chunk.request_slice]
            request = chunk.padded_local_token_to_seq.long()
            begin = chunk.padded_local_cu_seq_lens.long()[request]
            position = torch.arange(len(request)) - begin + torch.tensor(chunk.local_starts)[request]
            rows.append(self.raw[rank][table[request, position // BLOCK].long(), position % BLOCK])
        item = self.dtype.itemsize
        kv_c, k_pe = torch.cat(rows).unsqueeze(1).split([LATENT * item, ROPE * item], dim=-1)
        kv_c, k_pe = reorg_kvcache(
            kv_c,
            k_pe,
            *geometry(chunk),
            sum_seq_len=chunk.num_context_tokens,
            max_seq_len=chunk.max_seq_len,
            toks=len(rows[0]),
        )
        return kv_c.squeeze(1), k_pe.squeeze(1)

    def gather(
        self, source: Any, index: int, slot: int, ubatch: int = 0, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.tables[self.rank][self.chunks[index].request_slice]
        answer: tuple[torch.Tensor, torch.Tensor] = source.gather(
            self.cache, table, self.device_chunks[index], slot=slot, ubatch=ubatch, scale=scale
        )
        return answer

    def compare(self, index: int, planes: tuple[torch.Tensor, torch.Tensor]) -> None:
        for name, plane, expected in zip(("kv_c", "k_pe"), planes, self.expected(index), strict=True):
            found = plane.contiguous().view(torch.uint8)
            if found.shape != expected.shape or not torch.equal(found, expected):
                raise Differs(f"{name} of chunk {index}")


def publisher(
    world: World,
    implementation: str,
    *,
    ubatches: int = 1,
    timeout_s: float = 30.0,
    model_dtype: torch.dtype = torch.bfloat16,
) -> Publisher:
    item = world.dtype.itemsize
    layout = Layout(world.world_size, world.workspace, LATENT * item, ROPE * item, ubatches)
    group = dist.group.WORLD
    region = connect(layout.nbytes, group, CPU, ("shared",)).get()
    region.peers[world.rank].fill_(0)
    made = Publisher(
        region,
        layout,
        world.dtype,
        transport="shared",
        implementation=implementation,
        timeout_s=timeout_s,
        model_dtype=model_dtype,
    )
    dist.barrier()
    return made


# Ragged, one without context, one shorter than W ranks (empty shards), one longer than the workspace.
CONTEXTS = [21, 0, 1, 40, 3]


def bytes_equal(
    rank: int, world_size: int, implementation: str, dtype: torch.dtype, interleave: int = 1
) -> None:
    """Two layers of several chunks; planes are symmetric memory itself; what lies beyond N is never written."""
    world = World(
        rank, world_size, dtype, CONTEXTS, workspace=max(16, world_size * interleave), interleave=interleave
    )
    assert len(world.chunks) >= 3 and any(chunk.is_continuation for chunk in world.chunks)
    source = publisher(world, implementation)
    own = source.rank.region.peers[rank]  # type: ignore[attr-defined]
    for plane in (plane for slots in source.planes[0] for plane in slots):
        plane.view(torch.uint8).fill_(SENTINEL)
    dist.barrier()
    high = [0, 0]
    for _ in range(2 if world_size == 2 else 1):
        for index in range(len(world.chunks)):
            slot = index % SLOTS
            planes = world.gather(source, index, slot)
            world.compare(index, planes)
            begin, end = own.data_ptr(), own.data_ptr() + own.numel()
            assert all(begin <= plane.data_ptr() < end and plane.is_contiguous() for plane in planes)
            high[slot] = max(high[slot], len(planes[0]))
            for whole in source.planes[0][slot]:
                assert (whole[high[slot] :].view(torch.uint8) == SENTINEL).all(), "a row beyond N was written"
        dist.barrier()  # the layer's output collective
    assert int(source.rank.epochs[0]) % len(world.chunks) == 0


def collective(world: World, implementation: str) -> Collective:
    return Collective(
        dist.group.WORLD, world.dtype, LATENT, ROPE, torch.float16, implementation=implementation
    )


def collective_equal(rank: int, world_size: int, implementation: str) -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        world = World(rank, world_size, dtype, CONTEXTS, workspace=16)
        source = collective(world, implementation)
        for index in range(len(world.chunks)):
            world.compare(index, world.gather(source, index, index % SLOTS))


def fp8_scaled(rank: int, world_size: int, implementation: str, through: str = "publication") -> None:
    """Scaled rows = stock, which scales each row before it moves them; the planes keep the cached bytes.

    In float16: the interpreter truncates where it should round to bfloat16, and reads the two e4m3 NaNs as numbers.
    """
    world = World(rank, world_size, torch.float8_e4m3fn, CONTEXTS, workspace=16)
    world.raw[(world.raw & 0x7F) == 0x7F] = 0x7E
    source: Any = (
        collective(world, implementation)
        if through == "collective"
        else publisher(world, implementation, model_dtype=torch.float16)
    )
    scale = torch.tensor([0.3717])
    for index in range(len(world.chunks)):
        rows = world.gather(source, index, index % SLOTS, scale=scale)
        for row, expected in zip(rows, world.expected(index), strict=True):
            stock = (expected.view(torch.float8_e4m3fn).float() * scale).to(torch.float16)
            if not torch.equal(row.view(torch.int16), stock.view(torch.int16)):
                raise Differs(f"scaled rows of chunk {index}")
        if through == "publication":
            world.compare(index, source.valid(world.device_chunks[index], index % SLOTS, 0))


def multicast_stand_in(rank: int, world_size: int, implementation: str) -> None:
    """The multicast variant with plain memory at its address: this rank's rows, each in its place, and nothing else."""
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        world = World(rank, world_size, dtype, CONTEXTS, workspace=16)
        source = publisher(world, implementation)
        memory = torch.full((source.layout.nbytes,), SENTINEL, dtype=torch.uint8)
        region = source.rank.region  # type: ignore[attr-defined]
        source.rank.region = replace(region, multicast_address=memory.data_ptr())  # type: ignore[attr-defined]
        slots = Publisher(
            Region(0, (memory,) * world_size), source.layout, dtype, transport="", implementation="torch"
        ).planes[0]
        for index in range(len(world.chunks)):
            memory.fill_(SENTINEL)
            world.gather(source, index, index % SLOTS)
            destination = world.device_chunks[index].rows[0, : world.device_chunks[index].local_rows].long()
            mine = destination[destination >= 0]
            for plane, expected in zip(slots[index % SLOTS], world.expected(index), strict=True):
                wanted = torch.full_like(plane.view(torch.uint8), SENTINEL)
                wanted[mine] = expected[mine]
                if not torch.equal(plane.view(torch.uint8), wanted):
                    raise Differs(f"multicast rows of chunk {index}")


def ubatches_apart(rank: int, world_size: int, implementation: str) -> None:
    """Two ubatches in turn: neither's planes, epoch nor signals move while the other publishes."""
    worlds = [World(rank, world_size, torch.bfloat16, CONTEXTS, workspace=16, seed=s) for s in (0, 1)]
    source = publisher(worlds[0], implementation, ubatches=2)
    held = [worlds[u].gather(source, 0, 0, ubatch=u) for u in (0, 1)]
    for index in (1, 2):  # ubatch 0 goes on alone; slot 0 of ubatch 1 must stand
        held[0] = worlds[0].gather(source, index, index % SLOTS, ubatch=0)
    worlds[0].compare(2, held[0])
    worlds[1].compare(0, held[1])
    assert [int(epoch) for epoch in source.rank.epochs] == [3, 1]


def lifetimes(
    rank: int,
    world_size: int,
    implementation: str,
    where: str = "",
    mutate: str = "",
) -> None:
    """Three layers of three chunks (the last one of a layer in slot 0, where the next begins), one rank delayed.

    Args:
        where: the delayed rank sleeps "before publishing", "before waiting" or "while consuming".
        mutate: what is wrong, one of `MUTATIONS`.
    """
    local = 4
    world = World(rank, world_size, torch.bfloat16, [3 * local * world_size], workspace=local * world_size)
    assert len(world.chunks) == 3
    source = publisher(world, implementation)
    late = rank == world_size - 1
    push, pause, protocol = source.rank.push, source.rank.wait, Protocol(mutate, source.rank.epochs)
    split = where == "before waiting" or mutate == "no wait"

    at = 0

    def delay(here: str) -> None:
        if late and here == where:
            if not mutate:
                time.sleep(DELAY_S)
            elif at == (1 if mutate == "one slot" else 2):
                time.sleep(MUTATION_DELAY_S * max(1, world_size // 4))

    def delayed_push(*arguments: Any, wait: bool) -> None:
        """One launch for both steps where nothing is to come between them."""
        delay("before publishing")
        protocol.before_push()
        push(*arguments, wait=wait and not split)
        if split:
            delay("before waiting")
            if protocol.waits:
                pause(*arguments[-2:])

    source.rank.push = delayed_push  # type: ignore[method-assign,assignment]
    wrong = []
    for at, (slot, ends_layer) in enumerate(protocol.turns(9)):
        layer, index = divmod(at, 3)
        if index == 0:  # other rows in each layer, so that a stale plane cannot pass for a fresh one
            world.raw.bitwise_xor_(0x11 * (layer + 1))
        planes = world.gather(source, index, slot)
        delay("while consuming")
        try:
            world.compare(index, planes)
        except Differs as error:
            wrong.append(f"layer {layer}: {error}")
        if ends_layer:
            dist.all_reduce(torch.ones(1))
    if wrong:
        raise Differs("; ".join(wrong))


def late_rank_is_named(rank: int, world_size: int, implementation: str) -> None:
    world = World(rank, world_size, torch.bfloat16, CONTEXTS, workspace=16)
    source = publisher(world, implementation, timeout_s=2.0 if implementation == "torch" else 0.02)
    if rank != 1:
        try:
            world.gather(source, 0, 0)
        except RendezvousTimeout as error:
            assert f"rank {rank}: rank 1 did not publish epoch 1 into slot 0 of ubatch 0" in str(error), error
        else:
            raise Differs("a rendezvous without rank 1 has succeeded")


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn, "fp32": torch.float32}


def cases(world_size: int) -> dict[str, Callable[[int, int], None]]:
    """All of them with two ranks or in PyTorch; else what more ranks change (the interpreter takes seconds a case)."""
    made: dict[str, Callable[[int, int], None]] = {}

    def add(name: str, body: Any, *arguments: Any) -> None:
        made[name] = lambda rank, world: body(rank, world, *arguments)

    for kind in ("triton", "torch"):
        for name, dtype in DTYPES.items():
            if (kind, name) != (
                "triton",
                "fp32",
            ):  # fp32 is there for the engine on the CPU, which runs torch
                add(f"{kind}: bytes {name}", bytes_equal, kind, dtype)
        every = world_size == 2 or kind == "torch"
        if every:
            add(f"{kind}: bytes bf16, interleave 4", bytes_equal, kind, torch.bfloat16, 4)
            add(f"{kind}: fp8 scaled", fp8_scaled, kind)
            add(f"{kind}: ubatches", ubatches_apart, kind)
            if kind == "triton":
                add(f"{kind}: multicast stand-in", multicast_stand_in, kind)
            add(f"{kind}: late rank is named", late_rank_is_named, kind)
        for where in STEPS if every else STEPS[-1:]:
            add(f"{kind}: late {where}", lifetimes, kind, where)
        if every:
            for mutate, where in MUTATIONS.items():
                add(f"mutation: {kind}, {mutate}", lifetimes, kind, where, mutate)
    for kind in ("triton", "torch"):
        add(f"collective, {kind}: bytes", collective_equal, kind)
        add(f"collective, {kind}: fp8 scaled", fp8_scaled, kind, "collective")
    return made


def rank_main(rank: int, world_size: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    verdicts = {}
    for name, body in cases(world_size).items():
        begun = time.monotonic()
        try:
            body(rank, world_size)
            verdict = "ok"
        except Differs as error:
            verdict = f"differs: {error}"
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, verdict)
        verdicts[name] = next((v for v in everyone if v != "ok"), "ok")
        if rank == 0:
            print(f"{time.monotonic() - begun:6.2f} s  {name}", file=sys.stderr, flush=True)
    if rank == 0:
        with open(out, "w") as file:  # noqa: PTH123
            json.dump(verdicts, file)


if __name__ == "__main__":
    verdicts = {}
    for world_size in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world_size, f"{folder}/store", f"{folder}/out")
            # Forked: importing vLLM takes seconds, and no thread of it runs yet.
            mp.start_processes(rank_main, arguments, world_size, start_method="fork")
            with open(f"{folder}/out") as file:  # noqa: PTH123
                verdicts[world_size] = json.load(file)
    print(json.dumps(verdicts), flush=True)
