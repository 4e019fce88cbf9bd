# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.slices import slice_config, write_slice
from kimi_k3_serve import fit, launch
from kimi_k3_serve.cli import main
from kimi_k3_serve.errors import UserError
from kimi_k3_serve.profile import GRADES, load, names, parse
from kimi_k3_serve.topology import Topology

FP8 = '{"use_prefill_query_quantization":true,"mla_prefill_backend":"flashinfer"}'
TOO_SMALL = {"h200-8", "b200-8"}


def plan(profile: str, topology: str, *extra: str, **more: object) -> launch.Launch:
    arguments = {"model": "org/model", "host": "127.0.0.1", "port": 8000, "head": "10.0.0.1", **more}
    return launch.plan(profile=profile, topology=topology, extra=extra, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in names() if name != "cpu" and name not in TOO_SMALL])
def test_every_topology_of_a_profile_can_be_launched(name: str) -> None:
    profile = load(name)
    assert profile.grade in GRADES and profile.topologies
    for topology in profile.topologies:
        argv = plan(name, topology).argv
        shape = Topology.parse(topology)
        assert argv[argv.index("--tensor-parallel-size") + 1] == str(shape.tp)
        assert ("--dcp-comm-backend" in argv) == (shape.dcp > 1)


def test_profiles_hold_what_the_table_says() -> None:
    assert fit.holding() == [
        "b200-8x2",
        "b300-8",
        "gb200-4x4",
        "gb300-4x2",
        "h200-16",
        "h200-8x2",
        "rtx6000-16",
    ]


def test_weights_of_a_gpu_by_hand() -> None:
    # 92 layers x 896 experts x 3 matrices x 3584 x 3072 at 4.25 bits = 1,446.456 GB; 114.404 GB are the rest.
    assert pytest.approx(1446.456066, abs=1e-5) == fit.EXPERTS_GB
    assert fit.weights_gb(load("b300-8"), Topology(8)) == pytest.approx(1560.860324864 / 8)
    assert fit.weights_gb(load("h200-8x2"), Topology(8)) == pytest.approx(1446.456066 / 16 + 114.404259 / 8)
    assert fit.weights_gb(load("slice-h200-1"), Topology(1)) == pytest.approx(1560.860324864 * 5 / 93)


@pytest.mark.parametrize(
    ("profile", "topology", "extra", "words"),
    [
        ("h200-8", "tp8", (), "do not fit.*b300-8.*slice-h200-8"),
        ("b200-8", "dcp8", (), "195.1 GB a GPU"),
        ("b300-8", "tp16", (), "takes 16 GPUs, b300-8 has 8; use tp8 or dcp8"),
        ("b300-8", "tp8-dcp3", (), "does not divide"),
        ("b300-8", "dcp8", ("--attention-backend", "B12X_MLA"), r"B12X_MLA does not run on SM 10.3; use"),
        (
            "h200-8x2",
            "dcp8",
            ("--attention-backend=TOKENSPEED_MLA",),
            "does not run on SM 9.0; use .*FLASHMLA",
        ),
        ("h200-8x2", "dcp8", ("--attention-backend", "TRITON_MLA"), "LSE to BF16.*PEER_TRITON_MLA"),
        ("b300-8", "dcp8", ("--attention-backend", "PEER_FLASH_ATTN_MLA"), "does not run on SM 10.3; use"),
        (
            "b300-8",
            "tp8",
            ("--attention-config", "{}"),
            "fp8 prefill query.*use_prefill_query_quantization and",
        ),
        ("h200-8x2", "tp8", ("--kv-cache-dtype", "fp8_e4m3"), "SM 10 alone, not on SM 9.0.*dtype auto"),
        ("rtx6000-16", "tp16", ("--kv-cache-dtype", "fp8"), "SM 10 alone, not on SM 12.0"),
        ("b300-8", "tp8", ("--attention-config", "x"), "not JSON"),
        ("gb200-4x4", "tp16", ("node", "4"), "node 4 does not exist"),
        ("gb200-4x4", "tp16", ("head", ""), "--head ADDRESS"),
    ],
)
def test_what_cannot_work_is_refused_with_its_remedy(
    profile: str, topology: str, extra: tuple[str, ...], words: str
) -> None:
    more: dict[str, object] = {}
    if extra[:1] == ("node",):
        more, extra = {"node": int(extra[1])}, ()
    elif extra[:1] == ("head",):
        more, extra = {"head": None}, ()
    with pytest.raises(UserError, match=words):
        plan(profile, topology, *extra, **more)


def test_fp8_with_its_query_quantised_passes() -> None:
    plan("b300-8", "tp8", "--kv-cache-dtype", "fp8", "--attention-config", FP8)


def test_dcp_without_a_collective_backend_is_refused() -> None:
    profile, shape = load("b300-8"), Topology(8, 8)
    flags = {name: value for name, value in profile.flags.items() if not name.startswith("kv-cache")}
    assert "ag_rs" in next(fit.objections(profile, shape, flags))
    assert not list(fit.objections(profile, shape, {**flags, "dcp-comm-backend": "a2a"}))


@pytest.mark.parametrize("backend", fit.OWNERS)
def test_a_backend_with_its_own_collectives_needs_no_collective_backend(backend: str) -> None:
    from kimi_k3_serve.attention.backends import BACKENDS

    assert backend in BACKENDS and backend in fit.BACKEND_SM
    profile = load("rtx6000-16" if backend == "B12X_MLA" else "h200-16")
    flags = profile.flags | {"attention-backend": backend}
    assert not list(fit.attention(profile, Topology(16, 8), flags))


def test_flash_attn_mla_goes_with_either_exchange() -> None:
    """Its death with a2a is cured (`attention/cures.py`)."""
    for exchange in ("a2a", "ag_rs"):
        plan("h200-8x2", "dcp8", "--attention-backend", "FLASH_ATTN_MLA", "--dcp-comm-backend", exchange)


def test_nodes_of_one_engine() -> None:
    head, worker = plan("gb200-4x4", "dcp16").argv, plan("gb200-4x4", "dcp16", node=3).argv
    assert "--headless" in worker and "--headless" not in head
    assert worker[worker.index("--node-rank") + 1] == "3" and head[head.index("--nnodes") + 1] == "4"


def test_arms_of_a_profile_differ_only_by_dcp() -> None:
    tp, dcp = plan("slice-h200-2", "tp2"), plan("slice-h200-2", "dcp2")
    more = [word for word in dcp.argv if word not in tp.argv]
    assert more == [
        "--decode-context-parallel-size",
        "--cp-kv-cache-interleave-size",
        "1",
        "--dcp-comm-backend",
        "a2a",
    ]
    assert tp.environment == dcp.environment


@pytest.mark.parametrize(
    "change", [{"colour": "red"}, {"grade": "good"}, {"dcp": {"flag": {}}}, {"machine": {"gpus": 8}}]
)
def test_unknown_keys_of_a_profile_are_errors(change: dict[str, object]) -> None:
    sound = {"description": "d", "grade": "research", "flags": {}, "environment": {}}
    assert parse("mine", dict(sound)).layers is None
    with pytest.raises(UserError, match="profile mine"):
        parse("mine", {**sound, **change})


def test_explain_says_grade_and_room() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kimi_k3_serve", "explain", "--profile", "b300-8", "--topology", "dcp8"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "grade: research" in done.stdout and "195.1 GB of 253.1 GB a GPU" in done.stdout


def test_a_smaller_slice_in_a_folder_is_described_and_weighed_by_its_own_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The profile cuts a checkpoint to 12 layers, 100.7 GB a GPU; 14.37 GB follow from the folder's 8 small ones."""
    folder = str(write_slice("kimi-k3", tmp_path))
    command = ["--profile", "slice-h200-2", "--topology", "tp2"]
    assert main(["explain", *command, "--model", folder]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "# slice-h200-2: 8 layers on 2x H200; grade: research\n# weights 14.4 GB of 125.4"
    )
    assert "num_hidden_layers" not in printed
    assert main(["explain", *command]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "# slice-h200-2: 12 layers on 2x H200; grade: research\n# weights 100.7 GB of 125.4"
    )
    main(["doctor", *command, "--model", folder])
    assert "weights take 14.4 of 125.4 GB a GPU" in capsys.readouterr().out


def test_a_slice_whose_tensors_are_not_known_has_its_share_of_the_layers(tmp_path: Path) -> None:
    """Of quantised weights a configuration does not tell the bytes."""
    config = slice_config("kimi-k3") | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    profile = launch.load_for("slice-h200-2", tmp_path)
    assert fit.weights_gb(profile, Topology(2)) == pytest.approx(1560.860324864 * 8 / 93 / 2)


@pytest.mark.parametrize("command", ["explain", "doctor"])
def test_a_configuration_that_is_no_json_ends_in_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 8,')
    arguments = ["--profile", "slice-h200-2", "--topology", "tp2", "--model", str(tmp_path)]
    assert main([command, *arguments]) == 2
    assert f"{tmp_path}/config.json is no JSON" in capsys.readouterr().err.splitlines()[-1]


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """`kimi-k3 explain … | head -1`: nobody reads the rest."""
    readable, writable = os.pipe()
    os.close(readable)
    command = [sys.executable, "-m", "kimi_k3_serve", "explain", "--profile", "b300-8", "--topology", "dcp8"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, stdout=writable, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writable)
    assert done.stderr == "" and done.returncode == 0
