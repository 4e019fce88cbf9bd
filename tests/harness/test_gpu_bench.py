# SPDX-License-Identifier: Apache-2.0
"""Planning a pair on GPUs, on hosts that nvidia-smi's stand-in describes: nothing here needs a GPU."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.arms import Arm
from harness.errors import UserError
from harness.gpu_bench import choose
from harness.nvidia import FACTS, gpu_facts, visible_gpus
from harness.serving import kv_tokens_of, on_gpus
from harness.slices import FULL_ATTENTION, slice_config


@pytest.mark.parametrize(
    ("gpus", "profile"),
    [
        (["NVIDIA B300 SXM6 AC"] * 8, "b300-8"),
        (["NVIDIA H200"] * 8, "slice-h200-8"),
        (["NVIDIA H200"] * 2, "slice-h200-2"),
    ],
)
def test_profile_follows_the_gpus(gpus: list[str], profile: str) -> None:
    assert choose(gpus)[0] == profile


@pytest.mark.parametrize("gpus", [["NVIDIA H200"], ["NVIDIA B300"] * 7 + ["NVIDIA H200"]])
def test_gpus_without_a_pair_are_refused(gpus: list[str]) -> None:
    with pytest.raises(UserError, match="no pair is known"):
        choose(gpus)


def says(text: str) -> list[str]:
    """A command that prints what nvidia-smi would."""
    return [sys.executable, "-c", f"print({text!r})"]


def test_gpus_as_nvidia_smi_names_them() -> None:
    assert visible_gpus(says("NVIDIA H200\nNVIDIA H200")) == ["NVIDIA H200"] * 2
    assert visible_gpus(["no-such-program"]) == []


def test_facts_of_gpus() -> None:
    line = ", ".join(["NVIDIA H200", "GPU-4d0c", "580.159.04", "143771 MiB", *["1"] * (len(FACTS) - 4)])
    (facts,) = gpu_facts(says(line))
    assert facts["driver_version"] == "580.159.04" and facts["memory.total"] == "143771 MiB"
    assert gpu_facts(says("[Not Supported]")) == []


def bench(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`path` comes first on PATH: where a stand-in for nvidia-smi lies."""
    command = [sys.executable, "-m", "harness", "bench", *arguments]
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"} if path else None
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(params=[2, 8])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[int, Path]:
    """A host with so many H200: the folder of its nvidia-smi."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n" + "echo NVIDIA H200\n" * request.param)
    program.chmod(0o755)
    return request.param, program.parent


def test_resident_plan_names_every_engine_and_cell(host: tuple[int, Path], tmp_path: Path) -> None:
    count, path = host
    out = tmp_path / "run"
    more = ["--lone-prompts", "4", "--kill", f"dcp{count}", "--out", str(out), "--cache", str(tmp_path)]
    done = bench("--dry-run", *more, path=path)
    assert done.returncode == 0, done.stderr
    arms = [f"tp{count}", f"dcp{count}", f"dcp{count}-stock"] + (["dcp2-shard"] if count == 2 else [])
    starts = [line.strip() for line in done.stdout.splitlines() if " serve --profile " in line]
    assert [start.partition(":")[0] for start in starts] == arms
    assert all(f"--profile slice-h200-{count} " in start for start in starts)
    assert "FLASH_ATTN_MLA" in starts[0] and "KIMI_K3" not in starts[0]
    assert "KIMI_K3_PREFILL_KV=peer" in starts[1] and starts[1].endswith("PEER_FLASH_ATTN_MLA")
    assert "KIMI_K3_PREFILL_KV=stock" in starts[2] and starts[2].endswith(
        " FLASH_ATTN_MLA --dcp-comm-backend a2a"
    )
    assert len({start[start.index("--kv-cache-memory-bytes") :].split()[1] for start in starts}) == 1
    assert done.stdout.count("  cell ") == 2 * len(arms)
    assert "60000-180000 prompt tokens" in done.stdout and "tolerance 0.3 nats" in done.stdout
    assert f"SIGKILL for one rank of dcp{count}" in done.stdout
    assert not out.exists()


def explained(program: list[str], words: list[str]) -> str:
    """What the launcher makes of a command line that begins with `serve`."""
    assert words[0] == "serve"
    return subprocess.run(
        [*program, "explain", *words[1:]], capture_output=True, text=True, check=True
    ).stdout


PEER = ("--attention-backend", "PEER_FLASH_ATTN_MLA")
STOCK = ("--attention-backend", "FLASH_ATTN_MLA", "--dcp-comm-backend", "a2a")


@pytest.mark.parametrize(
    ("profile", "arm", "environment", "backend"),
    [
        ("slice-h200-2", "dcp2-shard", ["KIMI_K3_PREFILL_KV=peer", "VLLM_KIMI_SHARD_QKV_A=1"], PEER),
        ("slice-h200-8", "tp8", [], STOCK[:2]),
        ("slice-h200-8", "dcp8", ["KIMI_K3_PREFILL_KV=peer"], PEER),
        ("slice-h200-8", "dcp8-stock", ["KIMI_K3_PREFILL_KV=stock"], STOCK),
    ],
)
def test_launcher_takes_what_the_plan_gives_it(
    profile: str, arm: str, environment: list[str], backend: tuple[str, ...], tmp_path: Path
) -> None:
    done = bench("--gpu", "--profile", profile, "--dry-run", "--eager", "--cache", str(tmp_path))
    (start,) = (line for line in done.stdout.splitlines() if line.startswith(f"  {arm}: "))
    _, *words = start.split()
    count = len(environment)
    assert words[:count] == environment
    made = explained(words[count : count + 3], words[count + 3 :])
    assert "--hf-overrides" not in made  # the slice's own configuration has its layers already
    assert made.index("--load-format dummy") < made.index("--load-format kimi_k3_seeded")
    assert made.rstrip().endswith(f"--enforce-eager {' '.join(backend)}")
    ranks = int(profile[-1])
    assert f"--tensor-parallel-size {ranks}" in made
    assert ("--decode-context-parallel-size" in made) == arm.startswith("dcp")
    assert made.startswith(f"# {profile}: 8 layers on {ranks}x H200")
    assert f"# weights {28.747556928 / ranks:.1f} GB of 125.4 GB a GPU" in made  # its tensors in bfloat16


@pytest.mark.parametrize("arm", ["tp8", "dcp8"])
def test_launcher_takes_the_words_of_a_container(arm: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    chosen = ["--profile", "b300-8", "--image", "x@sha256:1", "--model", str(tmp_path)]
    done = bench("--gpu", "--dry-run", *chosen, "--out", str(tmp_path / "run"))
    (line,) = (line for line in done.stdout.splitlines() if f"--topology {arm} " in line)
    words = shlex.split(line.partition("x@sha256:1 ")[2])
    words[words.index("/model")] = str(tmp_path)
    made = explained([sys.executable, "-m", "kimi_k3_serve"], words)
    assert "--kv-cache-dtype fp8" in made and made.rstrip().endswith("ProvenGPUWorker")
    assert ("TOKENSPEED_MLA" in made) == ("trtllm_ragged" in made) == (arm == "dcp8")


@pytest.mark.parametrize("count", [2, 8])
def test_docker_plan_prints_every_step_and_does_none(count: int, tmp_path: Path) -> None:
    out = tmp_path / "run"
    chosen = ["--profile", f"slice-h200-{count}", "--rates", "0.5,1", "--out", str(out)]
    done = bench("--gpu", "--dry-run", "--image", "x@sha256:1", "--cache", str(tmp_path), *chosen)
    assert done.returncode == 0, done.stderr
    assert (
        f"x@sha256:1 serve --profile slice-h200-{count} --topology dcp{count} --model /model" in done.stdout
    )
    assert "--env KIMI_K3_PREFILL_KV=stock" in done.stdout
    assert f"--volume {out}/proof/tp{count}:/proof:rw" in done.stdout and "--proof-dir /proof" in done.stdout
    assert "--gpus all" in done.stdout and "--ulimit memlock=-1" in done.stdout
    assert not out.exists()


def test_docker_plan_of_the_whole_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    chosen = ["--profile", "b300-8", "--rates", "0.5,1", "--out", str(tmp_path / "run")]
    done = bench("--gpu", "--dry-run", "--image", "x@sha256:1", "--model", str(tmp_path), *chosen)
    assert done.returncode == 0, done.stderr
    assert "x@sha256:1 serve --profile b300-8 --topology dcp8 --model /model" in done.stdout
    assert "kimi_k3_seeded" not in done.stdout
    assert "--proof-dir /proof" in done.stdout and "ProvenGPUWorker" in done.stdout
    assert done.stdout.count("  cell ") == 4 and "about 6 min of load" in done.stdout


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ((), "no GPU is visible"),
        (("--profile", "b300-8"), "b300-8 serves the whole model"),
        (("--profile", "b300-8", "--image", "x"), "b300-8 serves the whole model"),
        (("--profile", "b300-8", "--image", "x", "--model", "/nowhere"), "--model DIR holds no config.json"),
        (("--profile", "slice-h200-2", "--engine", "docker"), "--engine docker serves from an image"),
        (("--profile", "slice-h200-2", "--arms", "tp2,tp2-stock"), "arm 'tp2-stock' is not known"),
        (("--profile", "slice-h200-2", "--kill", "dcp4"), "--kill dcp4 is none of the arms"),
        (("--profile", "slice-h200-2", "--repeats", "0"), "--repeats is 0"),
    ],
)
def test_what_is_missing_is_one_line(given: tuple[str, ...], error: str, tmp_path: Path) -> None:
    done = bench("--gpu", "--cache", str(tmp_path), *given)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {error}")


def test_each_arm_times_into_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = on_gpus(("p",), "slice-h200-2", tmp_path, 1, 9, seeded=True, graphs=True)
    arms = Arm.parse("tp2"), Arm.parse("dcp2-stock")
    assert [dict(serving.environment(arm)) for arm in arms] == [{}, {"KIMI_K3_PREFILL_KV": "stock"}]
    monkeypatch.setenv("KIMI_K3_TIME_PREFILL_CONTEXT", "/times")
    folders = [serving.environment(arm)["KIMI_K3_TIME_PREFILL_CONTEXT"] for arm in arms]
    assert folders == ["/times/tp2", "/times/dcp2-stock"]


def test_variants_of_an_arm() -> None:
    stock, ours = Arm.parse("dcp8-stock"), Arm.parse("dcp8")
    assert stock.topology == ours.topology and stock.topology_name == "dcp8"
    assert not stock.variant.paths and "prefill_kv_peer" in ours.variant.paths
    assert "FLASH_ATTN_MLA" in stock.variant.extra
    other = Arm.parse("dcp2-stock-flashmla")
    assert other.topology_name == "dcp2" and other.variant.extra[:2] == ("--attention-backend", "FLASHMLA")
    assert other.variant.environment == stock.variant.environment
    assert set(Arm.parse("dcp2-shard").variant.features) - set(ours.variant.features) == {
        "sharded_projections"
    }
    with pytest.raises(UserError, match="no rank wrote a proof"):
        ours.require_proof((), gpu=True)


def test_slices_have_the_published_widths() -> None:
    for name, full in FULL_ATTENTION.items():
        config = slice_config(name)
        linear = config["linear_attn_config"]
        assert sorted(linear["kda_layers"] + linear["full_attn_layers"]) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert tuple(linear["full_attn_layers"]) == full
        # A row of the MLA cache: 512 latent and 64 rotary elements of BF16 make 1,152 bytes.
        assert 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) == 1152
        # q_a and kv_a merged, as the sharded projection splits them.
        assert config["q_lora_rank"] + config["kv_lora_rank"] + config["qk_rope_head_dim"] == 2112
        json.dumps(config)
    with pytest.raises(UserError, match="slice 'half' is not known"):
        slice_config("half")


def test_kv_tokens_are_those_of_the_engines_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert kv_tokens_of(log) is None
    log.write_text("(EngineCore) INFO GPU KV cache size: 1,102,941 tokens, Maximum concurrency for 9 …")
    assert kv_tokens_of(log) == 1_102_941
