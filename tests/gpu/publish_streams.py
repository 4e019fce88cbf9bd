# SPDX-License-Identifier: Apache-2.0
"""W ranks on one GPU: W sets of buffers and W streams of one process, kernels co-resident. Needs no vLLM."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from publish_world import LATENT, ROPE, PagedWorld

from kimi_k3_serve.publish.layout import Layout
from kimi_k3_serve.publish.publisher import Publisher
from kimi_k3_serve.publish.ranks import Scaled
from kimi_k3_serve.symmetric.region import Region

CUDA = torch.device("cuda", 0)
DELAY = 2_000_000  # clock cycles, about a millisecond
CONTEXTS = [700, 1, 64, 1300, 3]
PROGRAMS = 16


class Ranks:
    """W publishers on one GPU, one stream each."""

    def __init__(self, world_size: int, dtype: torch.dtype, capacity: int, ubatches: int = 1) -> None:
        self.world_size, self.dtype = world_size, dtype
        layout = Layout(world_size, capacity, LATENT * dtype.itemsize, ROPE * dtype.itemsize, ubatches)
        regions = Region.group(world_size, layout.nbytes, CUDA)
        self.publishers = [
            Publisher(region, layout, dtype, transport="peer", implementation="triton", timeout_s=20.0)
            for region in regions
        ]
        for source in self.publishers:
            # Programs that wait must leave room for those they wait for, which here run on the same GPU.
            source.rank.programs = PROGRAMS  # type: ignore[attr-defined]
        self.streams = [torch.cuda.Stream() for _ in regions]
        self.kept: list[object] = []
        self.bind(PagedWorld([5], world_size, (LATENT + ROPE) * dtype.itemsize, device=CUDA))
        torch.cuda._sleep(1)
        self.load(lambda rank: self.push(rank, 0, 0, wait=True))
        self.load(lambda rank: self.wait(rank, 0, 0), pushes=True)

    def load(self, launch: Callable[[int], None], *, pushes: bool = False, **changes: Any) -> None:
        """Launch each rank's kernel while all others have signalled. Loading it may wait for an idle GPU, so it must
        not happen while another rank's kernel spins on it.

        Args:
            pushes: the launch itself does not push.
            changes: of the others' pushes.
        """
        for rank in range(self.world_size):
            for other in range(self.world_size):
                if other != rank or pushes:
                    self.push(other, 0, 0, **changes)
            launch(rank)
            torch.cuda.synchronize()

    def bind(self, world: PagedWorld) -> None:
        self.world = world
        tiles = self.dtype.itemsize == 1
        self.chunks = [world.chunk(rank, CUDA, tiles=tiles) for rank in range(self.world_size)]
        self.kept.append((world, self.chunks))  # other streams still read them

    def push(self, rank: int, slot: int, ubatch: int, *, wait: bool = False, scale: Any = None) -> None:
        source, chunk = self.publishers[rank], self.chunks[rank]
        scaled = None
        if scale is not None:
            outputs = [
                torch.empty(chunk.num_rows, n, dtype=source.model_dtype, device=CUDA) for n in (LATENT, ROPE)
            ]
            scaled = Scaled(scale, *outputs)
        source.rank.push(
            self.cache(rank), self.world.tables[rank], chunk, slot, ubatch, wait=wait, scaled=scaled
        )

    def gather(
        self, rank: int, slot: int, ubatch: int = 0, *, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.publishers[rank].gather(
            self.cache(rank),
            self.world.tables[rank],
            self.chunks[rank],
            slot=slot,
            ubatch=ubatch,
            scale=scale,
        )

    def cache(self, rank: int) -> torch.Tensor:
        raw = self.world.caches[rank]
        return raw if self.dtype.itemsize == 1 else raw.view(self.dtype)

    def wait(self, rank: int, slot: int, ubatch: int) -> None:
        self.publishers[rank].rank.wait(slot, ubatch)

    def planes(self, rank: int, slot: int, ubatch: int = 0) -> tuple[torch.Tensor, ...]:
        n = self.chunks[rank].num_rows
        return tuple(plane[:n].view(torch.uint8) for plane in self.publishers[rank].planes[ubatch][slot])

    def each(self, work: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        for rank in ranks if ranks is not None else range(self.world_size):
            with torch.cuda.stream(self.streams[rank]):
                work(rank)

    def collective(self) -> None:
        """A rendezvous of all streams, as the layer's output collective is one."""
        events = [stream.record_event() for stream in self.streams]
        for stream in self.streams:
            for event in events:
                stream.wait_event(event)


def split(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, bytes] -> the two planes' bytes."""
    latent = rows.shape[1] * LATENT // (LATENT + ROPE)
    return rows[:, :latent], rows[:, latent:]
