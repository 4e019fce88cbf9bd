# SPDX-License-Identifier: Apache-2.0
"""A pair from an image, with the fake engine as the container: what it must prove, and what is kept of it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from harness import docker_pair
from harness.arms import Arm
from harness.docker_pair import DockerPlan, DockerRun
from harness.engines import process
from harness.engines.docker import Container
from harness.engines.process import Engine, free_port
from harness.errors import UserError
from harness.store import RunStore

FAKE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DockerPlan:
    """Short prompts, and containers that are processes of this host."""
    port = free_port()
    monkeypatch.setattr(docker_pair, "URL", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(docker_pair, "SOURCE_TOKENS", (600, 1800))
    monkeypatch.setattr(docker_pair, "VOCAB_SIZE", 512)
    monkeypatch.setattr(Engine, "started_as", lambda engine: {"image_id": "sha256:1"})

    async def start(name: str, container: Container, **where: Any) -> Engine:
        words = list(container.command)
        words[words.index("--port") + 1] = str(port)
        words[words.index("--proof-dir") + 1] = str(where["proof_dir"])
        assert container.volumes[str(where["proof_dir"])] == {"bind": "/proof", "mode": "rw"}
        argv = [sys.executable, str(FAKE), *words]
        return await process.start(name, argv, env=container.environment, **where)

    monkeypatch.setattr(docker_pair.docker, "start", start)
    arms = (Arm.parse("tp2"), Arm.parse("dcp2"))
    return DockerPlan(
        "x@sha256:1", "slice-h200-2", arms, tmp_path, True, (20.0,), 4, 2, 8, 1 << 24, tmp_path / "run", 0
    )


def cells(plan: DockerPlan) -> dict[str, bool]:
    return {cell.key.arm: cell.facts["aborted"] for cell in RunStore.open(plan.out).cells()}


async def test_arm_after_arm(plan: DockerPlan) -> None:
    await DockerRun(plan).run()
    assert cells(plan) == {"tp2": False, "dcp2": False}
    manifest = json.loads((plan.out / "manifest.json").read_text())
    assert [len(arm["engine"]["ranks"]) for arm in manifest["arms"]] == [2, 2]
    assert [arm["kv_tokens"] for arm in manifest["arms"]] == [16_384, 32_768]
    assert manifest["client_calibration"]["n"] == 40


async def test_arm_that_is_not_what_its_name_says(plan: DockerPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"inactive_feature": "prefill_context_gather"}))
    run = DockerRun(plan)
    with pytest.raises(UserError, match="arm dcp2 is not what its name says: prefill_context_gather"):
        await run.run()
    assert run.store is not None and cells(plan) == {"tp2": False}


async def test_interrupted_in_a_cell_which_is_kept(plan: DockerPlan) -> None:
    run = DockerRun(plan)
    task = asyncio.ensure_future(run.run())
    while run._stop is None:
        await asyncio.sleep(0.01)
    run.interrupt()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not cells(plan) or cells(plan) == {"tp2": True}
