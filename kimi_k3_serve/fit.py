# SPDX-License-Identifier: Apache-2.0
"""What cannot work, said before minutes of loading: pure functions of profile, topology and flags.

Sizes are in 10^9 bytes (GB), as GPUs are sold.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kimi_k3_serve.profile import Profile, load, names
from kimi_k3_serve.topology import Topology

CHECKPOINT_GB = 1560.860324864  # 96 shards of the released checkpoint
LAYERS, MOE_LAYERS = 93, 92
# 896 experts a layer, three matrices 3584 x 3072, MXFP4: 4 bits and a shared 8-bit exponent for each 32.
EXPERTS_GB = MOE_LAYERS * 896 * 3 * 3584 * 3072 * (4 + 8 / 32) / 8 / 1e9
WORKSPACE_GB = 1.5
"""CUDA context, NCCL buffers and activations of one GPU; a lower bound, the KV cache comes on top."""

# Compute capabilities (major) that a backend runs on; a backend that is not here is not judged.
BACKEND_SM = {
    "TOKENSPEED_MLA": ("10",),
    "CUTLASS_MLA": ("10",),
    "FLASHINFER_MLA": ("10",),
    "FLASHMLA": ("9",),  # its dense kernel
    "FLASH_ATTN_MLA": ("9",),
    "PEER_FLASH_ATTN_MLA": ("9",),
    "PEER_FLASHMLA": ("9",),
    "PEER_TRITON_MLA": ("9", "10"),
    "B12X_MLA": ("12",),
}
OWNERS = ("PEER_FLASH_ATTN_MLA", "PEER_FLASHMLA", "PEER_TRITON_MLA", "B12X_MLA")
"""Backends that arrange their own decode collectives and read no --dcp-comm-backend."""
PLAIN_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""KV cache types of one scale a tensor; fp8_ds_mla has scales a row and BF16 prefill queries."""


def weights_gb(profile: Profile, topology: Topology) -> float:
    """Weights that one GPU holds.

    Experts are spread over all GPUs when data parallelism comes with expert parallelism; everything else is
    replicated in each data-parallel group. A slice holds its share of the layers, or what its own tensors come to.
    """
    replicas = profile.data_parallel
    group = topology.tp * profile.pipeline_parallel
    if profile.weights_gb is not None:
        return profile.weights_gb / group
    rest = CHECKPOINT_GB - EXPERTS_GB
    share = (profile.layers or LAYERS) / LAYERS
    return share * (EXPERTS_GB / (group * replicas) + rest / group)


def room_gb(profile: Profile) -> float:
    """What vLLM may use of one GPU for weights, after its workspace."""
    assert profile.machine
    return profile.machine.gpu_memory_gb * float(profile.flags["gpu-memory-utilization"]) - WORKSPACE_GB


def objections(profile: Profile, topology: Topology, flags: Mapping[str, Any]) -> Iterator[str]:
    """Why this cannot work, each with its remedy; `flags` are those of the finished command line."""
    if profile.machine is None:
        return
    yield from layout(profile, topology)
    yield from memory(profile, topology)
    yield from attention(profile, topology, flags)


def layout(profile: Profile, topology: Topology) -> Iterator[str]:
    machine = profile.machine
    assert machine
    wanted = topology.tp * profile.pipeline_parallel * profile.data_parallel
    if wanted != machine.gpus:
        yield (
            f"TP{topology.tp} with the profile's pipeline {profile.pipeline_parallel} and data parallelism"
            f" {profile.data_parallel} takes {wanted} GPUs, {profile.name} has {machine.gpus};"
            f" use {' or '.join(profile.topologies)}"
        )


def memory(profile: Profile, topology: Topology) -> Iterator[str]:
    needed, room = weights_gb(profile, topology), room_gb(profile)
    if needed > room:
        slices = [name for name in names() if load(name).layers]
        yield (
            f"the weights do not fit: {needed:.1f} GB a GPU, and {room:.1f} GB of {profile.description} are free"
            f" for them; profiles that hold the model: {', '.join(holding())}; or a slice: {', '.join(slices)}"
        )


def holding() -> list[str]:
    """Names of the profiles whose machine holds the whole model."""
    whole = [profile for profile in map(load, names()) if profile.machine and not profile.layers]
    return [
        profile.name
        for profile in whole
        if weights_gb(profile, Topology.parse(profile.topologies[0])) <= room_gb(profile)
    ]


def attention(profile: Profile, topology: Topology, flags: Mapping[str, Any]) -> Iterator[str]:
    assert profile.machine
    backend = str(flags.get("attention-backend", ""))
    sm = profile.machine.sm
    if backend in BACKEND_SM and sm.partition(".")[0] not in BACKEND_SM[backend]:
        fitting = [name for name, majors in BACKEND_SM.items() if sm.partition(".")[0] in majors]
        yield f"{backend} does not run on SM {sm}; use --attention-backend {' or '.join(fitting)}"
    if topology.dcp > 1 and backend not in OWNERS:
        if "dcp-comm-backend" not in flags:
            yield "DCP without --dcp-comm-backend runs ag_rs under another label; add --dcp-comm-backend a2a"
        if backend == "TRITON_MLA":
            yield (
                "TRITON_MLA rounds its LSE to BF16, which shifts a rank's weight by up to 3%;"
                " use --attention-backend PEER_TRITON_MLA"
            )
    cache = str(flags.get("kv-cache-dtype", ""))
    if cache in PLAIN_FP8 and sm.partition(".")[0] != "10":
        yield (
            f"a plain fp8 KV cache of Kimi-K3 requires fp8 prefill queries, which vLLM 0.32.0 computes on SM 10 alone,"
            f" not on SM {sm}; use --kv-cache-dtype auto"
        )
    elif cache.startswith("fp8"):
        try:
            config = json.loads(flags.get("attention-config", "{}"))
        except (TypeError, json.JSONDecodeError):
            yield "--attention-config is not JSON; write it as explain prints it"
            return
        lacking = [
            key for key in ("use_prefill_query_quantization", "mla_prefill_backend") if not config.get(key)
        ]
        if lacking:
            yield (
                f"an fp8 KV cache requires an fp8 prefill query: --attention-config lacks {' and '.join(lacking)};"
                ' add \'{"use_prefill_query_quantization":true,"mla_prefill_backend":"flashinfer"}\''
            )
