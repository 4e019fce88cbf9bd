# SPDX-License-Identifier: Apache-2.0
"""Topology x hardware profile -> the server's command line and environment."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from kimi_k3_serve import fit, tensors
from kimi_k3_serve.errors import UserError
from kimi_k3_serve.plugin import SWITCH
from kimi_k3_serve.profile import Profile, load, names
from kimi_k3_serve.proof import PROOF_DIR
from kimi_k3_serve.topology import Topology

SERVER = "vllm.entrypoints.launchers.api_server.entry"
SHARE_CORES = "KIMI_K3_SHARE_CORES"

profiles = names


@dataclass(frozen=True)
class Launch:
    """A command line and what it needs in its environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def plan(
    *,
    profile: str,
    topology: str,
    model: Path | str,
    host: str,
    port: int,
    kv_cache_memory_bytes: int | None = None,
    proof_dir: Path | None = None,
    backend: str = "dcp",
    node: int = 0,
    head: str | None = None,
    extra: Sequence[str] = (),
) -> Launch:
    """Put together what starts the server. Pure but for reading the profile and the model's folder.

    Args:
        model: a checkpoint's folder, or a name on the hub that need not be here to explain a launch.
        kv_cache_memory_bytes: KV cache of one rank; arms are compared at equal bytes. None: the profile's own,
            or what is left of the GPUs' memory.
        proof_dir: where every worker writes its proof.
        backend: "dcp" (this project's) or "stock" (vLLM's own CPU MLA; tensor parallelism only).
        node: this node's number in a profile with several, 0 for the head, which answers requests.
        head: address of node 0, needed with several nodes.
        extra: further vLLM arguments, taken last.

    Raises:
        UserError: unknown profile or topology, missing model, too few cores, an impossible combination.
    """
    chosen = load_for(profile, model)
    if isinstance(model, Path) and not (model / "config.json").is_file():
        raise UserError(f"{model} holds no config.json; give a checkpoint's folder with --model")
    shape = Topology.parse(topology)
    if backend == "stock" and shape.dcp > 1:
        raise UserError(
            "vLLM's own CPU backends cannot shard the context; use --backend dcp or a tpN topology"
        )
    flags = {**chosen.flags, **(chosen.dcp_flags if shape.dcp > 1 else {})}
    if objection := next(fit.objections(chosen, shape, {**flags, **given(extra)}), None):
        raise UserError(objection)

    argv = [sys.executable, "-m", SERVER, "--model", str(model), "--host", host, "--port", str(port)]
    if kv_bytes := kv_cache_memory_bytes or chosen.kv_cache_memory_bytes:
        argv += ["--kv-cache-memory-bytes", str(kv_bytes)]
    argv += [*shape.flags(), *spread(chosen, node, head)]
    if chosen.layers and not is_slice(model, chosen.layers):
        argv += ["--hf-overrides", json.dumps({"text_config": {"num_hidden_layers": chosen.layers}})]
    for name, value in flags.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]

    environment = {**chosen.environment, **(chosen.dcp_environment if shape.dcp > 1 else {})}
    if chosen.machine is None:
        environment[SWITCH] = backend
    if chosen.one_core_a_rank:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores(shape)))
    if proof_dir is not None:
        environment[PROOF_DIR] = str(proof_dir.resolve())
    return Launch((*argv, *extra), environment)


def load_for(profile: str, model: Path | str | None) -> Profile:
    """The profile; where it is a slice's and the model in the folder is a smaller one by itself, that model's.

    Raises:
        UserError: no such profile, or a config.json that is no JSON.
    """
    chosen = load(profile)
    if not (isinstance(model, Path) and chosen.layers and is_slice(model, chosen.layers)):
        return chosen
    return replace(chosen, layers=layers_of(model), weights_gb=tensors.total_gb(model))


def is_slice(model: Path | str, layers: int) -> bool:
    """Whether the model in a folder has no more than so many layers by itself."""
    own = layers_of(model)
    return own is not None and own <= layers


def layers_of(model: Path | str) -> int | None:
    """As its folder says; None for a name on the hub, or a folder without a configuration.

    Raises:
        UserError: its config.json is no JSON.
    """
    if not isinstance(model, Path) or not (model / "config.json").is_file():
        return None
    try:
        config = json.loads((model / "config.json").read_text())
    except ValueError as error:
        raise UserError(f"{model}/config.json is no JSON ({error}); fetch the checkpoint again") from None
    own: int | None = config.get("text_config", config).get("num_hidden_layers")
    return own


def cores(shape: Topology) -> list[int]:
    """One core a rank; with KIMI_K3_SHARE_CORES=1 in turns, where there are fewer.

    Raises:
        UserError: there are too few.
    """
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < shape.tp and os.environ.get(SHARE_CORES) != "1":
        raise UserError(
            f"TP{shape.tp} needs {shape.tp} cores, one a rank, and this machine has {len(usable)};"
            f" to see whether it works, not how fast, set {SHARE_CORES}=1"
        )
    return list(islice(cycle(usable), shape.tp))


def spread(profile: Profile, node: int, head: str | None) -> list[str]:
    """vLLM's arguments for pipeline stages, data parallelism and several nodes.

    Raises:
        UserError: a profile with several nodes and no head, or a node that it does not have.
    """
    flags = []
    if profile.pipeline_parallel > 1:
        flags += ["--pipeline-parallel-size", str(profile.pipeline_parallel)]
    if profile.data_parallel > 1:
        flags += ["--data-parallel-size", str(profile.data_parallel)]
    nodes = profile.machine.nodes if profile.machine else 1
    if nodes == 1:
        return flags
    if head is None:
        raise UserError(
            f"{profile.name} has {nodes} nodes; start it on each of them with --head ADDRESS --node 0..{nodes - 1}"
        )
    if not 0 <= node < nodes:
        raise UserError(f"node {node} does not exist in {profile.name}; use --node 0..{nodes - 1}")
    flags += ["--distributed-executor-backend", "mp", "--nnodes", str(nodes), "--node-rank", str(node)]
    flags += ["--master-addr", head]
    return [*flags, "--headless"] if node else flags


def given(extra: Sequence[str]) -> dict[str, Any]:
    """`--name value`, `--name=value` and `--name` in a user's own arguments, for the checks."""
    found: dict[str, Any] = {}
    for word, after in zip(extra, [*extra[1:], "--"], strict=False):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals else True if after.startswith("--") else after
    return found
