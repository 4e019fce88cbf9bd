# SPDX-License-Identifier: Apache-2.0
"""Chunks, caches, expected planes and faults of the protocol for tests and the benchmark, without vLLM."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch

from kimi_k3_serve.publish.chunks import DeviceChunk, Geometry, upload
from kimi_k3_serve.publish.layout import SLOTS, Layout

LATENT, ROPE = 512, 64
SENTINEL = 0x7A
STEPS = ("before publishing", "before waiting", "while consuming")
"""Where a rank may be late."""
MUTATIONS = {
    "one slot": "while consuming",
    "no wait": "before publishing",
    "frozen epoch": "before publishing",
    "no output collective": "while consuming",
}
"""Faults of the protocol, and where a late rank shows each."""
LATE = 100_000_000
"""Clock cycles, about 50 ms: the other ranks get as far as a fault lets them."""


class Protocol:
    """What a rank does in layers of three chunks, the last of a layer in slot 0, where the next begins.

    With `mutate`, one of `MUTATIONS`: all chunks in one slot, no wait for the others, an epoch that does not advance,
    no output collective at a layer's end.
    """

    def __init__(self, mutate: str, epochs: torch.Tensor | list[int]) -> None:
        """`epochs`: of the rank's publisher, by ubatch; only the first is used."""
        self.mutate, self.waits = mutate, mutate != "no wait"
        self._epochs, self._frozen = epochs, int(epochs[0])
        self._freeze()  # so that nothing is loaded while a rank waits

    def turns(self, chunks: int) -> Iterator[tuple[int, bool]]:
        """Of each chunk its slot, and whether an output collective follows it."""
        for index in range(chunks):
            slot = 0 if self.mutate == "one slot" else index % 3 % SLOTS
            yield slot, index % 3 == 2 and self.mutate != "no output collective"

    def before_push(self) -> None:
        if self.mutate == "frozen epoch":
            self._freeze()

    def _freeze(self) -> None:
        if isinstance(self._epochs, torch.Tensor):
            self._epochs[0].fill_(self._frozen)  # an assignment would make the host wait for the stream
        else:
            self._epochs[0] = self._frozen


def geometry(contexts: Sequence[int], world_size: int, starts: Sequence[int] | None = None) -> Geometry:
    """A chunk that takes the rest of each context from a local start on (interleave 1)."""
    begins = list(starts or [0] * len(contexts))
    padded = [-(-n // world_size) - begin for n, begin in zip(contexts, begins, strict=True)]
    lens = [[(n - rank + world_size - 1) // world_size for rank in range(world_size)] for n in contexts]
    return padded, lens, begins


class PagedWorld:
    """Random raw rows of every rank in paged caches [W, blocks, block, bytes], and block tables [W, R, width]."""

    def __init__(
        self,
        contexts: Sequence[int],
        world_size: int,
        row_bytes: int,
        *,
        device: torch.device | str,
        starts: Sequence[int] | None = None,
        block: int = 64,
        seed: int = 0,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self.geometry, self.world_size, self.block = (
            geometry(contexts, world_size, starts),
            world_size,
            block,
        )
        generator = torch.Generator(device).manual_seed(seed)
        width = -(-max(-(-n // world_size) for n in contexts) // block)
        blocks = width * len(contexts)
        self.caches, self.tables = {}, {}
        for rank in range(world_size):
            raw = torch.randint(
                0,
                256,
                (blocks, block, row_bytes),
                dtype=torch.uint8,
                device=device,
                generator=generator,
            )
            table = torch.randperm(blocks, device=device, generator=generator).view(len(contexts), width)
            if ranks is None or rank in ranks:
                self.caches[rank], self.tables[rank] = raw, table.int()

    def chunk(
        self, rank: int, device: torch.device, *, tiles: bool = False, gathered: bool = False
    ) -> DeviceChunk:
        [made] = upload(
            [self.geometry],
            rank=rank,
            world_size=self.world_size,
            device=device,
            tiles=tiles,
            gathered=gathered,
        )
        return made

    def local_rows(self, rank: int) -> torch.Tensor:
        """[padded rows, bytes] of a rank, request after request, as a gather would yield them."""
        padded, _, starts = self.geometry
        raw, table = self.caches[rank].flatten(0, 1), self.tables[rank].long()
        parts = []
        for request, (count, start) in enumerate(zip(padded, starts, strict=True)):
            position = torch.arange(start, start + count, device=raw.device)
            parts.append(raw[table[request, position // self.block] * self.block + position % self.block])
        return torch.cat(parts)

    def expected(self) -> torch.Tensor:
        """[N, bytes]: what every rank must hold. All caches must be here."""
        return reorganise(
            torch.cat([self.local_rows(rank) for rank in range(self.world_size)]),
            self.geometry,
            self.world_size,
        )


def reorganise(gathered: torch.Tensor, chunk: Geometry, world_size: int) -> torch.Tensor:
    """The operations of vLLM's `reorg_kvcache` on one plane: a slice for each request and rank, then `torch.cat`."""
    padded, lens, starts = chunk
    per_rank = sum(padded)
    parts = []
    for count, context, start, begin in zip(
        padded, lens, starts, accumulate(padded, initial=0), strict=False
    ):
        for rank in range(world_size):
            valid = min(max(0, context[rank] - start), count)
            if valid:
                parts.append(gathered[rank * per_rank + begin :][:valid])
    return torch.cat(parts)


def changed_elsewhere(
    layout: Layout, before: torch.Tensor, after: torch.Tensor, ubatch: int, slot: int, rows: int
) -> torch.Tensor:
    """Bytes of a rank's memory that a publication changed beside the slot's signals and its first `rows` rows."""
    after, begin = after.clone(), layout.slot_offset(ubatch, slot)
    for offset, nbytes in (
        (0, 8 * layout.world_size),
        (layout.kv_c_offset, rows * layout.latent_bytes),
        (layout.k_pe_offset, rows * layout.rope_bytes),
    ):
        part = slice(begin + offset, begin + offset + nbytes)
        after[part] = before[part]
    return (after != before).sum()
