# SPDX-License-Identifier: Apache-2.0
import math
import random

import pytest
import torch

from kimi_k3_serve.attention.cpu_mla import attend_paged
from kimi_k3_serve.cpu import cp_gather_cache

BLOCK, DIM, VALUE = 16, 24, 16


def paged(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """A cache full of NaN but for the rows of each request, its block table, and those rows in order."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    width = max(1, -(-max(lengths) // BLOCK))
    ids = rng.sample(range(100), width * len(lengths))
    table = torch.tensor(ids, dtype=torch.int32).view(len(lengths), width)
    cache = torch.full((100, BLOCK, DIM), math.nan)
    rows = [torch.randn(length, DIM) for length in lengths]
    for i, own in enumerate(rows):
        for position, row in enumerate(own):
            cache[table[i, position // BLOCK], position % BLOCK] = row
    return cache, table, rows


@pytest.mark.parametrize("lengths", [[1], [16], [17, 5], [0, 33, 1], [100, 0, 64, 15], [0]])
def test_attend_paged_equals_dense_attention(lengths: list[int]) -> None:
    cache, table, rows = paged(lengths, seed=len(lengths))
    query = torch.randn(len(lengths), 4, DIM)
    output, lse = attend_paged(query, cache, table, torch.tensor(lengths), scale=0.3, value_dim=VALUE)
    for i, own in enumerate(rows):
        if len(own) == 0:
            assert torch.equal(output[i], torch.zeros(4, VALUE))
            assert torch.equal(lse[i], torch.full((4,), -math.inf))
            continue
        scores = 0.3 * query[i].double() @ own.double().T
        expected = torch.softmax(scores, -1) @ own[:, :VALUE].double()
        torch.testing.assert_close(output[i].double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[i].double(), torch.logsumexp(scores, -1), rtol=1e-5, atol=1e-6)


def test_cp_gather_cache_copies_each_requests_rows_from_its_start() -> None:
    cache, table, rows = paged([40, 7, 90], seed=5)
    starts, counts = [3, 0, 17], [20, 7, 60]
    bounds = torch.tensor([0, 20, 27, 87], dtype=torch.int32)
    out = torch.full((90, DIM), 7.0)
    cp_gather_cache(cache, out, table, bounds, 3, torch.tensor(starts, dtype=torch.int32))
    expected = torch.cat([own[s : s + c] for own, s, c in zip(rows, starts, counts, strict=True)])
    assert torch.equal(out[:87], expected)
    assert torch.equal(out[87:], torch.full((3, DIM), 7.0))
