# SPDX-License-Identifier: Apache-2.0
"""Ranks over gloo build vLLM's own MLA layers, with and without an owner, and run a decode step through them.

Two of them, and then one alone. Prints the name of each case that held, once a rank.
"""

import json
import os
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.models.kimi_k3.nvidia import mla as kimi
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kimi_k3_serve import checkpoint, cpu
from kimi_k3_serve.attention import ownership
from kimi_k3_serve.attention.cpu_mla import (
    CPUDCPMLABackend,
    CPUDCPMLAImpl,
    attend_paged,
    merge_partials,
)

W, HEADS, LATENT, NOPE, ROPE, VALUE, HIDDEN, BLOCK = 2, 2, 512, 128, 64, 128, 256, 16
LOCAL_LENS = (0, 5)  # an empty shard and a short one

built: list[dict[str, Any]] = []


class ManagedImpl(CPUDCPMLAImpl):
    """The same arithmetic without the declaration: the layer has to arrange the collectives."""

    owns_decode_dcp_collectives = False

    def forward_mqa(self, q: Any, cache: Any, metadata: Any, layer: Any) -> Any:
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        assert query.shape[1] == W * HEADS, "not gathered"
        decode = metadata.decode
        return attend_paged(
            query, cache, decode.block_table, decode.seq_lens, scale=self.scale, value_dim=LATENT
        )


class ManagedBackend(CPUDCPMLABackend):
    @staticmethod
    def get_impl_cls() -> type[ManagedImpl]:
        return ManagedImpl


class RecordingManager(mla_attention.MLADCPManager):
    """Notes how it is built and called; its collectives run over gloo instead of on a GPU."""

    def __init__(self, **arguments: Any) -> None:
        built.append(arguments)
        self.calls: list[str] = []
        self.impl: Any = None

    def query_gather(self, query: torch.Tensor) -> torch.Tensor:
        self.calls.append("query_gather")
        return self.impl.dcp_group.all_gather(query.contiguous(), dim=1)

    def combine(self, output: Any, lse: Any, *, seq_lens: Any, query_start_loc: Any) -> torch.Tensor:
        self.calls.append("combine")
        assert torch.equal(seq_lens, torch.tensor(LOCAL_LENS))
        assert torch.equal(query_start_loc, torch.tensor([0, 1, 2]))
        return merge_partials(*self.impl.exchange_partials(output, lse))[0]

    def init_kv_gather(self, workspace: torch.Tensor, max_gathered_tokens: int) -> None:
        self.calls.append("init_kv_gather")


class SparseBuilder(sparse_mla_attention.SparseMLACommonMetadataBuilder):
    supports_direct_dcp_kv_gather = True


def metadata() -> Any:
    decode = SimpleNamespace(
        block_table=torch.tensor([[0], [1]], dtype=torch.int32), seq_lens=torch.tensor(LOCAL_LENS)
    )
    return SimpleNamespace(
        num_actual_tokens=2,
        num_decodes=2,
        num_decode_tokens=2,
        num_prefills=0,
        query_start_loc=torch.tensor([0, 1, 2]),
        prefill=None,
        decode=decode,
    )


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [2, H, NOPE + ROPE] and a paged cache; both differ from rank to rank."""
    generator = torch.Generator().manual_seed(rank)
    query = torch.randn(2, HEADS, NOPE + ROPE, generator=generator)
    return query, torch.randn(2, BLOCK, LATENT + ROPE, generator=generator)


def shared_layer(name: str, backend: type, **arguments: Any) -> Any:
    projection = ColumnParallelLinear(LATENT, W * HEADS * (NOPE + VALUE), bias=False, prefix=f"{name}.kv_b")
    torch.nn.init.normal_(projection.weight, generator=torch.Generator().manual_seed(7))
    layer = MLAAttention(
        HEADS,
        0.07,
        NOPE,
        ROPE,
        VALUE,
        None,
        LATENT,
        projection,
        prefix=name,
        attn_backend=backend,
        **arguments,
    )
    layer.process_weights_after_loading(torch.float32)
    if layer.dcp_manager is not None:
        layer.dcp_manager.impl = layer.impl
    return layer


def shared_decode(layer: Any, rank: int, forward: Any = None) -> torch.Tensor:
    query, cache = inputs(rank)
    output = torch.empty(2, HEADS * VALUE)
    forward = forward or type(layer).forward_impl
    forward(layer, query, torch.zeros(2, LATENT), torch.zeros(2, 1, ROPE), cache, metadata(), output=output)
    return output


def kimi_layer(name: str, backend: type) -> Any:
    register_backend(AttentionBackendEnum.CPU_MLA, f"{backend.__module__}.{backend.__qualname__}")
    kimi.get_attn_backend = lambda *args, **kwargs: backend  # type: ignore[assignment]  # it caches by configuration
    config: Any = SimpleNamespace(rms_norm_eps=1e-6)
    layer = kimi.MultiHeadLatentAttention(
        config, HIDDEN, W * HEADS, NOPE, ROPE, VALUE, 128, LATENT, use_output_gate=True, prefix=name
    )
    torch.nn.init.normal_(layer.kv_b_proj.weight, generator=torch.Generator().manual_seed(7))
    layer.process_weights_after_loading(torch.float32)
    # The one fused GPU kernel on the decode path: concatenate, and insert into the cache (which is full here).
    layer._decode_concat_cache = lambda nope, rope, *rest: torch.cat([nope, rope], dim=-1)
    if layer.dcp_manager is not None:
        layer.dcp_manager.impl = layer.impl
    return layer


def kimi_decode(layer: Any, rank: int, config: VllmConfig, forward: Any = None) -> torch.Tensor:
    query, layer.kv_cache = inputs(rank)
    output = torch.empty(2, HEADS * VALUE)
    slots = {layer.layer_name: torch.tensor([-1, -1])}
    with set_forward_context({layer.layer_name: metadata()}, config, slot_mapping=slots):
        forward = forward or type(layer)._attention
        forward(layer, torch.arange(2), query, torch.zeros(2, LATENT), torch.zeros(2, 1, ROPE), output)
    return output


def run_cases(rank: int, config: VllmConfig, folder: Path) -> None:
    shared = shared_layer("shared.owner", CPUDCPMLABackend)
    assert built == [] and shared.dcp_manager is None and shared.impl.dcp_world_size == W
    owned = shared_decode(shared, rank)
    assert owned.isfinite().all() and owned.abs().max() > 0
    passed("shared-owner")

    managed = shared_layer("shared.managed", ManagedBackend)
    assert len(built) == 1 and isinstance(managed.dcp_manager, RecordingManager)
    assert torch.equal(shared_decode(managed, rank), owned)
    assert managed.dcp_manager.calls == ["query_gather", "combine"]
    passed("shared-managed")

    own = kimi_layer("kimi.owner", CPUDCPMLABackend)
    assert len(built) == 1 and own.dcp_manager is None and own.dcp_world_size == W
    kimi_owned = kimi_decode(own, rank, config)
    assert kimi_owned.isfinite().all() and kimi_owned.abs().max() > 0
    passed("kimi-owner")

    kimi_managed = kimi_layer("kimi.managed", ManagedBackend)
    assert len(built) == 2 and isinstance(kimi_managed.dcp_manager, RecordingManager)
    assert torch.equal(kimi_decode(kimi_managed, rank, config), kimi_owned)
    assert kimi_managed.dcp_manager.calls == ["query_gather", "combine"]
    passed("kimi-managed")

    # A managed layer through upstream's own text: the same manager, built alike, and the same bits.
    shared_init, kimi_init = MLAAttention.__init__, kimi.MultiHeadLatentAttention.__init__
    MLAAttention.__init__ = shared_init.__wrapped__  # type: ignore[method-assign]
    kimi.MultiHeadLatentAttention.__init__ = kimi_init.__wrapped__
    stock = shared_layer("shared.stock", ManagedBackend)
    kimi_stock = kimi_layer("kimi.stock", ManagedBackend)
    MLAAttention.__init__ = shared_init  # type: ignore[method-assign]
    kimi.MultiHeadLatentAttention.__init__ = kimi_init
    assert built[0] == built[2] and built[1] == built[3]
    assert torch.equal(shared_decode(stock, rank, MLAAttention.forward_impl.__wrapped__), owned)
    upstream = kimi.MultiHeadLatentAttention._attention.__wrapped__
    assert torch.equal(kimi_decode(kimi_stock, rank, config, upstream), kimi_owned)
    passed("stock-text-without-owner")

    spec = SimpleNamespace(block_size=BLOCK, dtype=torch.float32)
    builder_cls = CPUDCPMLABackend.get_builder_cls()
    plain_cls = mla_attention.MLACommonMetadataBuilder
    sparse_cls = sparse_mla_attention.SparseMLACommonMetadataBuilder
    config.model_config.hf_text_config.index_topk = 64  # which a sparse builder reads
    for name, cls, gather in [
        ("shared.owner", builder_cls, ownership.ContextGather),
        ("shared.managed", builder_cls, ownership.ContextGather),
        ("shared.managed", plain_cls, RecordingManager),
        ("shared.owner", SparseBuilder, ownership.ContextGather),
        ("shared.managed", sparse_cls, RecordingManager),
    ]:
        builder: Any = cls(spec, [name], config, torch.device("cpu"))
        assert isinstance(builder.dcp_manager, gather)
    assert managed.dcp_manager.calls[-1] == "init_kv_gather"
    local = torch.full((3, LATENT + ROPE), float(rank))
    gathered = torch.empty(W * 3, LATENT + ROPE)
    ownership.ContextGather().kv_gather(gathered, local)
    assert gathered[:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    passed("builder-flag")

    for cls, case in [(plain_cls, "builder-neither"), (sparse_cls, "sparse-builder-neither")]:
        try:
            cls(spec, ["shared.owner"], config, torch.device("cpu"))
        except ownership.ContextGatherError as error:
            assert f"{cls.__name__} cannot gather" in str(error)
            assert "supports_direct_dcp_kv_gather" in str(error)
            passed(case)

    try:
        shared_layer("shared.replicated", CPUDCPMLABackend, dcp_q_replicate=True)
    except NotImplementedError as error:
        assert "rank-local" in str(error)
        passed("owner-refuses-replicated-queries")


def run_alone(rank: int, config: VllmConfig, folder: Path) -> None:
    """Without DCP an owner's layer computes what another's does, and no manager is built for either."""
    owner, other = (shared_layer(f"shared.{b.__name__}", b) for b in (CPUDCPMLABackend, ManagedBackend))
    assert owner.impl.dcp_world_size == 1
    assert torch.equal(shared_decode(owner, rank), shared_decode(other, rank))
    owner, other = (kimi_layer(f"kimi.{b.__name__}", b) for b in (CPUDCPMLABackend, ManagedBackend))
    assert torch.equal(kimi_decode(owner, rank, config), kimi_decode(other, rank, config))
    assert built == []
    passed("owner-alone")

    config.parallel_config.prefill_context_parallel_size = 2
    shared_layer("shared.pcp", ManagedBackend)
    try:
        shared_layer("shared.pcp.owner", CPUDCPMLABackend)
    except NotImplementedError as error:
        assert "does not run with prefill context parallelism" in str(error)
        passed("owner-refuses-pcp")


def passed(case: str) -> None:
    os.write(1, f"{case}\n".encode())


def rank_main(rank: int, folder: str) -> None:
    os.environ["VLLM_DIST_IDENT"] = Path(folder).name
    parallel = ParallelConfig(tensor_parallel_size=W, decode_context_parallel_size=W)
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=64)
    config = VllmConfig(model_config=model, parallel_config=parallel)
    with set_current_vllm_config(config):
        init_distributed_environment(W, rank, f"file://{folder}/store", rank, "gloo")
        initialize_model_parallel(W, decode_context_model_parallel_size=W)
        cpu.install()
        ownership.install(kimi=True)
        mla_attention.MLADCPManager = kimi.MLADCPManager = RecordingManager  # type: ignore[misc, assignment]
        torch.set_default_dtype(torch.float32)
        try:
            (run_cases if W > 1 else run_alone)(rank, config, Path(folder))
        except BaseException:
            traceback.print_exc()
            raise


def main(world_size: int) -> None:
    global W
    W = world_size
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(checkpoint.config(W * HEADS)))
        mp.start_processes(rank_main, (folder,), W, start_method="fork")
        for segment in Path("/dev/shm").glob(f"{Path(folder).name}-*"):  # which vLLM leaves behind
            segment.unlink()


if __name__ == "__main__":
    main(2)
    main(1)
