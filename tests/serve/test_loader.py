# SPDX-License-Identifier: Apache-2.0
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kimi_k3_serve import checkpoint, loader
from kimi_k3_serve.checkpoint import CONFIG, shapes
from kimi_k3_serve.tensors import kda, tensors
from kimi_k3_serve.weights import CHUNK, GAINS, routed_experts, uniform, values

MOE = {
    **checkpoint.config(heads=8),
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
}


def splitmix64(index: int, seed: int) -> float:
    """The same in Python's integers."""
    mask = (1 << 64) - 1
    z = (index * 0x9E3779B97F4A7C15 + seed) & mask
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return (((z ^ (z >> 31)) >> 40) - (1 << 23)) / (1 << 24)


@pytest.mark.parametrize("seed", [0, 1, -5, (1 << 63) - 1, -(1 << 63)])
def test_the_bits_are_splitmix64s(seed: int) -> None:
    index = torch.tensor([0, 1, 2, 1000, 1 << 40])
    expected = [splitmix64(i, seed % (1 << 64)) for i in index.tolist()]
    assert uniform(index, seed).tolist() == expected


@pytest.mark.parametrize("module", ["q_b_proj", "kv_b_proj", "o_proj", "gate_proj"])
def test_a_matrix_has_unit_scale_times_its_gain(module: str) -> None:
    matrix = values(f"model.layers.3.self_attn.{module}.weight", (512, 1024))
    assert matrix.std().item() == pytest.approx(GAINS.get(module, 1.0) / math.sqrt(1024), rel=0.01)
    assert abs(matrix.mean().item()) < 5 * matrix.std().item() / math.sqrt(matrix.numel())
    assert matrix.unique().numel() > 0.95 * matrix.numel()


def test_names_and_indices_decide_not_the_order_of_making() -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    wide, tall = values(name, (8, 16)).flatten(), values(name, (16, 8)).flatten()
    torch.testing.assert_close(wide, tall * math.sqrt(8 / 16), rtol=1e-6, atol=0.0)
    assert not torch.equal(values(name, (8, 16)), values(name.replace("0", "1"), (8, 16)))
    assert torch.equal(values("model.norm.weight", (4,)), torch.ones(4))


def test_a_tensor_longer_than_a_chunk_goes_on_where_the_chunk_ended() -> None:
    tail = uniform(torch.arange(CHUNK - 2, CHUNK + 2), 5)
    assert len(set(tail.tolist())) == 4
    whole = values("model.embed_tokens.weight", (CHUNK + 4,))
    assert not torch.equal(whole[:4], whole[CHUNK : CHUNK + 4])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (400, 24)),
        ("model.layers.0.self_attn.o_proj.weight", (24, 40)),
        ("model.layers.0.self_attn.A_log", (96,)),
        ("model.layers.0.self_attn.dt_bias", (96,)),
        ("model.layers.1.block_sparse_moe.gate.weight", (16, 24)),
        ("model.norm.weight", (24,)),
    ],
)
def test_values_are_the_same_under_the_models_default_dtype(name: str, shape: tuple[int, ...]) -> None:
    """vLLM loads under it: ranks of rounded values would route some tokens to other experts than the reference."""
    expected = values(name, shape, experts=16)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = values(name, shape, experts=16)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_deepseeks_tensors_are_those_of_the_small_checkpoint() -> None:
    assert dict(tensors(SimpleNamespace(**CONFIG, topk_method="noaux_tc"))) == shapes()


def test_kimis_tensors_cover_every_kind_of_layer() -> None:
    from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

    linear = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 8}
    config = KimiLinearConfig(
        **{"hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
        **{
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
        },
        **{
            "num_experts": 3,
            "num_shared_experts": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
        **{"mla_use_output_gate": True, "routed_expert_hidden_size": 16, "latent_moe_use_norm": True},
        linear_attn_config=linear | {"short_conv_kernel_size": 4},
        attn_res_block_size=2,
    )
    named = dict(tensors(config))
    assert named["model.layers.0.self_attn.A_log"] == (4,)
    assert named["model.layers.0.self_attn.k_conv1d.weight"] == (32, 1, 4)
    assert named["model.layers.0.self_attn.g_b_proj.weight"] == (32, 8)
    assert "model.layers.0.self_attn.g_proj.weight" not in named
    assert named["model.layers.0.mlp.gate_proj.weight"] == (11008, 32)
    assert "model.layers.3.self_attn.A_log" not in named
    assert named["model.layers.3.self_attn.g_proj.weight"] == (32, 32)
    assert named["model.layers.3.block_sparse_moe.experts.2.w2.weight"] == (16, 24)
    assert named["model.layers.3.mlp_res_proj.weight"] == (1, 32)
    assert named["model.output_attn_res_proj.weight"] == (1, 32)


def test_a_full_rank_gate_of_kda_is_one_matrix() -> None:
    linear = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "use_full_rank_gate": True}
    named = dict(kda(SimpleNamespace(hidden_size=32, linear_attn_config=linear)))
    assert named["self_attn.g_proj.weight"] == (32, 32)
    assert not any("g_a_proj" in name or "g_b_proj" in name for name in named)


def test_the_router_reads_columns_that_only_the_embedding_writes() -> None:
    """So a token's experts follow from the token alone, in each layer others, all chosen about equally often."""
    experts, hidden, vocabulary, top_k = 8, 64, 512, 2
    assert routed_experts(SimpleNamespace(model_type="kimi_linear", num_experts=experts)) == experts
    embedding = values("model.embed_tokens.weight", (vocabulary, hidden), experts=experts)
    levels = embedding[:, :experts].sort(-1).values
    torch.testing.assert_close(levels, levels[:1].expand_as(levels))
    assert levels.diff().min() == pytest.approx(2 * math.sqrt(3) / (experts - 1), rel=1e-4)
    for writer in ("self_attn.o_proj", "mlp.down_proj", "block_sparse_moe.routed_expert_up_proj"):
        written = values(f"model.layers.0.{writer}.weight", (hidden, 32), experts=experts)
        assert written[:experts].eq(0).all() and written[experts:].ne(0).float().mean() > 0.99
    routers = [
        values(f"model.layers.{layer}.block_sparse_moe.gate.weight", (experts, hidden), experts=experts)
        for layer in range(4)
    ]
    # Whatever the other columns hold, and however the row is scaled.
    rows = torch.cat([embedding[:, :experts], 7 * torch.randn(vocabulary, hidden - experts)], -1)
    for router in routers:
        chosen = (0.31 * rows @ router.T).topk(top_k, -1).indices
        assert torch.equal(chosen, (embedding @ router.T).topk(top_k, -1).indices)
        shares = chosen.flatten().bincount(minlength=experts) / chosen.numel()
        assert (shares - 1 / experts).abs().max() < 0.05
    assert len({tuple((embedding[0] @ router.T).topk(top_k).indices.tolist()) for router in routers}) > 1


def test_another_architecture_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'llama'"):
        dict(tensors(SimpleNamespace(model_type="llama")))


def test_a_parameter_without_a_value_is_an_error() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.new = torch.nn.Parameter(torch.empty(2))

        def load_weights(self, weights: object) -> set[str]:
            return set()

    with pytest.raises(loader.UnknownParameterError, match="1 parameters of Model got no value: new"):
        loader.fill(Model(), SimpleNamespace(**CONFIG))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parameters of every rank of TP1, TP2 and TP8, through vLLM's own model and weight loaders."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "config.json").write_text(json.dumps(MOE))
    script = Path(__file__).with_name("seeded_shards.py")
    command = [sys.executable, str(script), str(folder), str(folder), "1", "2", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("world_size", [2, 8])
def test_shards_are_cut_from_the_tensors_of_tp1(shards: Path, world_size: int) -> None:
    """Dense and routed layers: all ranks together hold every row once, or each the whole."""
    whole, *ranks = (torch.load(shards / f"tp{n}-{r}.pt") for n in (1, world_size) for r in range(n))
    sharded = 0
    for name, full in whole.items():
        parts = [rank[name].detach() for rank in ranks]
        cut = [d for d in range(full.dim()) if parts[0].shape[d] != full.shape[d]]
        if not cut:
            assert all(torch.equal(part, full) for part in parts), name
            continue
        sharded += 1
        assert torch.equal(by_first_value(torch.cat(parts, cut[0]), cut[0]), by_first_value(full, cut[0])), (
            name
        )
    assert all(whole.keys() == rank.keys() for rank in ranks) and sharded >= 14


def by_first_value(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The slices along `dim` in the order of their first value: merged projections interleave their shards."""
    rows = tensor.detach().movedim(dim, 0).flatten(1)
    return rows[rows[:, 0].argsort()]
