# SPDX-License-Identifier: Apache-2.0
"""What is served, and the command line of each arm's engine: all arms alike but for what makes them arms."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.arms import Arm

HOST = "127.0.0.1"
TIME_CONTEXT = "KIMI_K3_TIME_PREFILL_CONTEXT"
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
"""CUDA graphs of decode steps without torch.compile, which would take minutes of a start."""
GPU_CHUNK, CPU_CHUNK = 8192, 512
GPU_FLAGS = {
    "worker-cls": "kimi_k3_serve.gpu_worker.ProvenGPUWorker",
    "dtype": "bfloat16",
    "max-num-batched-tokens": GPU_CHUNK,
    "max-num-seqs": 16,
    "max-logprobs": 20,
    "skip-tokenizer-init": True,
    "no-enable-prefix-caching": True,
}
SEEDED = {"load-format": "kimi_k3_seeded", "gpu-memory-utilization": 0.15}
"""For a slice: weights that follow from names, and little memory asked for at the start, when other arms' engines
hold theirs. The KV cache's size is given in bytes, so nothing else follows from that share."""

_KV_TOKENS = re.compile(r"KV cache size: ([0-9,]+) tokens")


@dataclass(frozen=True)
class Serving:
    """A model and how an engine serves it.

    `program` offers `serve`. `extra` are vLLM arguments of every arm; on GPUs (`gpu`) each arm adds those of its
    variant. `nice` is added to an engine's nice value: without GPUs it computes on the client's cores.
    `chunk_tokens`: how much of a prompt is prefilled in a step.
    """

    program: tuple[str, ...]
    profile: str
    model: Path
    kv_bytes: int
    extra: tuple[str, ...]
    gpu: bool
    nice: int
    ready_timeout_s: float
    chunk_tokens: int

    def argv(self, arm: Arm, port: int, proof_dir: Path) -> list[str]:
        argv = [*self.program, "serve", "--profile", self.profile, "--topology", arm.topology_name]
        argv += ["--model", str(self.model), "--host", HOST, "--port", str(port)]
        argv += ["--proof-dir", str(proof_dir), "--kv-cache-memory-bytes", str(self.kv_bytes)]
        return [*argv, "--", *self.extra, *(arm.variant.extra if self.gpu else ())]

    def environment(self, arm: Arm) -> Mapping[str, str]:
        """What an engine gets beyond this process's environment: its arm's own, and a folder of its own to time in."""
        own = dict(arm.variant.environment) if self.gpu else {}
        if folder := os.environ.get(TIME_CONTEXT):
            own[TIME_CONTEXT] = str(Path(folder) / arm.name)
        return own


def longest_context(tokens: int, scale: float, output_tokens: int, *others: int) -> int:
    """--max-model-len: room for the longest prompt (`tokens` before scaling) and its answer, and for `others`."""
    return max((math.ceil(tokens * scale) + output_tokens, *others)) + 1


def on_cpu(program: Sequence[str], model: Path, kv_bytes: int, max_model_len: int) -> Serving:
    """The small checkpoint on this machine's cores."""
    extra = ("--max-model-len", str(max_model_len))
    return Serving(
        tuple(program),
        "cpu",
        model,
        kv_bytes,
        extra,
        gpu=False,
        nice=10,
        ready_timeout_s=900.0,  # several start at once, on the same few cores
        chunk_tokens=CPU_CHUNK,
    )


def on_gpus(
    program: Sequence[str],
    profile: str,
    model: Path,
    kv_bytes: int,
    max_model_len: int,
    *,
    seeded: bool,
    graphs: bool,
    extra: Sequence[str] = (),
    ready_timeout_s: float = 1800.0,
) -> Serving:
    """`seeded`: the model is a slice's configuration alone. `extra`: further vLLM arguments of every arm."""
    flags = {**GPU_FLAGS, "max-model-len": max_model_len, **(SEEDED if seeded else {})}
    words = [word for name, value in flags.items() for word in _words(name, value)]
    words += ["--compilation-config", json.dumps(GRAPHS)] if graphs else ["--enforce-eager"]
    words += extra
    return Serving(
        tuple(program),
        profile,
        model,
        kv_bytes,
        tuple(words),
        gpu=True,
        nice=0,
        ready_timeout_s=ready_timeout_s,
        chunk_tokens=GPU_CHUNK,
    )


def kv_tokens_of(log: Path) -> int | None:
    """What an engine says its KV cache holds, over all ranks; None where its log does not say."""
    found = _KV_TOKENS.findall(log.read_text(errors="replace")) if log.exists() else []
    return int(found[-1].replace(",", "")) if found else None


def _words(name: str, value: object) -> list[str]:
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]
