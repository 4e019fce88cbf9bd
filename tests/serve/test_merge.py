# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from kimi_k3_serve.attention.merge import merge_partials


def oracle(query: torch.Tensor, rows: torch.Tensor, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all rows at once, in float64: [H, value_dim] and [H]."""
    scores = query.double() @ rows.double().T
    return torch.softmax(scores, -1) @ rows[:, :value_dim].double(), torch.logsumexp(scores, -1)


def partials(
    query: torch.Tensor, shards: list[torch.Tensor], value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 partial outputs and LSEs of each shard; an empty shard gives zeros and -inf."""
    outputs, lses = [], []
    for rows in shards:
        if len(rows) == 0:
            outputs.append(torch.zeros(len(query), value_dim))
            lses.append(torch.full((len(query),), -torch.inf))
            continue
        scores = query @ rows.T
        outputs.append(torch.softmax(scores, -1) @ rows[:, :value_dim])
        lses.append(torch.logsumexp(scores, -1))
    return torch.stack(outputs), torch.stack(lses)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 3, 8, 200])
@pytest.mark.parametrize("sharpness", [0.1, 1.0, 20.0])
def test_equals_attention_over_the_union(world_size: int, length: int, sharpness: float) -> None:
    torch.manual_seed(world_size * 1000 + length)
    query, rows = torch.randn(4, 32) * sharpness, torch.randn(length, 32)
    shards = [rows[rank::world_size] for rank in range(world_size)]  # W > length leaves shards empty
    output, lse = merge_partials(*partials(query, shards, 16))
    expected_output, expected_lse = oracle(query, rows, 16)
    torch.testing.assert_close(output.double(), expected_output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("lse_of_empty", [-math.inf, math.nan])
def test_an_empty_shards_payload_is_never_read(poison: float, lse_of_empty: float) -> None:
    outputs = torch.randn(3, 2, 4, 8)
    lses = torch.randn(3, 2, 4)
    expected = merge_partials(outputs[:2], lses[:2])
    outputs[2], lses[2] = poison, lse_of_empty
    output, lse = merge_partials(outputs, lses)
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(lse, expected[1])


def test_a_row_that_is_empty_everywhere_gives_zero() -> None:
    outputs = torch.full((2, 1, 1, 8), math.nan)
    output, lse = merge_partials(outputs, torch.full((2, 1, 1), -math.inf))
    assert torch.equal(output, torch.zeros(1, 1, 8))
    assert lse.item() == -math.inf


def test_large_lses_do_not_overflow() -> None:
    outputs = torch.stack([torch.full((1, 4), 1.0), torch.full((1, 4), 3.0)])
    output, lse = merge_partials(outputs, torch.tensor([[5000.0], [5000.0]]))
    torch.testing.assert_close(output, torch.full((1, 4), 2.0))
    assert lse.item() == pytest.approx(5000.0 + math.log(2))


def test_mixed_lse_bases_are_not_silently_right() -> None:
    """The control of the equality above: one shard's LSE in base 2 gives another answer."""
    torch.manual_seed(0)
    query, rows = torch.randn(4, 32), torch.randn(64, 32)
    outputs, lses = partials(query, [rows[::2], rows[1::2]], 16)
    lses[1] *= math.log2(math.e)
    output, _ = merge_partials(outputs, lses)
    assert (output.double() - oracle(query, rows, 16)[0]).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_output_keeps_its_dtype(dtype: torch.dtype) -> None:
    output, lse = merge_partials(torch.randn(2, 3, 8, dtype=dtype), torch.randn(2, 3))
    assert output.dtype == dtype and lse.dtype == torch.float32
