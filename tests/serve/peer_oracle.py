# SPDX-License-Identifier: Apache-2.0
"""Inputs of a merge that hold every trap, and what the merge must give, in float64."""

import math

import torch

TRAPS = ("one shard empty", "all shards empty", "NaN behind -inf", "inf behind NaN", "far apart", "plain")


def partials(
    world_size: int, tokens: int, heads: int, value: int, seed: int, *, base_e: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 outputs [W, B, H, value] and LSEs [W, B, H]; the rows go through TRAPS in turn."""
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(world_size, tokens, heads, value, generator=generator)
    lses = torch.randn(world_size, tokens, heads, generator=generator) * 4
    for row in range(tokens * heads):
        token, head = divmod(row, heads)
        shard = row % world_size
        trap = TRAPS[row % len(TRAPS)]
        if trap == "one shard empty":
            outputs[shard, token, head], lses[shard, token, head] = 0.0, -math.inf
        elif trap == "all shards empty":
            outputs[:, token, head], lses[:, token, head] = math.nan, -math.inf
        elif trap == "NaN behind -inf":
            outputs[shard, token, head], lses[shard, token, head] = math.nan, -math.inf
        elif trap == "inf behind NaN":
            outputs[shard, token, head], lses[shard, token, head] = math.inf, math.nan
        elif trap == "far apart":
            lses[shard, token, head] += 500.0
    return outputs, lses if base_e else lses * math.log2(math.e)


def merged(outputs: torch.Tensor, lses: torch.Tensor, *, base_e: bool = True) -> torch.Tensor:
    """[B, H, value] float64: the softmax-weighted mean over shards, of those whose LSE is finite."""
    lses = lses.double() * (1.0 if base_e else math.log(2.0))
    result = torch.zeros(outputs.shape[1:], dtype=torch.float64)
    for token in range(outputs.shape[1]):
        for head in range(outputs.shape[2]):
            alive = [w for w in range(outputs.shape[0]) if math.isfinite(lses[w, token, head])]
            if alive:
                weights = torch.softmax(lses[alive, token, head], 0)
                result[token, head] = weights @ outputs[alive, token, head].double()
    return result
