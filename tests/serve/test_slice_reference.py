# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
import torch

from kimi_k3_serve.attention.cpu_mla import attend_paged
from kimi_k3_serve.slice_reference import Cache, SliceReference, answer, read_config

CONFIG = {
    "model_type": "kimi_linear",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 20,
    "routed_expert_hidden_size": 28,
    "latent_moe_use_norm": True,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


KDA = {
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 3,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    }
}


def model(folder: Path, **changes: object) -> SliceReference:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return SliceReference(read_config(folder))


@pytest.mark.parametrize("changes", [{}, KDA])
def test_one_token_at_a_time_equals_all_at_once(tmp_path: Path, changes: dict[str, object]) -> None:
    reference = model(tmp_path, **changes)
    tokens = [5, 9, 77, 3, 100, 41]
    cache: Cache = {}
    stepwise = [reference.logits([token], cache) for token in tokens]
    for count in range(1, len(tokens) + 1):
        torch.testing.assert_close(
            reference.logits(tokens[:count], {}), stepwise[count - 1], rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("changes", [{}, KDA])
def test_every_earlier_token_matters(tmp_path: Path, changes: dict[str, object]) -> None:
    reference = model(tmp_path, **changes)
    tokens = [5, 9, 77, 3, 100, 41]
    whole = reference.logits(tokens, {})
    for position in range(len(tokens)):
        changed = [*tokens[:position], 17, *tokens[position + 1 :]]
        assert (reference.logits(changed, {}) - whole).abs().max() > 1e-3


def test_attention_equals_the_absorbed_form_that_decode_runs(tmp_path: Path) -> None:
    """W_UK and W_UV taken into query and output, one latent row a token: `attend_paged`."""
    reference = model(tmp_path, mla_use_output_gate=False)
    c, prefix, w = reference.config, "model.layers.0.self_attn", reference.weights
    x = torch.randn(7, 48, generator=torch.Generator().manual_seed(0))
    expected = reference.attention(prefix, x, {}, 0)[-1]

    latent, shared = reference.project(f"{prefix}.kv_a_proj_with_mqa", x).split([32, 8], -1)
    rows = torch.cat([reference.norm(latent, f"{prefix}.kv_a_layernorm"), shared], -1)
    up = w[f"{prefix}.kv_b_proj.weight"].view(3, 16 + 12, 32)
    query = reference.norm(reference.project(f"{prefix}.q_a_proj", x[-1:]), f"{prefix}.q_a_layernorm")
    nope, rope = reference.project(f"{prefix}.q_b_proj", query).view(1, 3, 24).split([16, 8], -1)
    absorbed = torch.cat([torch.einsum("bhd,hdl->bhl", nope, up[:, :16]), rope], -1)
    output, _ = attend_paged(
        absorbed, rows.unsqueeze(0), torch.tensor([[0]]), torch.tensor([7]), scale=24**-0.5, value_dim=32
    )
    value = torch.einsum("bhl,hdl->bhd", output, up[:, 16:]).flatten(1)
    assert c.num_attention_heads == 3
    torch.testing.assert_close(
        reference.project(f"{prefix}.o_proj", value)[0], expected, rtol=1e-4, atol=1e-4
    )


def test_the_router_weighs_by_scores_and_chooses_by_biased_ones(tmp_path: Path) -> None:
    reference = model(tmp_path)
    prefix, x = (
        "model.layers.1.block_sparse_moe",
        torch.randn(4, 48, generator=torch.Generator().manual_seed(1)),
    )
    bias = reference.weights[f"{prefix}.gate.e_score_correction_bias"]
    bias.zero_()
    bias[:2] = 10.0  # always experts 0 and 1
    scores = reference.project(f"{prefix}.gate", x).sigmoid()[:, :2]
    share = scores / scores.sum(-1, keepdim=True)
    latent = reference.project(f"{prefix}.routed_expert_down_proj", x)
    routed = torch.zeros(4, 28)
    for expert in range(2):
        name = f"{prefix}.experts.{expert}"
        inner = torch.nn.functional.silu(reference.project(f"{name}.w1", latent))
        inner = inner * reference.project(f"{name}.w3", latent)
        routed += share[:, expert : expert + 1] * reference.project(f"{name}.w2", inner)
    routed = reference.norm(routed, f"{prefix}.routed_expert_norm")
    expected = reference.project(f"{prefix}.routed_expert_up_proj", routed)
    expected = expected + reference.mlp(f"{prefix}.shared_experts", x)
    torch.testing.assert_close(reference.moe(prefix, x), expected, rtol=1e-4, atol=1e-4)


def test_answers_have_the_form_of_the_other_reference(tmp_path: Path) -> None:
    (found,) = answer(model(tmp_path), [{"id": "a", "prompt": [1, 2, 3], "output_tokens": 4}], top_k=3)
    assert found["id"] == "a" and len(found["tokens"]) == 4
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert len(top) == 3 and max(top, key=lambda key: top[key]) == str(token)


def test_a_continuation_is_the_context_of_what_follows(tmp_path: Path) -> None:
    reference = model(tmp_path, **KDA)
    asked = {"id": "a", "prompt": [1, 2, 3], "output_tokens": 4}
    (free,) = answer(reference, [asked])
    (same,) = answer(reference, [asked | {"continuation": free["tokens"]}])
    assert same == free
    forced = [*free["tokens"][:1], 90, 91, 92]
    (other,) = answer(reference, [asked | {"continuation": forced}])
    assert other["top_logprobs"][:2] == free["top_logprobs"][:2]
    whole = torch.log_softmax(reference.logits([1, 2, 3, *forced[:3]], {}), -1)
    for token, logprob in other["top_logprobs"][3].items():
        assert logprob == pytest.approx(float(whole[int(token)]), abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_res_block_size": 12}, "attention residuals"),
        ({"hidden_act": "situ"}, "situ"),
        ({"mla_use_nope": False}, "RoPE"),
    ],
)
def test_what_it_does_not_have_it_refuses(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model(tmp_path, **changes)
