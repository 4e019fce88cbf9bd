# SPDX-License-Identifier: Apache-2.0
"""A decode batch over context-parallel ranks: lengths, paged shards, and float64 references. For decode_two_gpus.py."""

import random
from dataclasses import dataclass

import torch

HEADS, LATENT, ROPE, NOPE, VALUE = 96, 512, 64, 128, 128
SCALE = (NOPE + ROPE) ** -0.5
LONGEST, BLOCK = 200_000, 64
DRIFT = 0.7
"""How much a shard's rows lean its own way: its weight in the merge then shows in every head at every length."""
STALE = 32.0
"""Cache rows that belong to no request."""


def lengths_of(batch: int, seed: int) -> list[int]:
    """Tokens of each request: one of a single token, and half of the others short rather than long."""
    chance = random.Random(1000 * batch + seed)
    if batch == 1:
        return [(LONGEST, 1, chance.randrange(2, LONGEST))[seed % 3]]
    drawn = [1, LONGEST] if seed == 0 else [1]
    while len(drawn) < batch:
        short = int(LONGEST ** chance.random())
        drawn.append(short if len(drawn) % 2 else chance.randint(1, LONGEST))
    chance.shuffle(drawn)
    return drawn


def local_length(length: int, rank: int, world: int) -> int:
    """Rows of a context that lie with a rank: token i with rank i mod W."""
    return (length - rank + world - 1) // world


def blocks_of(lengths: list[int], rank: int, world: int) -> list[int]:
    return [-(-local_length(length, rank, world) // BLOCK) for length in lengths]


def attend(query: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads [H, L + P] over `rows` [N, L + P] in float64: output [H, L], and the same over the values' magnitudes."""
    rows = rows.double()
    shares = torch.softmax(SCALE * query.double() @ rows.T, -1)
    values = rows[:, :LATENT]
    return shares @ values, shares @ values.abs()


@dataclass
class Inputs:
    """A batch's queries, this rank's shard of its contexts in shuffled blocks, and what its heads must give."""

    lengths: list[int]
    query: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    truth: torch.Tensor
    magnitude: torch.Tensor

    @classmethod
    def make(cls, batch: int, seed: int, rank: int, world: int, device: torch.device) -> "Inputs":
        """Every rank draws the same contexts, keeps its rows and forms the reference of its own heads."""
        lengths = lengths_of(batch, seed)
        generator = torch.Generator(device).manual_seed(1000 * batch + seed)
        heads, width = HEADS // world, LATENT + ROPE

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        query = draw(batch, HEADS, width).bfloat16()[:, rank * heads : (rank + 1) * heads].contiguous()
        counts = blocks_of(lengths, rank, world)
        order = list(range(1, sum(counts) + 1))  # block 0 belongs to no request: it pads the table
        random.Random(seed + rank).shuffle(order)
        cache = torch.full((len(order) + 1, BLOCK, width), STALE, dtype=torch.bfloat16, device=device)
        table = torch.zeros(batch, -(-local_length(LONGEST, 0, world) // BLOCK), dtype=torch.int32)
        shape = (batch, heads, LATENT)
        truth, magnitude = (torch.empty(shape, dtype=torch.float64, device=device) for _ in range(2))
        for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            context, drift = draw(length, width), DRIFT * draw(world, width)
            for shard in range(world):
                context[shard::world] += drift[shard]
            rows = context.bfloat16()
            del context
            truth[i], magnitude[i] = attend(query[i], rows)
            blocks, order = order[:count], order[count:]
            table[i, :count] = torch.tensor(blocks, dtype=torch.int32)
            own = rows[rank::world]
            padded = torch.full((count * BLOCK, width), STALE, dtype=rows.dtype, device=device)
            padded[: len(own)] = own
            cache[torch.tensor(blocks, dtype=torch.int64, device=device)] = padded.view(count, BLOCK, width)
        return cls(lengths, query, cache, table.to(device), truth, magnitude)


class Buffers:
    """Where a batch's inputs lie for all its checks: fixed addresses, as a CUDA graph wants them."""

    def __init__(self, pool: list[Inputs], rank: int, world: int) -> None:
        first = pool[0]
        device, batch = first.query.device, len(first.lengths)
        blocks = max(len(inputs.cache) for inputs in pool)
        self.rank, self.world, self.batch = rank, world, batch
        self.query, self.table = torch.zeros_like(first.query), torch.zeros_like(first.table)
        self.cache = first.cache.new_full((blocks, *first.cache.shape[1:]), STALE)
        self.totals, self.lens = (torch.ones(batch, dtype=torch.int32, device=device) for _ in range(2))
        self.starts_cpu = torch.arange(batch + 1, dtype=torch.int32)
        self.starts = self.starts_cpu.to(device)
        self.longest = 1

    def load(self, inputs: Inputs, *, drop: bool = False) -> None:
        """`drop`: this rank's shard counts as empty."""
        self.query.copy_(inputs.query)
        self.table.copy_(inputs.table)
        self.cache.fill_(STALE)
        self.cache[: len(inputs.cache)].copy_(inputs.cache)
        local = [0 if drop else local_length(length, self.rank, self.world) for length in inputs.lengths]
        self.totals.copy_(torch.tensor(inputs.lengths, dtype=torch.int32))
        self.lens.copy_(torch.tensor(local, dtype=torch.int32))
        self.longest = local_length(max(inputs.lengths), 0, self.world)


def error_of(output: torch.Tensor, inputs: Inputs) -> float:
    """The largest error as a share of the values' magnitude; infinite where an output is not a number."""
    share = (output.double() - inputs.truth).abs() / inputs.magnitude.clamp(min=1e-6)
    return share.nan_to_num(nan=torch.inf).max().item()
