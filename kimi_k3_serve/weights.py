# SPDX-License-Identifier: Apache-2.0
"""Weights of a slice without a checkpoint: every value follows from its tensor's name and its index in it.

vLLM's dummy weights fill every tensor of every rank alike, so that shards exchanged or lost go unseen, and all prompts
answer alike. These have unit scale times a gain, differ everywhere, and are the same whatever the device, the
tensor-parallel size and the order of loading: integer arithmetic, then one float32 product.

They are made to show parity in BF16 over 8 layers, where two right engines differ by rounding:

- **Routing does not depend on rounding.** A router's near ties would be decided by it, and an expert more or less is a
  jump. So the first E columns of the residual stream (E experts) belong to the router: an embedding row holds there
  the ranks of E hashed numbers, evenly spaced; no layer writes those columns (its output rows are zero); and expert e
  of a layer reads one of them. A normalised row has them all scaled by one factor, which leaves their order.
  Each token chooses its own experts, another set in each layer, whatever else the row holds. (Levels are distinct in
  BF16 up to 128 experts.)
- **Gains** (`GAINS`): attention sharp enough that 120,000 keys do not average out (scores of deviation 3.4), and
  outputs so small beside the residual stream that 8 layers do not amplify rounding (docs/decode.md has the figures,
  tests/serve/test_seeded_weights.py keeps the margin).
"""

import hashlib
import math
from typing import Any

import torch

GAINS = {
    "q_b_proj": 2.5,
    "kv_b_proj": 1.5,
    "o_proj": 0.5,
    "down_proj": 0.5,
    "routed_expert_up_proj": 0.3,
    "lm_head": 2.5,
}
WRITERS = {"o_proj", "down_proj", "routed_expert_up_proj", "w2"}
"""Modules whose output goes to the residual stream; w2 does where the routed experts have no latent of their own."""

CHUNK = 1 << 24  # values made at a time: temporaries of about 0.5 GB


def values(
    name: str, shape: tuple[int, ...], device: torch.device | str = "cpu", *, experts: int = 0
) -> torch.Tensor:
    """The tensor `name` [shape], float32, whatever PyTorch's default dtype: vLLM loads under the model's.

    Norms are 1, a router's correction bias 0. A matrix is uniform with mean 0 and deviation gain / sqrt(fan_in), rows
    of an embedding with deviation 1; a KDA decay A_log lies about -3 (slow).

    Args:
        experts: routed experts of the model (`routed_experts`); that many columns of the residual stream are the
            router's.
    """
    module, leaf = name.split(".")[-2:]
    if module.endswith("norm"):
        return torch.ones(shape, dtype=torch.float32, device=device)
    if leaf == "e_score_correction_bias":
        return torch.zeros(shape, dtype=torch.float32, device=device)
    if module == "gate":
        return router(name, shape, device)
    deviation, mean = 1.0, 0.0
    if leaf == "A_log":
        mean = -3.0
    elif module != "embed_tokens" and len(shape) > 1:
        deviation = GAINS.get(module, 1.0) / math.sqrt(shape[-1])
    flat = torch.empty(math.prod(shape), dtype=torch.float32, device=device)
    scale = torch.tensor(deviation * math.sqrt(12), dtype=torch.float32, device=device)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        index = torch.arange(start, start + part.numel(), dtype=torch.int64, device=device)
        part.copy_(uniform(index, seed(name)) * scale)
    tensor = (flat + mean if mean else flat).view(shape)
    if module in WRITERS:
        tensor[:experts] = 0
    elif module == "embed_tokens" and experts > 1:
        ranks = tensor[:, :experts].argsort(dim=1, stable=True).argsort(dim=1, stable=True)
        tensor[:, :experts] = (ranks * 2 - (experts - 1)).float() * (math.sqrt(3) / (experts - 1))
    return tensor


def router(name: str, shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    """[experts, hidden]: expert e reads one of the router's columns, another one in each layer."""
    experts = shape[0]
    expert = torch.arange(experts, device=device)
    matrix = torch.zeros(shape, dtype=torch.float32, device=device)
    matrix[expert, (expert + seed(name)) % experts] = 1.0
    return matrix


def routed_experts(config: Any) -> int:
    """Routed experts of a layer; 0 without any."""
    name = "n_routed_experts" if config.model_type == "deepseek_v3" else "num_experts"
    return getattr(config, name, None) or 0


def seed(name: str) -> int:
    """64 bits of a tensor's name, signed."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform(index: torch.Tensor, seed: int) -> torch.Tensor:
    """[-0.5, 0.5) float32 in steps of 2**-24: the SplitMix64 of `seed` at each int64 index (Steele et al. 2014)."""
    z = index * signed(0x9E3779B97F4A7C15) + seed
    z = (z ^ shift(z, 30)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ shift(z, 27)) * signed(0x94D049BB133111EB)
    bits = shift(z ^ shift(z, 31), 40)
    return (bits - (1 << 23)).float() * 2.0**-24


def shift(z: torch.Tensor, places: int) -> torch.Tensor:
    """Logical right shift of int64, which torch shifts arithmetically."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
