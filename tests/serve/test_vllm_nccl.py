# SPDX-License-Identifier: Apache-2.0
"""Why vLLM's own NCCL wrapper is disabled: in a worker's proof, in its log and beside the decode benchmark's times."""

import importlib
import logging
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.distributed
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
from vllm.distributed.utils import StatelessProcessGroup

from kimi_k3_serve import gpu_worker, vllm_nccl
from kimi_k3_serve.attention import cures
from kimi_k3_serve.patch import edited

PYNCCL = "vllm.distributed.device_communicators.pynccl.PyNcclCommunicator.__init__"
NEEDED = "vLLM needs NCCL 2.29.7 or later (VLLM_NCCL_SO_PATH)"


def build(folder: Path, version: int, missing: str | None) -> Path:
    """A stand-in for NCCL that exports what vLLM asks for, but `missing`."""
    names = [f.name for f in NCCLLibrary.exported_functions if f.name not in (missing, "ncclGetVersion")]
    code = "".join(f"int {name}(void) {{ return 0; }}\n" for name in names)
    code += f"int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}\n"
    source, library = folder / "nccl.c", folder / "libnccl.so.2"
    source.write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    return library


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library = build(tmp_path, 22803, "ncclCommSuspend")
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", str(library))
    return library


def why(library: Path) -> str:
    return f"NCCL 2.28.3, {library}, lacks ncclCommSuspend; {NEEDED}"


def started(monkeypatch: pytest.MonkeyPatch) -> PyNcclCommunicator:
    """What vLLM makes for a group of two ranks, by its cured text; no communicator is created here."""
    monkeypatch.setattr(PyNcclCommunicator, "_init_comm", lambda *_: None)
    group = object.__new__(StatelessProcessGroup)
    group.rank, group.world_size = 0, 2
    monkeypatch.setattr(group, "broadcast_obj", lambda found, src: found, raising=False)
    communicator = object.__new__(PyNcclCommunicator)
    edited(PYNCCL, cures.EDITS[PYNCCL])(communicator, group, torch.device("cuda", 0))
    return communicator


def group_of(wrapper: Any, world_size: int = 2) -> Any:
    return SimpleNamespace(world_size=world_size, device_communicator=SimpleNamespace(pynccl_comm=wrapper))


def serves(monkeypatch: pytest.MonkeyPatch, tp: Any, dcp: Any) -> None:
    monkeypatch.setattr(vllm_nccl, "get_tp_group", lambda: tp)
    monkeypatch.setattr(vllm_nccl, "get_dcp_group", lambda: dcp)


def proven(monkeypatch: pytest.MonkeyPatch, tp: Any, dcp: Any) -> Any:
    """The feature as the GPU worker states it."""
    serves(monkeypatch, tp, dcp)
    scheduler = SimpleNamespace(max_num_batched_tokens=8192, enable_chunked_prefill=True)
    compilation = SimpleNamespace(cudagraph_mode=None)
    config = SimpleNamespace(scheduler_config=scheduler, compilation_config=compilation)
    worker: Any = object.__new__(gpu_worker.ProvenGPUWorker)
    worker.vllm_config = config
    return worker.features([], 2)["vllm_nccl"]


def test_a_library_that_lacks_a_function_is_named_in_proof_and_log(
    old: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    tp, dcp = (group_of(started(monkeypatch)) for _ in range(2))
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [
        "vLLM's own NCCL wrapper is disabled, its collectives go through torch.distributed: " + why(old)
    ]
    assert proven(monkeypatch, tp, dcp) == {"active": False, "reason": why(old)}


def test_a_wrapper_that_works_states_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", str(build(tmp_path, 22907, None)))
    tp, one = group_of(started(monkeypatch)), group_of(None, world_size=1)
    assert proven(monkeypatch, tp, one) == {"active": True, "reason": "NCCL 2.29.7"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_other_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent, one, two = tmp_path / "absent.so", group_of(None, world_size=1), group_of(None)
    assert proven(monkeypatch, one, one) == {"active": False, "reason": "one rank has no collectives"}
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", str(absent))
    assert proven(monkeypatch, two, one)["reason"] == (
        f"{absent}: cannot open shared object file: No such file or directory; {NEEDED}"
    )
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "libm.so.6")
    assert proven(monkeypatch, two, one)["reason"] == f"libm.so.6 lacks ncclGetErrorString; {NEEDED}"
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    assert proven(monkeypatch, two, one)["reason"] == "VLLM_DISABLE_PYNCCL is set"


def test_the_decode_benchmark_says_it_too(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    benchmark = importlib.import_module("decode_dcp")
    group = group_of(started(monkeypatch))
    group.device_group = None
    monkeypatch.setattr(cures, "install", lambda: None)
    monkeypatch.setattr(vllm.distributed, "init_distributed_environment", lambda *_: None)
    monkeypatch.setattr(vllm.distributed, "initialize_model_parallel", lambda *_, **__: None)
    monkeypatch.setattr(vllm.distributed, "get_dcp_group", lambda: group)
    serves(monkeypatch, group, group)
    _, stock = benchmark.start(2, 0, torch.device("cuda", 0))
    assert stock["vllm_nccl"] == {"active": False, "reason": why(old)}
