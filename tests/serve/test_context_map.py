# SPDX-License-Identifier: Apache-2.0
"""The map against vLLM's own chunk planner and `reorg_kvcache`, over thousands of random geometries."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from context_cases import chunks, geometry
from vllm.model_executor.layers.attention.mla_attention import reorg_kvcache

from kimi_k3_serve.context_map import PADDING, build_context_map, gathered_rows, remote_tiles

WORLDS, INTERLEAVES = (2, 4, 8, 16), (1, 4, 16, 64)
CASES_EACH = 64
TILE_ROWS = 5


def batches(world_size: int, interleave: int) -> Iterator[list[Any]]:
    """Ragged contexts, some empty, some shorter than W ranks, some longer than the workspace (continuations)."""
    generator = np.random.default_rng(world_size * 1000 + interleave)
    unit = world_size * interleave
    for _ in range(CASES_EACH):
        requests = int(generator.integers(1, 7))
        longest = int(generator.choice([2, unit, 3 * unit, 12 * unit]))
        contexts = generator.integers(0, longest + 1, requests) * generator.integers(0, 2, requests)
        contexts[generator.integers(requests)] = generator.integers(1, longest + 1)
        workspace = unit * int(generator.integers(1, 9))
        yield chunks(contexts.tolist(), world_size, interleave, workspace)


@pytest.mark.parametrize("interleave", INTERLEAVES)
@pytest.mark.parametrize("world_size", WORLDS)
def test_rows_are_where_reorg_kvcache_puts_them(world_size: int, interleave: int) -> None:
    seen = {"continuation": 0, "empty shard": 0, "padding": 0, "several requests": 0}
    for chunk in (chunk for batch in batches(world_size, interleave) for chunk in batch):
        maps = [
            build_context_map(*geometry(chunk), rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        local_rows = sum(chunk.padded_local_seq_lens)
        # Each gathered row carries its own index, so that stock's answer says where every row came from.
        gathered = torch.arange(world_size * local_rows).unsqueeze(1)
        expected, _ = reorg_kvcache(
            gathered,
            gathered,
            *geometry(chunk),
            sum_seq_len=chunk.num_context_tokens,
            max_seq_len=chunk.max_seq_len,
            toks=local_rows,
        )
        assert {m.num_rows for m in maps} == {chunk.num_context_tokens}
        destinations = np.concatenate([m.destination_rows for m in maps])
        kept = np.flatnonzero(destinations != PADDING)
        published = np.full(chunk.num_context_tokens, PADDING)
        published[destinations[kept]] = kept
        # Every destination exactly once, padding never, and row for row what stock yields.
        assert np.array_equal(np.sort(destinations[kept]), np.arange(chunk.num_context_tokens))
        assert np.array_equal(published, expected.flatten())
        assert np.array_equal(gathered_rows(*geometry(chunk), world_size=world_size), published)
        for m in maps:
            assert m.rows.dtype == np.int32 and m.rows.flags.c_contiguous
            assert np.array_equal(m.requests, chunk.padded_local_token_to_seq)
            starts = np.asarray(chunk.local_starts)[m.requests]
            begins = chunk.padded_local_cu_seq_lens.numpy()[m.requests]
            assert np.array_equal(m.positions, starts + np.arange(local_rows) - begins)
        for rank, m in enumerate(maps):
            tiles = remote_tiles(*geometry(chunk), rank=rank, world_size=world_size, tile_rows=TILE_ROWS)
            sizes = tiles[:, 1] - tiles[:, 0]
            assert tiles.dtype == np.int32 and (sizes >= 1).all() and (sizes <= TILE_ROWS).all()
            covered = [row for begin, end in tiles.tolist() for row in range(begin, end)]
            mine = m.destination_rows[m.destination_rows != PADDING]
            assert np.array_equal(covered, np.setdiff1d(np.arange(m.num_rows), mine))
        seen["continuation"] += chunk.is_continuation
        seen["empty shard"] += any(not (m.destination_rows >= 0).any() for m in maps)
        seen["padding"] += bool((destinations == PADDING).any())
        seen["several requests"] += chunk.num_requests > 1
    assert all(count > 20 for count in seen.values()), seen


def test_the_example_of_the_docstring() -> None:
    maps = [build_context_map([3], [[3, 2]], [0], rank=rank, world_size=2) for rank in (0, 1)]
    assert [m.destination_rows.tolist() for m in maps] == [[0, 1, 2], [3, 4, -1]]
    assert maps[0].num_rows == 5


def test_tiles_are_what_lies_between_this_ranks_runs() -> None:
    """Two requests on two ranks: rows 0-2 and 3-4, then 5-5 and none."""
    chunk = ([3, 1], [[3, 2], [1, 0]], [0, 0])
    runs = [remote_tiles(*chunk, rank=rank, world_size=2, tile_rows=2).tolist() for rank in (0, 1)]
    assert runs == [[[3, 5]], [[0, 2], [2, 3], [5, 6]]]


def test_a_map_can_be_written_into_a_batchs_buffer() -> None:
    buffer = np.full((3, 8), 99, dtype=np.int32)
    built = build_context_map([2, 1], [[2, 2], [1, 0]], [0, 0], rank=1, world_size=2, out=buffer[:, 2:5])
    assert built.destination_rows.tolist() == [2, 3, -1]
    assert buffer[0].tolist() == [99, 99, 2, 3, -1, 99, 99, 99]


@pytest.mark.parametrize(
    ("arguments", "rank", "message"),
    [
        (([1], [[1, 1, 1]], [0]), 0, r"\(1, 3\), not \(1 requests, 2 ranks\)"),
        (([1, 1], [[1, 1]], [0, 0]), 0, r"\(1, 2\), not \(2 requests, 2 ranks\)"),
        (([1], [[1, 1]], [0, 0]), 0, "2 starts for 1 requests"),
        (([1], [[1, 1]], [0]), 2, "rank 2 is not one of 2 ranks"),
    ],
)
def test_mismatched_groups_are_refused(arguments: Any, rank: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_context_map(*arguments, rank=rank, world_size=2)
