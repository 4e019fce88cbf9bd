# SPDX-License-Identifier: Apache-2.0
"""Topology x hardware profile -> the server's command line and environment."""

import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from kimi_k3_serve.errors import UserError
from kimi_k3_serve.plugin import SWITCH
from kimi_k3_serve.proof import PROOF_DIR
from kimi_k3_serve.topology import Topology

SERVER = "vllm.entrypoints.launchers.api_server.entry"


@dataclass(frozen=True)
class Launch:
    """A command line and what it needs in its environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def profiles() -> list[str]:
    """Names of the hardware profiles that come with the package."""
    folder = files("kimi_k3_serve").joinpath("profiles")
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def plan(
    *,
    profile: str,
    topology: str,
    model: Path,
    host: str,
    port: int,
    kv_cache_memory_bytes: int,
    proof_dir: Path | None = None,
    backend: str = "dcp",
    extra: Sequence[str] = (),
) -> Launch:
    """Put together what starts the server. Pure but for reading the profile and the model's folder.

    Args:
        kv_cache_memory_bytes: KV cache of one rank; arms are compared at equal bytes.
        proof_dir: where every worker writes its proof.
        backend: "dcp" (this project's) or "stock" (vLLM's own CPU MLA; tensor parallelism only).
        extra: further vLLM arguments, taken last.

    Raises:
        UserError: unknown profile or topology, missing model, too few cores, an impossible combination.
    """
    if profile not in profiles():
        raise UserError(f"profile {profile!r} is not known; choose one of {', '.join(profiles())}")
    if not (model / "config.json").is_file():
        raise UserError(f"{model} holds no config.json; give a checkpoint's folder with --model")
    shape = Topology.parse(topology)
    if backend == "stock" and shape.dcp > 1:
        raise UserError(
            "vLLM's own CPU backends cannot shard the context; use --backend dcp or a tpN topology"
        )

    settings = tomllib.loads(files("kimi_k3_serve").joinpath("profiles", f"{profile}.toml").read_text())
    environment = {**settings["environment"], SWITCH: backend}
    if settings["one_core_a_rank"]:
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < shape.tp:
            raise UserError(
                f"{topology} needs {shape.tp} cores, one a rank, and this machine has {len(cores)}"
            )
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores[: shape.tp]))
    if proof_dir is not None:
        environment[PROOF_DIR] = str(proof_dir.resolve())

    argv = [sys.executable, "-m", SERVER, "--model", str(model), "--host", host, "--port", str(port)]
    argv += ["--kv-cache-memory-bytes", str(kv_cache_memory_bytes), *shape.flags()]
    for name, value in settings["flags"].items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return Launch((*argv, *extra), environment)
