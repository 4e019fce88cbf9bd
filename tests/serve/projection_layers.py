# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3's own MLA layer with its merged projection in column shards, against the replicated one. Run as a script.

    projection_layers.py ranks W ...    W layers in one process, whose coordinators meet in memory
    projection_layers.py processes      two processes over gloo with vLLM's own coordinators, and the peer kernel in the
                                        Triton interpreter (TRITON_INTERPRET=1)

Prints the name of each case that held. The checkpoint's tensors go through the model's own `load_weights`.
"""

import json
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear
from vllm.models.kimi_k3.nvidia import low_latency_gemm, mla
from vllm.models.kimi_k3.nvidia.model import KimiLinearModel
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from kimi_k3_serve import cpu
from kimi_k3_serve.attention import ownership
from kimi_k3_serve.attention.cpu_mla import CPUDCPMLABackend
from kimi_k3_serve.checkpoint import CONFIG
from kimi_k3_serve.projection import gather, install
from kimi_k3_serve.projection.gather import Choice
from kimi_k3_serve.projection.shard import KV_A, Q_A, ShardError
from kimi_k3_serve.weights import values

HIDDEN, HEADS, NOPE, ROPE, VALUE, LATENT = 32, 16, 16, 64, 8, 512
POSITIONS = torch.arange(0)
UPSTREAM = mla.MultiHeadLatentAttention._forward_q_lora
STOCK = (mla.KimiK3MergedQKVGateLinear, mla.MergedColumnParallelLinear)


class Coordinator:
    """W ranks of one process, a thread each, that meet in memory: what vLLM's coordinator offers of it."""

    def __init__(self, rank: int, world_size: int, meeting: "Meeting") -> None:
        self.rank_in_group, self.world_size, self.meeting = rank, world_size, meeting
        self.ranks = list(range(world_size))

    def all_gather(self, local: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank_in_group, local), dim=dim)


class Meeting:
    def __init__(self, world_size: int) -> None:
        self.places: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=60)

    def exchange(self, rank: int, item: Any) -> list[Any]:
        self.places[rank] = item
        self.barrier.wait()
        everyone = list(self.places)
        self.barrier.wait()
        return everyone


def as_rank(rank: int, world_size: int, group: Any) -> None:
    """What is built from now on belongs to this tensor-parallel rank."""
    for module in (linear, mla, install, parameter):
        module.get_tensor_model_parallel_world_size = lambda: world_size  # type: ignore[assignment]
    for module in (linear, parameter):
        module.get_tensor_model_parallel_rank = lambda: rank  # type: ignore[assignment]
    install.get_tp_group = install.get_dcp_group = lambda: group
    install.latent_gather.cache_clear()


def layer(name: str, *, gated: bool, checkpoint: dict[str, torch.Tensor], **arguments: Any) -> Any:
    """The layer, its projection loaded by `load_weights` from tensors named as the released checkpoint names them."""
    built = mla.MultiHeadLatentAttention(
        SimpleNamespace(rms_norm_eps=1e-6),  # type: ignore[arg-type]
        HIDDEN,
        HEADS,
        NOPE,
        ROPE,
        VALUE,
        Q_A,
        LATENT,
        use_output_gate=gated,
        prefix=name,
        **arguments,
    )
    model = torch.nn.Module()
    model.self_attn = built
    config = {"linear_attn_config": None, "q_lora_rank": Q_A, "mla_use_output_gate": gated, "is_moe": False}
    holder: Any = torch.nn.Module()
    holder.layers = torch.nn.ModuleList([model])
    holder.config = SimpleNamespace(
        **config, is_linear_attn=True, num_hidden_layers=1, num_nextn_predict_layers=0
    )
    loaded = KimiLinearModel.load_weights(holder, checkpoint.items())
    projection = built.fused_qkv_a_g_proj if gated else built.fused_qkv_a_proj
    assert any("fused_qkv_a" in name for name in loaded), loaded
    projection.cpu_linear = F.linear  # what vLLM sets after loading on a CPU
    built._apply_q_lora_attention = lambda positions, hidden, latents: latents
    return built


def checkpoint(gated: bool, make: Callable[[str, tuple[int, ...]], torch.Tensor]) -> dict[str, torch.Tensor]:
    shapes = {"q_a_proj": (Q_A, HIDDEN), "kv_a_proj_with_mqa": (KV_A, HIDDEN)}
    if gated:
        shapes["g_proj"] = (HEADS * VALUE, HIDDEN)
    names = {f"layers.0.self_attn.{name}.weight": shape for name, shape in shapes.items()}
    return {name: make(name, shape) for name, shape in names.items()}


def integers(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Small whole numbers, so that every order of summation is exact."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(-8, 9, shape, generator=generator).float()


def run_ranks(world_size: int) -> None:
    name = f"{world_size}-"
    for gated in (True, False):
        for label, make in (("integers", integers), ("seeded", values)):
            held = [f"{name}{'gated' if gated else 'ungated'}-{label}"]
            tensors = checkpoint(gated, make)
            replicated, sharded = build(world_size, gated, tensors, label)
            if world_size == 1:
                assert type(sharded[0].fused_qkv_a_g_proj) is (STOCK[0] if gated else type(None))
                assert type(sharded[0].fused_qkv_a_proj) is (type(None) if gated else STOCK[1])
                held.append(f"{name}{'gated' if gated else 'ungated'}-{label}-stock-class")
            for rows in (1, 3, 600):
                hidden = integers("hidden" * rows, (rows, HIDDEN))
                for aux in (False, True) if gated else (False,):
                    compare(replicated, sharded, hidden, aux, exact=label == "integers")
            print(*held, sep="\n", flush=True)


def build(
    world_size: int, gated: bool, tensors: dict[str, torch.Tensor], label: str
) -> tuple[list[Any], list[Any]]:
    """W replicated layers of upstream's own text, and W sharded ones whose coordinators meet."""
    meeting = Meeting(world_size)
    groups = [Coordinator(rank, world_size, meeting) for rank in range(world_size)]
    layers: dict[bool, list[Any]] = {True: [], False: []}
    for shards in (False, True):
        mla.KimiK3MergedQKVGateLinear, mla.MergedColumnParallelLinear = STOCK
        mla.MultiHeadLatentAttention._forward_q_lora = UPSTREAM
        if shards:
            install.install("cuda")
        for rank in range(world_size):
            as_rank(rank, world_size, groups[rank])
            prefix = f"{world_size}.{gated}.{label}.{shards}.{rank}.self_attn"
            layers[shards].append(layer(prefix, gated=gated, checkpoint=tensors))
    rows = (Q_A + KV_A) + HEADS * VALUE * gated
    for replicated, sharded in zip(layers[False], layers[True], strict=True):
        sizes = [
            (one.fused_qkv_a_g_proj if gated else one.fused_qkv_a_proj).weight.shape[0]
            for one in (replicated, sharded)
        ]
        gate = HEADS * VALUE // world_size * gated
        assert sizes == [Q_A + KV_A + gate, rows // world_size], sizes
    return layers[False], layers[True]


def compare(
    replicated: list[Any], sharded: list[Any], hidden: torch.Tensor, aux: bool, *, exact: bool
) -> None:
    """Every rank's latent columns and its own gate, in the ordinary path and in that of the auxiliary stream."""
    seen: list[int] = []

    def low_latency(x: torch.Tensor, weight: torch.Tensor) -> None:
        seen.append(weight.shape[0])

    mla.try_low_latency_gemm = low_latency
    edited = mla.MultiHeadLatentAttention._forward_q_lora
    found: list[Any] = [None] * len(sharded)

    def run(rank: int) -> None:
        sharded[rank]._gate_events = (None, None) if aux else None
        found[rank] = edited(sharded[rank], POSITIONS, hidden)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(sharded))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shapes = set(seen)
    for one, (latents, gate) in zip(replicated, found, strict=True):
        one._gate_events = None
        expected, expected_gate = UPSTREAM(one, POSITIONS, hidden)
        assert latents.shape == expected.shape == (len(hidden), Q_A + KV_A)
        if exact:
            assert torch.equal(latents, expected)
        else:  # another blocking of the same float32 sums
            torch.testing.assert_close(latents, expected, rtol=1e-5, atol=1e-5)
        assert (gate is None) == (expected_gate is None)
        if gate is not None:
            torch.testing.assert_close(gate, expected_gate, rtol=1e-5, atol=0 if exact else 1e-5)
    small = len(hidden) < mla._GATE_MULTI_STREAM_TOKEN_THRESHOLD
    local = (Q_A + KV_A) // len(sharded)
    assert shapes == ({local, HEADS * VALUE // len(sharded)} if aux and small else set())


def run_single_cases() -> None:
    for world_size in (5, 7):
        as_rank(0, world_size, None)
        for call, arguments in (
            (install.merged, {"input_size": HIDDEN, "output_sizes": [Q_A, KV_A], "disable_tp": True}),
            (
                install.merged_with_gate,
                {
                    "hidden_size": HIDDEN,
                    "q_lora_rank": Q_A,
                    "kv_lora_rank": LATENT,
                    "qk_rope_head_dim": ROPE,
                    "total_num_heads": world_size,
                    "v_head_dim": VALUE,
                },
            ),
        ):
            try:
                call(bias=False, quant_config=None, prefix="p", **arguments)
            except ShardError as error:
                assert f"over {world_size} tensor-parallel ranks" in str(error)
            else:
                raise AssertionError("a width that does not divide was taken")
    print("widths-that-do-not-divide", flush=True)

    # Replicated, the low-latency GEMM knows the shape; no shard's shape is in a table, so those go to cuBLAS.
    tables = (
        low_latency_gemm.KIMI_K3_PROJECTIONS,
        low_latency_gemm.KIMI_K3_PROJECTIONS_SM100,
        low_latency_gemm.KIMI_K3_PROJECTIONS_SM90,
    )
    for table in tables:
        assert (2112, 7168) in table
        for world_size in (2, 4, 8, 16):
            assert (2112 // world_size, 7168) not in table
            assert ((2112 + 96 * 128) // world_size, 7168) not in table
    print("low-latency-shapes", flush=True)

    quantised()


def quantised() -> None:
    """The quantisation is inherited; a shard that begins inside a block of shared scales is refused."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    made: list[list[int]] = []

    class Blocks(linear.LinearMethodBase):
        def create_weights(self, layer: Any, *, output_partition_sizes: list[int], **_: Any) -> None:  # type: ignore[override]
            made.append(output_partition_sizes)

        def apply(self, *_: Any) -> torch.Tensor:
            raise NotImplementedError

    method = Blocks()
    fp8 = Fp8Config(True, "dynamic", weight_block_size=[128, 128])
    fp8.get_quant_method = lambda layer, prefix: method  # type: ignore[assignment]
    as_rank(1, 2, SimpleNamespace(world_size=2, ranks=[0, 1]))
    built = install.sharded(256, (1536, 512), (1024,), bias=False, quant_config=fp8, prefix="p")
    assert built.quant_method is method and made == [[768, 256, 512]]
    try:
        install.sharded(256, (1536, 576), (1024,), bias=False, quant_config=fp8, prefix="p")
    except ShardError as error:
        assert "quantisation block of 128" in str(error)
        print("quantisation", flush=True)


def run_process(rank: int) -> None:
    """vLLM's coordinators; 1 to 8 rows over the peer kernel, more through the all-gather, both in BF16."""
    tensors = checkpoint(True, integers)
    stock = layer("stock.self_attn", gated=True, checkpoint=tensors)
    install.install("cuda")
    select = gather.select
    install.select = lambda *args, **kwargs: select(*args, transports=("shared",), **kwargs)
    sharded = layer("sharded.self_attn", gated=True, checkpoint=tensors)
    latents = sharded.fused_qkv_a_g_proj.latents
    assert latents.choice.name == "peer" and latents.choice.way.rows == 8
    assert latents.group is install.get_dcp_group(), "the DCP coordinator has the same ranks"
    again = layer("again.self_attn", gated=True, checkpoint=tensors)
    assert again.fused_qkv_a_g_proj.latents is latents
    for rows in (1, 8, 9, 2):
        # Sums of at most 256, which BF16 holds: the interpreter truncates where a GPU rounds.
        hidden = integers("hidden" * rows, (rows, HIDDEN)).sign().bfloat16()
        for aux in (False, True):
            for one in (stock, sharded):
                one._gate_events = (None, None) if aux else None
            expected = UPSTREAM(stock, POSITIONS, hidden)
            found = mla.MultiHeadLatentAttention._forward_q_lora(sharded, POSITIONS, hidden)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), rows
    from kimi_k3_serve import proof

    assert {"projection_peer", "projection_peer_product", "projection_all_gather"} <= proof._used.keys()
    os.write(1, b"processes\n")

    os.environ["KIMI_K3_PROJECTION_GATHER"] = "peer"
    try:
        select(latents.group, (Q_A, KV_A), torch.device("cpu"))
    except gather.ProjectionGatherError as error:
        assert "KIMI_K3_PROJECTION_GATHER=peer cannot work here: rank 0: cpu has no GPU peers" in str(
            error
        ), error
        os.write(1, b"forced-way-refused\n")
    os.environ["KIMI_K3_PROJECTION_GATHER"] = ("auto", "collective")[rank]
    try:
        select(latents.group, (Q_A, KV_A), torch.device("cpu"))
    except gather.ProjectionGatherError as error:
        assert "differs between ranks: ['auto', 'collective']" in str(error)
        os.write(1, b"ranks-disagree\n")


def rank_main(rank: int, folder: str, world_size: int, worlds: list[int]) -> None:
    os.environ["VLLM_DIST_IDENT"] = Path(folder).name
    parallel = ParallelConfig(tensor_parallel_size=world_size, decode_context_parallel_size=world_size)
    dtype = "float32" if worlds else "bfloat16"
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype=dtype, max_model_len=64)
    config = VllmConfig(model_config=model, parallel_config=parallel)
    with set_current_vllm_config(config):
        init_distributed_environment(world_size, rank, f"file://{folder}/store", rank, "gloo")
        initialize_model_parallel(world_size, decode_context_model_parallel_size=world_size)
        cpu.install()
        ownership.install(kimi=True)  # as the plugin does, before it shards
        path = f"{CPUDCPMLABackend.__module__}.{CPUDCPMLABackend.__qualname__}"
        register_backend(AttentionBackendEnum.CPU_MLA, path)
        mla.get_attn_backend = lambda *args, **kwargs: CPUDCPMLABackend  # type: ignore[assignment]
        torch.set_default_dtype(getattr(torch, dtype))
        try:
            if worlds:
                install.select = lambda *args, **kwargs: Choice("collective", "in memory", None)
                run_single_cases()
                for world in worlds:
                    run_ranks(world)
            else:
                run_process(rank)
        except BaseException:
            traceback.print_exc()
            raise


def main() -> None:
    mode, *worlds = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        processes = 2 if mode == "processes" else 1
        arguments = (folder, processes, [int(world) for world in worlds])
        mp.start_processes(rank_main, arguments, processes, start_method="fork")
        for segment in Path("/dev/shm").glob(f"{Path(folder).name}-*"):  # which vLLM leaves behind
            segment.unlink()


if __name__ == "__main__":
    main()
