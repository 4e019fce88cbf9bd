# SPDX-License-Identifier: Apache-2.0
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from kimi_k3_serve import launch, source_lock
from kimi_k3_serve.checkpoint import shapes, write_checkpoint
from kimi_k3_serve.errors import UserError
from kimi_k3_serve.topology import Topology


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def plan(model: Path, topology: str, **changes: object) -> launch.Launch:
    arguments = {"profile": "cpu", "host": "127.0.0.1", "port": 8000, "kv_cache_memory_bytes": 1 << 24}
    return launch.plan(topology=topology, model=model, **{**arguments, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("tp8", (8, 1)), ("dcp8", (8, 8)), ("tp16-dcp8", (16, 8)), ("tp1", (1, 1)), ("tp2-dcp1", (2, 1))],
)
def test_topology_names(name: str, expected: tuple[int, int]) -> None:
    assert (Topology.parse(name).tp, Topology.parse(name).dcp) == expected


@pytest.mark.parametrize("name", ["", "tp", "tp0", "dp8", "tp8dcp8", "tp8-", "-dcp2-", "tp8-dcp3", "TP8"])
def test_bad_topologies_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="topology"):
        Topology.parse(name)


def test_the_arms_differ_only_in_context_parallelism(model: Path) -> None:
    tp, dcp = plan(model, "tp2"), plan(model, "dcp2")
    assert tp.environment == dcp.environment
    start = dcp.argv.index("--decode-context-parallel-size")
    added = ("--decode-context-parallel-size", "2", "--cp-kv-cache-interleave-size", "1")
    assert dcp.argv[start : start + 4] == added
    assert dcp.argv[:start] + dcp.argv[start + 4 :] == tp.argv


def test_arguments_after_the_dashes_come_last(model: Path) -> None:
    assert plan(model, "tp2", extra=["--max-model-len", "99"]).argv[-2:] == ("--max-model-len", "99")


@pytest.mark.parametrize(
    ("changes", "topology", "word"),
    [
        ({"profile": "abacus"}, "tp2", "profile"),
        ({"backend": "stock"}, "dcp2", "shard"),
        ({"model": Path("/nowhere")}, "tp2", "config.json"),
        ({}, "tp4096", "cores"),
    ],
)
def test_what_cannot_work_is_refused(
    model: Path, changes: dict[str, object], topology: str, word: str
) -> None:
    with pytest.raises(UserError, match=word):
        plan(changes.pop("model", model), topology, **changes)  # type: ignore[arg-type]


def test_ranks_share_cores_where_that_is_asked_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5})
    with pytest.raises(UserError, match=r"TP8 needs 8 cores.*KIMI_K3_SHARE_CORES=1"):
        plan(model, "dcp8")
    monkeypatch.setenv("KIMI_K3_SHARE_CORES", "1")
    assert plan(model, "dcp8").environment["VLLM_CPU_OMP_THREADS_BIND"] == "3|5|3|5|3|5|3|5"


def test_a_checkpoint_has_a_head_for_each_rank(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, heads=8)
    with safe_open(tmp_path / "model.safetensors", "pt") as tensors:
        found = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    assert found == shapes(8)
    assert json.loads((tmp_path / "config.json").read_text())["num_attention_heads"] == 8


def test_a_users_error_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kimi_k3_serve", "serve", "--topology", "tp2", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_installed_vllm_is_the_locked_one() -> None:
    assert source_lock.verify() == "locked"


def test_a_changed_upstream_function_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "vllm.model_executor.layers.attention.mla_attention.reorg_kvcache"
    tampered = tmp_path / "upstream.toml"
    tampered.write_text(source_lock.LOCK.read_text().replace(source_lock.digest(name), "0" * 64))
    monkeypatch.setattr(source_lock, "LOCK", tampered)
    with pytest.raises(source_lock.SourceLockError, match="reorg_kvcache differs"):
        source_lock.verify()
    monkeypatch.setenv(source_lock.OVERRIDE, "1")
    assert source_lock.verify() == "unlocked"
    assert source_lock.update() == [name]
    monkeypatch.delenv(source_lock.OVERRIDE)
    assert source_lock.verify() == "locked"


def test_a_missing_upstream_function_is_refused_by_name() -> None:
    with pytest.raises(source_lock.SourceLockError, match=r"vllm\.platforms\.cpu\.Nothing"):
        source_lock.digest("vllm.platforms.cpu.Nothing")


def test_checkpoint_is_deterministic_and_whole(tmp_path: Path) -> None:
    from safetensors import safe_open

    digests = set()
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name, seed=3)
        digests.add(hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest())
        assert (tmp_path / name / "model.safetensors").stat().st_mode & 0o044 == 0o044
    assert len(digests) == 1
    with safe_open(tmp_path / "a" / "model.safetensors", "pt") as tensors:
        assert {key: tuple(tensors.get_tensor(key).shape) for key in tensors.keys()} == shapes()  # noqa: SIM118
    assert json.loads((tmp_path / "a" / "config.json").read_text())["kv_lora_rank"] == 512
