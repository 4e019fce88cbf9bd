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


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("owner", [False, True])
def test_flash_attn_mla_packs_its_lse_unless_its_own_merge_reads_it(
    monkeypatch: pytest.MonkeyPatch, owner: bool, tokens: int
) -> None:
    """The edited upstream text, with a stand-in for the kernel, whose LSE comes as [H, B]."""
    from vllm.v1.attention.backends import fa_utils

    for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):  # which a CPU build lacks
        monkeypatch.setattr(fa_utils, name, None, raising=False)
    flashattn_mla = importlib.import_module("vllm.v1.attention.backends.mla.flashattn_mla")

    heads, latent, rope = 4, 8, 2
    output, lse = torch.randn(tokens, heads, latent), torch.randn(heads, tokens)
    monkeypatch.setattr(flashattn_mla, "flash_attn_varlen_func", lambda **_: (output, lse))
    name = "vllm.v1.attention.backends.mla.flashattn_mla.FlashAttnMLAImpl.forward_mqa"
    forward = edited(name, cures.EDITS[name])
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
    # What the direct all-to-all asks for: also a single token's stride is that of a whole row.
    assert (stated.stride() == (heads, 1)) != owner


@pytest.mark.parametrize("disabled", [True, False])
def test_a_reduce_scatter_without_vllms_nccl_goes_through_torch(
    monkeypatch: pytest.MonkeyPatch, disabled: bool
) -> None:
    """Upstream's text returns memory that nobody has written where its NCCL wrapper is disabled."""
    from vllm.distributed.device_communicators import base_device_communicator, cuda_communicator

    class Wrapper:
        def __init__(self) -> None:
            self.disabled = disabled

        def reduce_scatter(self, output: torch.Tensor, _: torch.Tensor) -> None:
            if not self.disabled:
                output.fill_(2.0)

    def by_torch(output: torch.Tensor, given: torch.Tensor, group: object) -> None:
        output.copy_(given.chunk(2)[1])

    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", by_torch)
    name = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator.reduce_scatter"
    communicator = object.__new__(cuda_communicator.CudaCommunicator)
    communicator.world_size, communicator.pynccl_comm, communicator.device_group = 2, Wrapper(), None
    partial = torch.arange(24.0).view(3, 4, 2)
    found = edited(name, cures.EDITS[name])(communicator, partial, dim=1)
    expected = partial[:, 2:] if disabled else torch.full((3, 2, 2), 2.0)
    assert torch.equal(found, expected) and found.is_contiguous()
    assert isinstance(communicator, base_device_communicator.DeviceCommunicatorBase)


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
