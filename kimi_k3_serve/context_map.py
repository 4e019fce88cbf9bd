# SPDX-License-Identifier: Apache-2.0
"""Where each row of a prefill's context goes: chunk geometry -> source and destination rows. Pure.

Under decode context parallelism rank w of W keeps the tokens of a context in runs of `interleave`: W = 2,
interleave 1, a context of 5 tokens t0..t4 is t0 t2 t4 on rank 0 and t1 t3 on rank 1. Ranks must hold equally many
rows to be gathered, so rank 1's are *padded* to 3. A chunk takes the same slice of padded local rows of each of
its requests from every rank; without padding, in the order

    request 0: rank 0's rows, rank 1's rows, ...; request 1: rank 0's rows, ...

they are the chunk's N compact rows. (Not token order: attention over context does not care, since RoPE was
applied before the rows were cached.) This is the order of vLLM's `reorg_kvcache`, which is the oracle.

    one request of 5 tokens, W = 2:      rank 0      rank 1
    local rows                           t0 t2 t4    t1 t3 pad
    destination_rows                      0  1  2     3  4  -1
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PADDING = -1
Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ContextMap:
    """One chunk as one rank sees it. Arrays are views of `rows`, one entry a padded local row."""

    rows: Rows
    """[3, padded rows] int32, C-contiguous: destination, request, position; ready for one copy to the device."""
    num_rows: int
    """N: compact rows of the chunk, over all requests and ranks."""

    @property
    def destination_rows(self) -> Rows:
        """The compact row of each padded local row, or -1 for padding."""
        row: Rows = self.rows[0]
        return row

    @property
    def requests(self) -> Rows:
        """The request of each padded local row, counted within the chunk: its row of the block table."""
        row: Rows = self.rows[1]
        return row

    @property
    def positions(self) -> Rows:
        """The row's place among its request's local rows: block `position // block_size` of its table row."""
        row: Rows = self.rows[2]
        return row


def build_context_map(
    padded_local_seq_lens: Sequence[int],
    local_context_lens_allranks: Sequence[Sequence[int]],
    local_starts: Sequence[int],
    *,
    rank: int,
    world_size: int,
    out: Rows | None = None,
) -> ContextMap:
    """Map this rank's padded local rows of one chunk.

    Args:
        padded_local_seq_lens: [R] rows that every rank gives for each request of the chunk, padding included.
        local_context_lens_allranks: [R][W] rows of each request's whole context on each rank.
        local_starts: [R] where the chunk begins in each request's local rows (> 0 in a continuation).
        out: [3, sum(padded_local_seq_lens)] int32 to fill; allocated where absent.

    Raises:
        ValueError: the lists disagree about the number of requests or ranks, or the rank is not one of them.
    """
    lens = valid_lens(padded_local_seq_lens, local_context_lens_allranks, local_starts, world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of {world_size} ranks")
    padded = np.asarray(padded_local_seq_lens, dtype=np.int32)
    bounds = offsets(padded)
    firsts = offsets(lens.ravel())
    mine = firsts[:-1].reshape(lens.shape)[:, rank]  # compact row of each request's first row of this rank

    rows = np.empty((3, bounds[-1]), dtype=np.int32) if out is None else out
    destination, request, position = rows
    request[:] = np.repeat(np.arange(len(padded), dtype=np.int32), padded)
    index = np.arange(bounds[-1], dtype=np.int32)
    np.add(index, np.repeat(np.asarray(local_starts, dtype=np.int32) - bounds[:-1], padded), out=position)
    np.add(index, np.repeat(mine - bounds[:-1], padded), out=destination)
    destination[index >= np.repeat(bounds[:-1] + lens[:, rank], padded)] = PADDING
    return ContextMap(rows, int(firsts[-1]))


def gathered_rows(
    padded_local_seq_lens: Sequence[int],
    local_context_lens_allranks: Sequence[Sequence[int]],
    local_starts: Sequence[int],
    *,
    world_size: int,
) -> Rows:
    """[N] int32: where each compact row stands after an all-gather of all ranks' padded rows, rank-major.

    For the collective fallback, which gathers padding too and then takes these rows.
    """
    lens = valid_lens(padded_local_seq_lens, local_context_lens_allranks, local_starts, world_size)
    bounds = offsets(np.asarray(padded_local_seq_lens, dtype=np.int32))
    begins = bounds[:-1, None] + bounds[-1] * np.arange(world_size, dtype=np.int32)
    firsts = offsets(lens.ravel())
    shift = begins.ravel() - firsts[:-1]
    return np.arange(firsts[-1], dtype=np.int32) + np.repeat(shift, lens.ravel()).astype(np.int32)


def remote_tiles(
    padded_local_seq_lens: Sequence[int],
    local_context_lens_allranks: Sequence[Sequence[int]],
    local_starts: Sequence[int],
    *,
    rank: int,
    world_size: int,
    tile_rows: int,
) -> Rows:
    """[T, 2] int32: the compact rows that other ranks give, as runs [begin, end) of 1 to `tile_rows` rows, in order.

    They are what lies between this rank's own runs, of which each request has one.
    """
    lens = valid_lens(padded_local_seq_lens, local_context_lens_allranks, local_starts, world_size)
    firsts = offsets(lens.ravel())
    mine = firsts[:-1].reshape(lens.shape)[:, rank]
    begins = np.concatenate(([0], mine + lens[:, rank])).astype(np.int32)
    ends = np.append(mine, firsts[-1]).astype(np.int32)
    tiles = -(-(ends - begins) // tile_rows)
    bounds = offsets(tiles)
    answer = np.empty((bounds[-1], 2), dtype=np.int32)
    index = np.arange(bounds[-1], dtype=np.int32)
    answer[:, 0] = np.repeat(begins - bounds[:-1] * tile_rows, tiles) + index * tile_rows
    np.minimum(answer[:, 0] + tile_rows, np.repeat(ends, tiles), out=answer[:, 1])
    return answer


def valid_lens(
    padded_local_seq_lens: Sequence[int],
    local_context_lens_allranks: Sequence[Sequence[int]],
    local_starts: Sequence[int],
    world_size: int,
) -> Rows:
    """[R, W] rows, without padding, that each rank gives for each request."""
    context = np.asarray(local_context_lens_allranks, dtype=np.int32)
    if context.shape != (len(padded_local_seq_lens), world_size):
        raise ValueError(
            f"local context lengths are {context.shape}, "
            f"not ({len(padded_local_seq_lens)} requests, {world_size} ranks)"
        )
    if len(local_starts) != len(padded_local_seq_lens):
        raise ValueError(f"{len(local_starts)} starts for {len(padded_local_seq_lens)} requests")
    starts = np.asarray(local_starts, dtype=np.int32)[:, None]
    padded = np.asarray(padded_local_seq_lens, dtype=np.int32)[:, None]
    return np.clip(context - starts, 0, padded)


def offsets(lens: Rows) -> Rows:
    """[n + 1]: 0 and the running sums."""
    bounds = np.zeros(len(lens) + 1, dtype=np.int32)
    np.cumsum(lens, out=bounds[1:])
    return bounds
