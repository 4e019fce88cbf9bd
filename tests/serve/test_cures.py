# SPDX-License-Identifier: Apache-2.0
import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kimi_k3_serve import cpu, loader, metrics, plugin, source_lock
from kimi_k3_serve.attention import backends, cures, ownership
from kimi_k3_serve.patch import edited
from kimi_k3_serve.publish import hook
from kimi_k3_serve.source_lock import resolve

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REDUCE_SCATTER = "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator.reduce_scatter"


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

    class Wrapper:
        def __init__(self) -> None:
            self.disabled = disabled

        def reduce_scatter(self, output: torch.Tensor, _: torch.Tensor) -> None:
            if not self.disabled:
                output.fill_(2.0)

    def by_torch(output: torch.Tensor, given: torch.Tensor, group: object) -> None:
        output.copy_(given.chunk(2)[1])

    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", by_torch)
    partial = torch.arange(24.0).view(3, 4, 2)
    found = edited(REDUCE_SCATTER, cures.EDITS[REDUCE_SCATTER])(communicator(Wrapper()), partial, dim=1)
    expected = partial[:, 2:] if disabled else torch.full((3, 2, 2), 2.0)
    assert torch.equal(found, expected) and found.is_contiguous()


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("decode_dcp")


def communicator(wrapper: Any) -> Any:
    """vLLM's, of the first of two ranks."""
    owner, _ = resolve(REDUCE_SCATTER)
    made = object.__new__(owner)
    made.world_size, made.pynccl_comm, made.device_group = 2, wrapper, None
    return made


@pytest.mark.parametrize("cured", [False, True])
def test_the_decode_benchmark_names_the_step_of_ag_rs_that_is_wrong(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, cured: bool
) -> None:
    """Rank 0 of 2, vLLM's NCCL wrapper disabled: upstream's own text and the cured one."""
    torch.manual_seed(0)
    outputs, lses = torch.randn(2, 1, 4, 8).bfloat16(), torch.randn(2, 1, 4)
    shares = torch.softmax(lses.double(), 0).unsqueeze(-1)
    total = (shares * outputs.double()).sum(0)[:, :2].bfloat16()

    def by_torch(output: torch.Tensor, given: torch.Tensor, group: object) -> None:
        output.copy_(total.movedim(1, 0))

    def correct(
        out: torch.Tensor, gathered: torch.Tensor, rank: int, ctx: object
    ) -> tuple[torch.Tensor, None]:
        return (torch.softmax(gathered, 0)[rank].unsqueeze(-1) * out).bfloat16(), None

    class Disabled:
        disabled = True

        def reduce_scatter(self, output: torch.Tensor, given: torch.Tensor) -> None: ...

    scatter = edited(REDUCE_SCATTER, cures.EDITS[REDUCE_SCATTER])
    if not cured:
        scatter = scatter.__wrapped__
    monkeypatch.setattr(torch.distributed, "reduce_scatter_tensor", by_torch)
    group = SimpleNamespace(
        all_gather=lambda lse, dim: lses.flatten(0, 1),
        reduce_scatter=lambda addend, dim: scatter(communicator(Disabled()), addend, dim),
    )
    stock = {"dcp": SimpleNamespace(correct_attn_out=correct), "group": group}
    steps = benchmark.ag_rs_steps(stock, None, outputs[0], lses[0], outputs, lses, 0)
    wrong = {step for step, error in steps.items() if error > benchmark.ERROR}
    assert len(steps) == 4 and wrong == (set() if cured else {"reduce-scatter by vLLM"})
    assert not torch.are_deterministic_algorithms_enabled()
    written = {step: benchmark.finite(error) for step, error in steps.items()}
    assert (written["reduce-scatter by vLLM"] is not None) == cured
    json.dumps(written, allow_nan=False)


def test_a_way_whose_answer_is_not_a_number_is_no_rival(benchmark: Any) -> None:
    times = {"both vllm+ag_rs": (1.0, None), "both vllm+a2a": (30.0, 0.01), "both peer": (10.0, 0.01)}
    rows = [{"batch": 1, "way": way, "us": us, "error": error} for way, (us, error) in times.items()]
    (bar,) = benchmark.judge(rows)
    assert bar["ratio"] == 3.0 and bar["met"]


@pytest.mark.parametrize("cured", [True, False])
def test_the_decode_benchmark_takes_vllm_as_it_is_where_asked(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, cured: bool
) -> None:
    import vllm.distributed

    from kimi_k3_serve import vllm_nccl

    installed: list[str] = []
    monkeypatch.setattr(cures, "install", lambda: installed.append("cures"))
    monkeypatch.setattr(vllm.distributed, "init_distributed_environment", lambda *_: None)
    monkeypatch.setattr(vllm.distributed, "initialize_model_parallel", lambda *_, **__: None)
    monkeypatch.setattr(vllm.distributed, "get_dcp_group", lambda: SimpleNamespace(device_group=None))
    monkeypatch.setattr(vllm_nccl, "state", lambda: {"active": False})
    _, stock = benchmark.start(2, 0, torch.device("cuda", 0), cured=cured)
    assert stock["cured"] == cured == bool(installed)


def test_a_workers_cures_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the uncured arms of benchmarks/decode_parity.py."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    probe = importlib.import_module("decode_probe")
    names = [name for name in cures.EDITS if "distributed" in name]  # the others cannot be imported on a CPU
    monkeypatch.setattr(cures, "EDITS", {name: cures.EDITS[name] for name in names})
    texts = {}
    for name in names:
        owner, attribute = resolve(name)
        texts[name] = getattr(owner, attribute)
        monkeypatch.setattr(owner, attribute, texts[name])
    cures.install()
    assert all(hasattr(getattr(*resolve(name)), "edits") for name in names)
    for _ in range(2):
        probe.uncure()
        assert {name: getattr(*resolve(name)) for name in names} == texts


@pytest.mark.parametrize("cuda", [True, False])
def test_the_plugin_installs_the_cures_on_gpus_only(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    platform = SimpleNamespace(is_cuda=lambda: cuda, is_cpu=lambda: not cuda, device_type="cpu")
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    monkeypatch.setattr(plugin, "_lock_state", None)
    installed: list[str] = []
    for module in (loader, cpu, metrics, hook, backends, ownership, cures):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(module, "install", lambda *_, name=name, **__: installed.append(name))
    plugin.register()
    assert ("cures" in installed) == cuda and ("cpu" in installed) != cuda
    assert {"loader", "backends", "ownership", "hook", "metrics"} <= set(installed)
