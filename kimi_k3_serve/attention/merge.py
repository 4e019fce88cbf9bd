# SPDX-License-Identifier: Apache-2.0
"""Exact merge of attention outputs computed over disjoint shards of the context."""

import torch


def merge_partials(
    outputs: torch.Tensor, lses: torch.Tensor, *, base_e: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine partial attention over W disjoint KV shards into attention over their union.

    With o_w the softmax-weighted mean over shard w and l_w = ln(sum(exp(scores))) of that shard,
    the union's output is sum(exp(l_w) * o_w) / sum(exp(l_w)); the weights are taken relative to the
    largest l_w so that no exponential overflows (online softmax, Milakov and Gimelshein 2018).

    A shard whose LSE is not finite (empty: -inf; never written: NaN) has weight zero, and its payload
    is not read: 0 * NaN would be NaN. A row that is empty in every shard gives output 0 and LSE -inf.

    Args:
        outputs: [W, ..., L], any floating dtype.
        lses: [W, ...], natural logarithm, or base 2 with `base_e` off.

    Returns:
        output [..., L] in the dtype of `outputs`, and lse [...] in float32, in the base of `lses`.
    """
    lses = lses.float()
    lses = torch.where(torch.isfinite(lses), lses, -torch.inf)
    largest = lses.amax(dim=0)
    reference = torch.where(torch.isfinite(largest), largest, 0.0)
    weights = torch.exp(lses - reference) if base_e else torch.exp2(lses - reference)
    total = weights.sum(dim=0)

    payload = torch.where(weights.unsqueeze(-1) > 0, outputs.float(), 0.0)
    # Any shard that counts makes the total at least 1, since the largest weight is 1.
    merged = (weights.unsqueeze(-1) * payload).sum(dim=0) / torch.where(total > 0, total, 1.0).unsqueeze(-1)
    return merged.to(outputs.dtype), reference + (torch.log(total) if base_e else torch.log2(total))
