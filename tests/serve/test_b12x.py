# SPDX-License-Identifier: Apache-2.0
import importlib
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import b12x_wheel
import peer_oracle
import pytest
import torch
from vllm.platforms.interface import DeviceCapability

from kimi_k3_serve.attention import b12x, b12x_collectives, b12x_rules
from kimi_k3_serve.attention.merge import merge_partials
from kimi_k3_serve.errors import UserError
from kimi_k3_serve.slot_mapping import slot_mapping

ROOT = Path(__file__).parents[2]


def configuration(
    tp: int,
    dcp: int,
    *,
    pcp: int = 1,
    interleave: int = 1,
    max_model_len: int = 1_048_576,
    max_num_seqs: int = 64,
    **changes: Any,
) -> Any:
    dims = {"kv_lora_rank": 512, "qk_rope_head_dim": 64} | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(**dims),
            get_num_attention_heads=lambda parallel: 96 // tp,
            max_model_len=max_model_len,
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp,
            prefill_context_parallel_size=pcp,
            cp_kv_cache_interleave_size=interleave,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
    )


def reasons(
    monkeypatch: pytest.MonkeyPatch,
    config: Any,
    capability: tuple[int, int] = (12, 0),
    installed: bool = True,
) -> list[str]:
    """What vLLM's selector collects against B12X_MLA."""
    monkeypatch.setattr(b12x, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(b12x.importlib.util, "find_spec", lambda name: object() if installed else None)
    found: list[str] = b12x.B12xMLABackend.validate_configuration(
        head_size=576,
        dtype=torch.bfloat16,
        kv_cache_dtype="fp8",
        block_size=None,
        use_mla=True,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=DeviceCapability(*capability),
        attn_type="decoder",
        use_pcp=config.parallel_config.prefill_context_parallel_size > 1,
        use_dcp=config.parallel_config.decode_context_parallel_size > 1,
    )
    return found


@pytest.mark.parametrize(("tp", "dcp"), [(16, 8), (16, 16), (16, 4), (8, 8), (8, 2), (4, 2), (16, 1), (1, 1)])
@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_selector_accepts(
    monkeypatch: pytest.MonkeyPatch, tp: int, dcp: int, capability: tuple[int, int]
) -> None:
    """TP16/DCP8 gathers 48 heads and TP16/DCP16 96; TP16 alone pads 6 heads to 8."""
    assert reasons(monkeypatch, configuration(tp, dcp), capability) == []


@pytest.mark.parametrize(
    "config",
    [
        configuration(16, 8, rope_parameters={"rope_type": "yarn"}, mla_use_nope=False),  # gathered rotated
        configuration(16, 8, max_model_len=8 * 1_048_576),  # 1,048,576 local tokens
        configuration(16, 8, max_model_len=8 * 1_048_576, interleave=64),
        configuration(16, 8, max_model_len=8 * 1_048_576 - 511, interleave=64),  # a part of the last stripe
        configuration(16, 1, max_model_len=1_048_576),
        configuration(16, 8, max_num_seqs=65_536),
    ],
)
def test_selector_accepts_rope_the_longest_shard_and_most_requests(
    monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    assert reasons(monkeypatch, config) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (configuration(16, 8, max_model_len=8 * 1_048_576 + 1, interleave=64), "is 1048640 tokens"),
        (configuration(16, 1, max_model_len=1_048_577), "is 1048577 tokens; the kernel holds 1048576"),
        (configuration(16, 2), "6 heads a rank at DCP2 gather to 12, not a multiple of 8"),
        (configuration(16, 8, pcp=2), "prefill context parallelism of 2 is not supported"),
        (
            configuration(16, 8, max_model_len=8 * 1_048_576 + 1),
            "is 1048577 tokens; the kernel holds 1048576",
        ),
        (
            configuration(16, 8, max_num_seqs=65_537),
            "max_num_seqs 65537 is above the kernel's 65536 query rows",
        ),
        (configuration(16, 8, kv_lora_rank=256), "this model has {'kv_lora_rank': 256"),
    ],
)
def test_selector_refuses_with_its_reason(monkeypatch: pytest.MonkeyPatch, config: Any, words: str) -> None:
    assert any(words in reason for reason in reasons(monkeypatch, config))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (10, 3), (12, 3)])
def test_other_gpus_are_declined_by_name(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    found = reasons(monkeypatch, configuration(16, 8), capability)
    expected = f"B12X_MLA runs on SM120 and SM121 only, this GPU is SM{capability[0]}{capability[1]}"
    assert expected in found


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reasons(monkeypatch, configuration(16, 8), installed=False)
    assert found == ["B12X_MLA needs the package b12x; install b12x==1.5.1"]


def test_the_name_is_registered_beside_vllms_paged_b12x() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kimi_k3_serve.attention import backends

    backends.install()
    assert AttentionBackendEnum["B12X_MLA"].get_class() is b12x.B12xMLABackend
    assert AttentionBackendEnum["B12X"].get_path().startswith("vllm.")


def test_it_is_an_owner() -> None:
    impl, builder = b12x.B12xMLABackend.get_impl_cls(), b12x.B12xMLABackend.get_builder_cls()
    assert impl.owns_decode_dcp_collectives and impl.supports_dcp and not impl.supports_pcp
    assert builder.supports_direct_dcp_kv_gather


@pytest.mark.parametrize(
    ("tokens", "dcp", "interleave", "local"), [(100, 8, 1, 13), (96, 8, 1, 12), (65, 2, 16, 48)]
)
def test_the_plan_is_made_for_the_longest_local_length(
    tokens: int, dcp: int, interleave: int, local: int
) -> None:
    assert b12x_rules.longest_local(tokens, dcp, interleave) == local
    held = [sum(p // interleave % dcp == rank for p in range(tokens)) for rank in range(dcp)]
    assert max(held) <= local < max(held) + interleave


@pytest.mark.parametrize(("heads", "padded"), [(6, 8), (8, 8), (12, 16), (48, 48), (96, 96)])
def test_synthetic_heads_leave_output_and_lse(heads: int, padded: int) -> None:
    """Attention over 8-head tiles, the synthetic heads stripped, equals attention over the real heads."""
    assert b12x_rules.padded_heads(heads) == padded
    torch.manual_seed(heads)
    query, rows = torch.randn(3, heads, 576), torch.randn(20, 576)
    scores = b12x.pad(query, padded) @ rows.T * 0.05
    output, lse = b12x.strip(torch.softmax(scores, -1) @ rows[:, :512], torch.logsumexp(scores, -1), heads)
    scores = query @ rows.T * 0.05
    torch.testing.assert_close(output, torch.softmax(scores, -1) @ rows[:, :512])
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))


def test_an_empty_shard_gives_output_zero_and_lse_minus_infinity() -> None:
    output, lse = torch.full((2, 8, 512), math.nan), torch.zeros(2, 8)
    output[1], lse[0] = 1.0, -math.inf
    output, lse = b12x.strip(output, lse, 6)
    assert torch.equal(output[0], torch.zeros(6, 512)) and torch.equal(output[1], torch.ones(6, 512))
    assert torch.isneginf(lse[0]).all() and torch.equal(lse[1], torch.zeros(6))


@pytest.fixture(scope="session")
def oracle() -> Any:
    """b12x's own CPU oracle, from the pinned wheel, installed beside the environment: vLLM must not find b12x here."""
    target = ROOT / ".cache" / "b12x-1.5.1"
    if not target.exists():
        partial = target.with_suffix(".tmp")
        command = ["install", "--quiet", "--no-deps", "--require-hashes", "--target", str(partial)]
        lock = str(ROOT / "locks" / "b12x-oracle.txt")
        done = subprocess.run(
            [sys.executable, "-m", "pip", *command, "-r", lock], capture_output=True, text=True
        )
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
            pytest.skip(f"nothing is compared with b12x 1.5.1, which cannot be fetched: {why[0]}")
        partial.rename(target)
    sys.path.insert(0, str(target))
    try:
        yield importlib.import_module("b12x.comm.pcie.pcie_dcp_a2a").lse_reduce_scatter_reference
    finally:
        sys.path.remove(str(target))


@pytest.mark.parametrize("base_e", [True, False])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_the_merge_equals_b12xs_own_oracle(oracle: Any, world_size: int, base_e: bool) -> None:
    outputs, lses = peer_oracle.partials(world_size, 6, 2 * world_size, 32, seed=world_size, base_e=base_e)
    merged, _ = merge_partials(outputs, lses, base_e=base_e)
    for rank in range(world_size):
        expected = oracle(outputs, lses, rank, is_lse_base_on_e=base_e)
        torch.testing.assert_close(merged[:, 2 * rank : 2 * rank + 2], expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def loadable(oracle: Any) -> Iterator[None]:
    with b12x_wheel.loadable():
        yield


@pytest.fixture
def wheel(loadable: None, monkeypatch: pytest.MonkeyPatch) -> b12x_wheel.Wheel:
    monkeypatch.setattr(b12x, "_kernels", {})
    return b12x_wheel.Wheel(monkeypatch)


class Ranks:
    """In the place of one rank's collectives: all queries are known, and its partials are kept."""

    def __init__(self, queries: torch.Tensor, own: slice) -> None:
        self.queries, self.own = queries, own
        self.kept: Any = None

    def gather(self, nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        assert torch.equal(torch.cat([nope, rope], -1), self.queries[:, self.own])
        return self.queries

    def merge(
        self, partial: torch.Tensor, lse: torch.Tensor, *, base_e: bool, **metadata: Any
    ) -> torch.Tensor:
        assert partial.isfinite().all()  # an empty shard's too
        assert base_e and metadata["query_start_loc"].tolist() == list(range(len(partial) + 1))
        self.kept = (partial.float(), lse.clone())  # which may lie in the scratch of the next step
        return partial[:, self.own]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("world_size", "interleave"), [(1, 1), (4, 1), (8, 4)])
def test_decode_through_b12xs_own_plans_and_bindings(
    wheel: b12x_wheel.Wheel,
    monkeypatch: pytest.MonkeyPatch,
    world_size: int,
    interleave: int,
    dtype: torch.dtype,
) -> None:
    """TP16: 6 heads a rank. Every rank decodes over its shard, some of them empty; merged they are the whole.

    The plan is for the padded heads and the longest local length, made once; scratch is ours.
    """
    heads, page, scale, limit, lengths = 6, 16, 0.05, 600, (2, 129, 600)
    config = configuration(16, world_size, max_model_len=limit, interleave=interleave)
    monkeypatch.setattr(b12x, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(b12x, "get_dcp_group", lambda: None)

    def init(impl: Any) -> None:
        impl.num_heads, impl.kv_lora_rank, impl.scale, impl.dcp_world_size = heads, 512, scale, world_size

    monkeypatch.setattr(b12x.MLACommonImpl, "__init__", init)
    torch.manual_seed(world_size)
    queries = torch.randn(3, world_size * heads, 576).to(dtype)
    rows = [torch.randn(length, 576).to(dtype) for length in lengths]
    local = b12x_rules.longest_local(limit, world_size, interleave)
    width = -(-local // page)
    table = torch.randperm(3 * width).view(3, width).int()
    positions, starts = torch.cat([torch.arange(n) for n in lengths]), torch.tensor([0, *lengths]).cumsum(0)
    one = torch.ones(1)
    layer = SimpleNamespace(_k_scale=one, _q_scale=one)
    kept = []
    for rank in range(world_size):
        ranks = Ranks(queries, slice(rank * heads, (rank + 1) * heads))
        monkeypatch.setattr(b12x, "decode_collectives", lambda group, heads, ranks=ranks: ranks)
        impl = b12x.B12xMLAImpl()
        slots = slot_mapping(
            starts.int(),
            positions,
            table,
            block_size=page,
            world_size=world_size,
            rank=rank,
            interleave=interleave,
        )
        cache = torch.zeros(3 * width, page, 576).to(dtype)
        mine = slots >= 0
        cache.view(-1, 576)[slots[mine]] = torch.cat(rows)[mine]
        lens = torch.tensor([int(part.sum()) for part in mine.split(lengths)], dtype=torch.int32)
        for batch in (1, 3):  # one plan for both
            step = queries[:batch, ranks.own]
            ranks.queries = queries[:batch]
            metadata = SimpleNamespace(
                decode=SimpleNamespace(block_table=table[:batch], seq_lens=lens[:batch]),
                query_start_loc=torch.arange(5),
                num_decodes=batch,
            )
            query = step if rank else step.split([512, 64], -1)  # in one tensor or in two
            output, lse = impl.forward_mqa(query, cache, metadata, layer)
            assert lse is None and output.shape == (batch, heads, 512)
        kept.append(ranks.kept or (output.float(), torch.zeros(3, heads)))

    (request,) = wheel.requests
    (kernel,) = b12x._kernels.values()
    plan = request.plan.query
    assert plan.num_q_heads == b12x_rules.padded_heads(world_size * heads)
    assert (plan.cache_tokens, plan.query_rows, plan.page_size) == (local, 64, page)
    assert plan.use_cuda_graph and plan.mode == "decode"
    assert {each.scratch.shared_scratch.data_ptr() for each in wheel.bindings} == {kernel.scratch.data_ptr()}
    merged, _ = merge_partials(*(torch.stack(part) for part in zip(*kept, strict=True)))
    for i, context in enumerate(rows):
        scores = scale * queries[i].double() @ context.double().T
        expected = torch.softmax(scores, -1) @ context[:, :512].double()
        torch.testing.assert_close(merged[i].double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rank", [0, 1])
def test_small_batches_go_over_b12xs_channel(
    wheel: b12x_wheel.Wheel, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Prepared once a shape, eagerly; captured inside the pool's scope; the rest over NCCL."""
    heads, pools = 8, []

    class Pools:
        @staticmethod
        def from_exchange_group(**arguments: Any) -> b12x_wheel.Pool:
            assert (arguments["exchange_group"], arguments["max_batch_size"]) == ("cpu group", 2)
            pools.append(b12x_wheel.Pool(wheel, rank, **arguments))
            return pools[0]

    monkeypatch.setattr(importlib.import_module("b12x.comm.pcie"), "DcpAllToAllPool", Pools)
    gathered = torch.zeros(1)
    group = SimpleNamespace(
        world_size=2, cpu_group="cpu group", all_gather=lambda local, dim: gathered if dim == 1 else None
    )
    monkeypatch.setenv(b12x.USE_COLLECTIVES, "1")
    monkeypatch.setenv(b12x.COLLECTIVE_MAX_TOKENS, "2")
    ways = b12x.decode_collectives.__wrapped__(group, heads)
    assert isinstance(ways, b12x_collectives.B12xCollectives)
    pool = pools[0]
    pool.queries = torch.randn(2, 2 * heads, 576).bfloat16()
    partials, lses = peer_oracle.partials(2, 2, 2 * heads, 512, seed=rank)
    pool.partials, pool.lses = partials.bfloat16(), lses
    own = slice(rank * heads, (rank + 1) * heads)
    lens = torch.tensor([5, 0], dtype=torch.int32)  # the second token's shard here is empty, whatever its LSE
    counted = lses.clone()
    counted[rank, 1] = -math.inf
    expected = peer_oracle.merged(pool.partials, counted)[:, own]
    for wheel.capturing in (False, True):
        for tokens in (1, 2):
            nope, rope = pool.queries[:tokens, own].split([512, 64], -1)
            assert torch.equal(ways.gather(nope, rope), pool.queries[:tokens])
            merged = ways.merge(
                pool.partials[rank, :tokens],
                lses[rank, :tokens],
                seq_lens=lens[:tokens],
                query_start_loc=torch.arange(tokens + 1),
                base_e=True,
            )
            torch.testing.assert_close(merged.double(), expected[:tokens], rtol=1e-2, atol=1e-2)
    assert (
        len(wheel.requests) == 4 and pool.captures == 4
    )  # two collectives of two shapes; each once captured
    wheel.capturing = False
    assert ways.gather(torch.zeros(3, heads, 512), torch.zeros(3, heads, 64)) is gathered


@pytest.mark.parametrize("asked", ["0", "-1", "many"])
def test_a_largest_batch_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setenv(b12x.USE_COLLECTIVES, "1")
    monkeypatch.setenv(b12x.COLLECTIVE_MAX_TOKENS, asked)
    with pytest.raises(UserError, match=f"{b12x.COLLECTIVE_MAX_TOKENS}={asked!r} is not a number of tokens"):
        b12x.decode_collectives.__wrapped__(SimpleNamespace(world_size=2), 6)


@pytest.mark.parametrize(
    ("asked", "world_size", "words"),
    [
        ("0", 2, "VLLM_USE_B12X_DCP_A2A is not 1"),
        ("1", 3, "b12x exchanges between (2, 4, 8, 16) ranks, not 3"),
    ],
)
def test_without_b12xs_channel_decode_says_why_it_goes_over_nccl(
    monkeypatch: pytest.MonkeyPatch, asked: str, world_size: int, words: str
) -> None:
    monkeypatch.setenv(b12x.USE_COLLECTIVES, asked)
    ways = b12x.decode_collectives.__wrapped__(SimpleNamespace(world_size=world_size), 6)
    assert type(ways) is b12x.DecodeCollectives and ways.way == f"decode over NCCL ({words})"
