# SPDX-License-Identifier: Apache-2.0
import ast
import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from kimi_k3_serve import source_lock
from kimi_k3_serve.attention import cures
from kimi_k3_serve.patch import edited


def test_every_cured_text_is_locked() -> None:
    locked = source_lock.locked()
    for name in cures.EDITS:
        assert any(name == entry or name.startswith(f"{entry}.") for entry in locked), name


@pytest.mark.parametrize(("owner", "packed"), [(False, True), (True, False)])
def test_flash_attn_mla_packs_its_lse_unless_its_own_merge_reads_it(
    monkeypatch: pytest.MonkeyPatch, owner: bool, packed: bool
) -> None:
    """The edited upstream text, with a stand-in for the kernel, whose LSE comes as [H, B]."""
    from vllm.v1.attention.backends import fa_utils

    for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):  # which a CPU build lacks
        monkeypatch.setattr(fa_utils, name, None, raising=False)
    flashattn_mla = importlib.import_module("vllm.v1.attention.backends.mla.flashattn_mla")

    tokens, heads, latent, rope = 3, 4, 8, 2
    output, lse = torch.randn(tokens, heads, latent), torch.randn(heads, tokens)
    monkeypatch.setattr(flashattn_mla, "flash_attn_varlen_func", lambda **_: (output, lse))
    ((name, edits),) = cures.EDITS.items()
    forward = edited(name, edits)
    impl = SimpleNamespace(
        kv_lora_rank=latent,
        qk_rope_head_dim=rope,
        kv_cache_dtype="auto",
        scale=1.0,
        need_to_return_lse_for_decode=True,
        dcp_world_size=2,
        dcp_rank=0,
        owns_decode_dcp_collectives=owner,
    )
    decode = SimpleNamespace(
        max_query_len=1,
        query_start_loc=None,
        max_seq_len=5,
        seq_lens=None,
        block_table=None,
        scheduler_metadata=None,
        max_num_splits=0,
        dcp_tot_seq_lens=None,
    )
    query, cache = torch.randn(tokens, heads, latent + rope), torch.randn(2, 16, latent + rope)
    found, stated = forward(impl, query, cache, SimpleNamespace(decode=decode), None)
    assert found is output
    assert torch.equal(stated, lse.T)
    assert stated.is_contiguous() == packed


def test_the_plugin_installs_the_cures_on_gpus_only() -> None:
    from kimi_k3_serve import plugin

    (register,) = [
        node
        for node in ast.parse(inspect.getsource(plugin)).body
        if isinstance(node, ast.FunctionDef) and node.name == "register"
    ]
    guarded = [
        ast.unparse(node.test)
        for node in register.body
        if isinstance(node, ast.If) and "cures.install" in ast.unparse(node)
    ]
    assert guarded == ["current_platform.is_cuda()"]
