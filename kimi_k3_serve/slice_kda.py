# SPDX-License-Identifier: Apache-2.0
"""Kimi delta attention of a slice in float32, one token after the other: the recurrence itself, without chunks.

For each head, with the keys' and queries' L2 norm 1, decay a_t in (0, 1] of each key dimension and step b_t in (0, 1),
the state S [K, V] follows (Kimi Linear, arXiv 2510.26692, equation 1)

    S_t = S_(t-1) decayed by a_t;  S_t += b_t k_t (v_t - S_t^T k_t)^T;  o_t = S_t^T q_t / sqrt(K)

Queries, keys and values have passed a causal convolution over a few tokens and SiLU.
"""

from typing import Any

import torch
from torch.nn.functional import pad, silu, softplus

NORM_EPS = 1e-6  # of the L2 norms
OUTPUT_EPS = 1e-5  # of the output norm


def attend(model: Any, prefix: str, x: torch.Tensor, cache: dict[int, Any], index: int) -> torch.Tensor:
    """The layer `prefix` on x [T, hidden], which follows what `cache[index]` has seen; returns [T, hidden]."""
    linear, weights = model.config.linear_attn_config, model.weights
    heads, dim, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    past, state = cache.get(index) or (None, x.new_zeros(heads, dim, dim))

    mixed = torch.cat([model.project(f"{prefix}.{part}_proj", x) for part in "qkv"], -1)
    seen = pad(mixed, (0, 0, taps - 1, 0)) if past is None else torch.cat([past, mixed])
    taps_weight = torch.cat([weights[f"{prefix}.{part}_conv1d.weight"] for part in "qkv"])[:, 0]
    convolved = silu(torch.einsum("tcw,cw->tc", seen.unfold(0, taps, 1), taps_weight))
    query, key, value = (part.view(-1, heads, dim) for part in convolved.chunk(3, -1))
    query, key = (part * (part.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for part in (query, key))
    query = query * dim**-0.5

    raw = model.project(f"{prefix}.f_b_proj", model.project(f"{prefix}.f_a_proj", x))
    raw = (raw + weights[f"{prefix}.dt_bias"]).view(-1, heads, dim)
    rate = weights[f"{prefix}.A_log"].exp().view(-1, 1)
    bound = linear.get("gate_lower_bound")
    decay = (-rate * softplus(raw) if bound is None else bound * (rate * raw).sigmoid()).exp()
    step = model.project(f"{prefix}.b_proj", x).sigmoid()

    outputs = torch.empty_like(value)
    for t in range(len(x)):
        state = state * decay[t].unsqueeze(-1)
        error = (value[t] - torch.einsum("hkv,hk->hv", state, key[t])) * step[t].unsqueeze(-1)
        state = state + key[t].unsqueeze(-1) * error.unsqueeze(-2)
        outputs[t] = torch.einsum("hkv,hk->hv", state, query[t])
    cache[index] = seen[len(seen) - taps + 1 :], state

    normed = outputs * (outputs.square().mean(-1, keepdim=True) + OUTPUT_EPS).rsqrt()
    if linear.get("use_full_rank_gate", False):
        gate = model.project(f"{prefix}.g_proj", x)
    else:
        gate = model.project(f"{prefix}.g_b_proj", model.project(f"{prefix}.g_a_proj", x))
    gated = normed * weights[f"{prefix}.o_norm.weight"] * gate.view(-1, heads, dim).sigmoid()
    output: torch.Tensor = model.project(f"{prefix}.o_proj", gated.flatten(1))
    return output
