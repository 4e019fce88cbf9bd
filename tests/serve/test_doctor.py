# SPDX-License-Identifier: Apache-2.0
"""Each check is provoked: a false root folder and a false nvidia-smi stand for hardware that is not here."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kimi_k3_serve import doctor, doctor_probes
from kimi_k3_serve.doctor import Case
from kimi_k3_serve.doctor_host import Host
from kimi_k3_serve.profile import load
from kimi_k3_serve.topology import Topology

B300 = "{i}, GPU-{i}{i}{i}{i}, NVIDIA B300 SXM6 AC, 275040, 4, 580.95.05, 10.3, 0"


class World:
    """A machine made of files; `gpus` are lines as nvidia-smi prints them."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        (self.root / "dev").mkdir(parents=True)
        self.gpus = [B300.format(i=i) for i in range(8)]
        self.cuda_words, self.cuda = "CUDA Version", "13.0"
        self.links = {(a, b): "OK" for a in range(8) for b in range(8) if a != b}
        self.environment: dict[str, str] = {}
        self.profile, self.topology = "b300-8", "dcp8"
        self.model: str | None = None
        self.extra: tuple[str, ...] = ()
        self.folder = folder

    def smi(self) -> list[str]:
        count = len(self.gpus)
        topology = ["\t" + "\t".join(f"GPU{i}" for i in range(count))]
        topology += [
            f"GPU{a}\t" + "\t".join("X" if a == b else self.links.get((a, b), "OK") for b in range(count))
            for a in range(count)
        ]
        answers = {
            "query": self.gpus,
            "topo": topology,
            "head": [f"| NVIDIA-SMI 580 {self.cuda_words}: {self.cuda} |"],
        }
        (self.folder / "answers.json").write_text(json.dumps(answers))
        program = (
            "import json, sys; answers = json.load(open(sys.argv[1])); words = ' '.join(sys.argv[2:]);"
            "print('\\n'.join(answers['query' if 'query' in words else 'topo' if 'topo' in words else 'head']))"
        )
        return [sys.executable, "-c", program, str(self.folder / "answers.json")]

    def case(self) -> Case:
        host = Host(self.root, self.smi(), self.environment)
        return Case(
            host, host.gpus(), load(self.profile), Topology.parse(self.topology), self.model, self.extra
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def look(check: doctor.Check, case: Case) -> str:
    """The findings that are not ok, on one line each."""
    findings = list(check(case))
    assert all(finding.remedy for finding in findings if finding.level in ("warn", "fail")), findings
    return "\n".join(f"{item.level} {item.check}: {item.why}" for item in findings if item.level != "ok")


def test_a_sound_machine_has_no_complaint(world: World) -> None:
    for check in (doctor.weights, doctor.gpus, doctor.driver, doctor.peer_access, doctor.autotune):
        assert look(check, world.case()) == ""
    assert look(doctor.keep_alive, world.case()) == ""


def test_weights_that_do_not_fit(world: World) -> None:
    world.profile, world.topology = "h200-8", "tp8"
    assert "fail launch: the weights do not fit" in look(doctor.weights, world.case())


def test_fp8_without_query_quantisation(world: World) -> None:
    world.extra = ("--attention-config", '{"mla_prefill_backend":"flashinfer"}')
    assert "lacks use_prefill_query_quantization" in look(doctor.weights, world.case())


def test_dcp_without_its_collective_backend(world: World) -> None:
    case = world.case()
    assert case.profile
    case = replace(case, profile=replace(case.profile, dcp_flags={}))
    assert "ag_rs" in look(doctor.weights, case)


def test_stock_a2a_with_flash_attn_mla(world: World) -> None:
    assert look(doctor.stock_a2a, world.case()).startswith("skip")
    world.profile, world.extra = "h200-8x2", ("--attention-backend", "FLASH_ATTN_MLA")
    assert look(doctor.stock_a2a, world.case()) == ""
    world.environment["VLLM_PLUGINS"] = "other"
    assert "leaves kimi_k3_serve out: FLASH_ATTN_MLA dies with stock a2a" in look(
        doctor.stock_a2a, world.case()
    )
    world.environment["VLLM_PLUGINS"] = "other,kimi_k3_serve"
    assert look(doctor.stock_a2a, world.case()) == ""


def test_an_nccl_library_that_is_too_old(world: World, tmp_path: Path) -> None:
    assert look(doctor.nccl, world.case()).startswith("skip")
    source = tmp_path / "nccl.c"
    for version, found in ((22803, "NCCL 2.28.3"), (22907, None)):
        library = tmp_path / f"{version}.so"
        source.write_text(f"int ncclGetVersion(int *version) {{ *version = {version}; return 0; }}")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        world.environment["VLLM_NCCL_SO_PATH"] = str(library)
        why = f"warn nccl: {library} is {found}, with which vLLM disables its own NCCL wrapper"
        assert look(doctor.nccl, world.case()) == (why if found else "")
    for path, words in (("libm.so.6", "is no NCCL library"), ("absent.so", "cannot open shared object file")):
        world.environment["VLLM_NCCL_SO_PATH"] = path
        said = look(doctor.nccl, world.case())
        assert said.startswith(f"warn nccl: {path}") and words in said


def test_the_plugin_has_the_name_that_the_doctor_looks_for() -> None:
    found = [point.name for point in entry_points(group="vllm.general_plugins") if "kimi_k3" in point.value]
    assert set(found) == {doctor.PLUGIN}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "7, GPU-7777, NVIDIA H100, 275040, 4, 580.95.05, 9.0, 0",
            "mixed models: NVIDIA B300 SXM6 AC, NVIDIA H100",
        ),
        (
            "7, GPU-7777, NVIDIA B300 SXM6 AC, 275040, 60000, 580.95.05, 10.3, 0",
            "GPU 7: 60000 MiB are in use",
        ),
        (
            "7, GPU-7777, NVIDIA B300 SXM6 AC, 275040, 4, 580.95.05, 10.3, 3",
            "GPU 7: 3 uncorrected ECC errors",
        ),
        ("7, GPU-7777, NVIDIA B300 SXM6 AC, 143771, 4, 580.95.05, 10.3, 0", "the profile expects 268"),
        ("", "the profile needs 8 GPUs, visible are 7"),
    ],
)
def test_gpus_that_are_not_as_they_should_be(world: World, line: str, words: str) -> None:
    world.gpus[7] = line
    if "143771" in line:
        world.gpus = [line.replace("7,", f"{i},", 1) for i in range(8)]
    assert words in look(doctor.gpus, world.case())


def test_only_the_gpus_that_cuda_sees_count(world: World) -> None:
    world.environment["CUDA_VISIBLE_DEVICES"] = "0,GPU-55,99,1"  # CUDA stops at the unknown 99
    case = world.case()
    assert [gpu.index for gpu in case.gpus] == [0, 5]
    assert "the profile needs 8 GPUs, visible are 2" in look(doctor.gpus, case)
    world.links[0, 5], world.links[2, 3] = "CNS", "CNS"
    assert look(doctor.peer_access, world.case()) == "fail p2p: no peer access between GPU 0 and 5 (CNS)"
    world.environment["CUDA_VISIBLE_DEVICES"] = ""
    assert world.case().gpus == []


def test_ecc_that_is_off_is_no_error(world: World) -> None:
    world.gpus = [line.removesuffix("0") + "[N/A]" for line in world.gpus]
    assert look(doctor.gpus, world.case()) == ""


def test_an_old_driver(world: World) -> None:
    world.cuda = "12.8"
    assert "runs CUDA 12.8, the image needs 13.0" in look(doctor.driver, world.case())
    world.cuda = "13.4"
    world.cuda_words = "CUDA UMD Version"
    assert look(doctor.driver, world.case()) == ""
    world.cuda = "N/A"
    assert "warn driver" in look(doctor.driver, world.case())


def test_a_pair_without_peer_access(world: World) -> None:
    world.links[2, 5] = "CNS"
    assert look(doctor.peer_access, world.case()) == "fail p2p: no peer access between GPU 2 and 5 (CNS)"


def test_multicast_that_is_switched_off_is_not_tried(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(doctor_probes, "run")
    world.environment["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    assert "TORCH_SYMM_MEM_DISABLE_MULTICAST=1: KV publication falls back" in look(
        doctor.multicast, world.case()
    )


def test_probes_fail_where_no_gpu_is(world: World) -> None:
    """The real probe processes, on a machine without GPUs: they fail, and say so in one line."""
    world.environment = {**os.environ, doctor.DISABLE_MULTICAST: "0"}
    case = replace(world.case(), gpus=world.case().gpus[:2])
    for check, start in (
        (doctor.rendezvous, "fail rendezvous: rank "),
        (doctor.multicast, "warn multicast: rank "),
    ):
        found = look(check, case)
        assert found.startswith(start) and "Error: " in found and "\n" not in found


def test_rendezvous_leaves_multicast_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a GPU without multicast fails the one check, not the other."""
    seen: list[Mapping[str, str]] = []

    def probe(name: str, count: int, environment: Mapping[str, str]) -> tuple[bool, str]:
        seen.append(environment)
        return True, f"{count} ranks"

    monkeypatch.setattr(doctor_probes, "run", probe)
    assert look(doctor.rendezvous, world.case()) == look(doctor.multicast, world.case()) == ""
    assert [environment.get(doctor.DISABLE_MULTICAST) for environment in seen] == ["1", None]


def test_probes_are_not_run_without_gpus(world: World) -> None:
    world.gpus = []
    for check in (doctor.multicast, doctor.rendezvous, doctor.peer_access, doctor.driver, doctor.gpus):
        assert look(check, world.case()).startswith("skip ")


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_probes, "TIMEOUT_S", 0.01)
    assert doctor_probes.run("rendezvous", 2, os.environ) == (False, "no answer within 0.01 s")


def test_the_first_rank_that_fails_ends_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would wait for it; a script stands in for Python, its fourth argument is the rank."""
    program = tmp_path / "python"
    program.write_text(
        '#!/bin/sh\n[ $4 = 0 ] && exec sleep 50\necho "RuntimeError: broken link" >&2; exit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    began = time.monotonic()
    assert doctor_probes.run("rendezvous", 2, {}) == (False, "rank 1: RuntimeError: broken link")
    assert time.monotonic() - began < 20
    program.write_text("#!/bin/sh\necho noise; echo rank $4 of $5\n")
    assert doctor_probes.run("rendezvous", 2, {}) == (True, "rank 0 of 2")


def test_imex_channels(world: World) -> None:
    world.profile = "gb300-4x2"
    assert "cuMemCreate will not be permitted" in look(doctor.imex, world.case())
    channels = world.root / "dev/nvidia-caps-imex-channels"
    channels.mkdir()
    (channels / "channel0").touch()
    assert look(doctor.imex, world.case()) == ""


def test_mlx5_without_peermem(world: World) -> None:
    (world.root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert "errno 524" in look(doctor.rdma, world.case())
    (world.root / "proc").mkdir()
    (world.root / "proc/modules").write_text("nvidia_peermem 16384 0 - Live 0x0\n")
    assert look(doctor.rdma, world.case()) == ""
    (world.root / "proc/modules").unlink()
    world.environment["NCCL_DMABUF_ENABLE"] = "0"
    assert look(doctor.rdma, world.case()) == ""


def test_small_shared_memory_and_limits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "shm_mb", lambda self: 64.0)
    limits = {resource.RLIMIT_MEMLOCK: 65536, resource.RLIMIT_STACK: 8388608}
    monkeypatch.setattr(Host, "limit", lambda self, which: limits[which])
    found = look(doctor.shared_memory, world.case())
    assert "fail shm: /dev/shm has 64 MB" in found and "warn memlock" in found and "warn stack" in found
    (world.root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert "fail memlock: locked memory is limited to 65536 bytes" in look(doctor.shared_memory, world.case())
    limits.update({resource.RLIMIT_MEMLOCK: -1, resource.RLIMIT_STACK: -1})
    monkeypatch.setattr(Host, "shm_mb", lambda self: 16000.0)
    assert look(doctor.shared_memory, world.case()) == ""


def test_autotuning_at_high_utilisation(world: World) -> None:
    case = world.case()
    assert case.profile
    flags = {name: value for name, value in case.profile.flags.items() if "autotune" not in name}
    case = replace(case, profile=replace(case.profile, flags=flags))
    assert "fail autotune" in look(doctor.autotune, case)


def test_short_keep_alive(world: World) -> None:
    case = replace(world.case(), profile=None)
    assert "warn keep-alive: connections are closed after 5 s" in look(doctor.keep_alive, case)


def test_cache_that_is_full_or_closed(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world.environment["HF_HOME"] = str(tmp_path / "hf")
    monkeypatch.setattr(Host, "free_gb", lambda self, folder: 3.0)
    assert look(doctor.cache, world.case()) == "warn cache: HF_HOME: 3 GB are free"
    world.environment["HF_HOME"] = "/proc/hf"
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "is not writable" in look(doctor.cache, world.case())


def test_a_checkpoint_that_lacks_shards(world: World, tmp_path: Path) -> None:
    world.model = str(tmp_path)
    assert "config.json" in look(doctor.checkpoint, world.case())
    (tmp_path / "config.json").write_text("{}")
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (tmp_path / "model-1.safetensors").touch()
    assert "1 shards are missing, the first is model-2.safetensors" in look(doctor.checkpoint, world.case())
    (tmp_path / "model-2.safetensors").touch()
    assert look(doctor.checkpoint, world.case()) == ""
    world.model = "nobody/nothing"
    assert "is not in" in look(doctor.checkpoint, world.case())


def test_command_line_text_json_and_exit_codes() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kimi_k3_serve", "doctor", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    sound = run("--json")
    assert sound.returncode == 0 and json.loads(sound.stdout)["failed"] is False
    bad = run("--profile", "h200-8", "--topology", "tp8")
    assert bad.returncode == 1
    assert "fail  launch      the weights do not fit" in bad.stdout and "-> profiles that hold" in bad.stdout
