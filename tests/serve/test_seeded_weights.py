# SPDX-License-Identifier: Apache-2.0
"""The weights of a slice show a fault in BF16: rounding moves logprobs far less than any fault does."""

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from kimi_k3_serve.slice_reference import Cache, SliceReference, read_config

TOLERANCE = 0.3  # nats: what the parity gate takes for BF16
CONTEXT, DECODES, HEADS = 400, 8, 8
CONFIG = {
    "model_type": "kimi_linear",
    "vocab_size": 2048,
    "hidden_size": 384,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": HEADS,
    "q_lora_rank": 192,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": 32,
    "num_experts_per_token": 8,
    "num_shared_experts": 2,
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 192,
    "latent_moe_use_norm": True,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
LAYERS = {
    "mla-slice": {"kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5, 6, 7, 8]},
    "slice": {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8]},
}
LINEAR = {"num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4}


class Engine(SliceReference):
    """The reference as an engine computes it: every result rounded to BF16, decode over two shards of the context.

    `fault` breaks decode as context parallelism can: a shard dropped from the merge, the ranks' heads exchanged, one
    rank's LSE in base 2, a block in mid-prompt read twice and another not at all.
    """

    fault = "none"
    row_ranks = 1  # that a row-parallel projection is summed over

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rounded(super().norm(x, name))

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        if self.row_ranks == 1 or not name.endswith(("o_proj", "down_proj")):
            return rounded(linear(x, weight))
        pairs = zip(x.chunk(self.row_ranks, -1), weight.chunk(self.row_ranks, -1), strict=True)
        return rounded(sum((rounded(linear(*pair)) for pair in pairs), torch.zeros(())))

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, past: int) -> torch.Tensor:
        if not past:
            return rounded(super().attend(query, key, value, past))
        if self.fault == "block":
            middle = len(key) // 2
            key, value = key.clone(), value.clone()
            key[middle : middle + 16], value[middle : middle + 16] = key[:16], value[:16]
        outputs, lses = [], []
        for rank in range(2):
            scores = torch.einsum("qhd,khd->hqk", query, key[rank::2]) * query.shape[-1] ** -0.5
            outputs.append(rounded(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[rank::2])))
            lses.append(scores.logsumexp(-1).T)
        if self.fault == "shard":
            lses[1] = torch.full_like(lses[1], -torch.inf)
        if self.fault == "bases":
            lses[1] = lses[1] / torch.log(torch.tensor(2.0))
        weights = torch.stack(lses).softmax(0).unsqueeze(-1)
        merged = rounded((weights * torch.stack(outputs)).sum(0))
        return merged.roll(HEADS // 2, 1) if self.fault == "heads" else merged


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def decode(model: SliceReference, tokens: list[int]) -> torch.Tensor:
    """[DECODES, vocabulary] logprobs, each token on its own behind the context."""
    cache: Cache = {}
    model.logits(tokens[:CONTEXT], cache)
    return torch.stack([torch.log_softmax(model.logits([token], cache), -1) for token in tokens[CONTEXT:]])


def distances(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[DECODES] largest difference of a token that is among either side's 20 most probable."""
    both = [(left - right).abs().gather(-1, side.topk(20, -1).indices).amax(-1) for side in (left, right)]
    return torch.maximum(*both)


@pytest.mark.parametrize("kind", LAYERS)
def test_faults_stand_out_from_rounding(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"linear_attn_config": LINEAR | LAYERS[kind]}))
    config = read_config(tmp_path)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, CONFIG["vocab_size"], (CONTEXT + DECODES,), generator=generator).tolist()
    exact = decode(SliceReference(config), tokens)
    engine = Engine(config)
    right = decode(engine, tokens)
    engine.row_ranks = 2
    other = decode(engine, tokens)
    # Half the tolerance: with the real widths, more prompts and kernels of other orders it has room to grow.
    assert distances(right, exact).max() < TOLERANCE / 2
    assert distances(right, other).max() < TOLERANCE / 2
    engine.row_ranks = 1
    for fault in ("shard", "heads", "bases", "block"):
        engine.fault = fault
        found = distances(right, decode(engine, tokens))
        # The gate takes the largest difference of a prompt; a block of 16 tokens shows where they are attended to.
        assert found.max() > 2 * TOLERANCE, (fault, found)
        if fault != "block":
            assert found.median() > 2 * TOLERANCE, (fault, found)
