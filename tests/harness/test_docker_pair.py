# SPDX-License-Identifier: Apache-2.0
"""A pair from an image, with the fake engine as the container: what it must prove, and what is kept of it."""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import calibrate, docker_pair
from harness.arms import Arm
from harness.docker_pair import DockerPlan, DockerRun
from harness.engines import process
from harness.engines.docker import Container
from harness.engines.process import Engine, free_port
from harness.errors import UserError
from harness.parity import Tolerance
from harness.report import write_report
from harness.store import RunStore

FAKE = Path(__file__).with_name("fake_engine.py")
pytestmark = pytest.mark.usefixtures("client_is_trusted")


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
        image="x@sha256:1",
        profile="slice-h200-2",
        arms=arms,
        model=tmp_path,
        seeded=True,
        rates=(20.0,),
        requests=4,
        cohort_size=2,
        output_tokens=8,
        kv_bytes=1 << 24,
        out=tmp_path / "run",
        seed=0,
        parity_lengths=(40, 127),
        parity_tokens=8,
        tolerance=Tolerance(logprob=0.3),
    )


def cells(plan: DockerPlan) -> dict[str, bool]:
    return {cell.key.arm: cell.facts["aborted"] for cell in RunStore.open(plan.out).cells()}


async def test_arm_after_arm(plan: DockerPlan) -> None:
    await DockerRun(plan).run()
    assert cells(plan) == {"tp2": False, "dcp2": False}
    manifest = json.loads((plan.out / "manifest.json").read_text())
    assert [len(arm["engine"]["ranks"]) for arm in manifest["arms"]] == [2, 2]
    assert [arm["kv_tokens"] for arm in manifest["arms"]] == [16_384, 32_768]
    assert manifest["client_calibration"]["n"] == calibrate.LEAST_REQUESTS
    assert manifest["parity"]["ok"] and [check["launches"] for check in manifest["parity_checks"]] == [
        {"tp2": 0},
        {"dcp2": 0},
    ]
    assert [pair["pair"] for pair in manifest["parity"]["pairs"]][2:] == [
        "tp2 vs dcp2",
        "tp2 vs dcp2, concurrent",
    ]
    kept = plan.out / "parity" / "check-2"
    assert (kept / "tp2.json.gz").exists() and (kept / "proof" / "dcp2" / "rank-1.json").exists()


@pytest.mark.parametrize("despite", [False, True])
async def test_arms_that_disagree_get_no_headline(
    despite: bool, plan: DockerPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first arm is timed before the second one answers; what was measured of it is kept."""
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"wrong_topology": "dcp2", "wrong_by": 0.5}))
    run = DockerRun(replace(plan, despite_refusal=despite))
    if despite:
        await run.run()
    else:
        with pytest.raises(UserError, match=r"0.5 > 0.3 \(tp2 vs dcp2\)"):
            await run.run()
    assert cells(plan) == ({"tp2": False, "dcp2": False} if despite else {"tp2": False})
    assert run.store is not None
    report = write_report(run.store)
    assert "|Δlogprob| 0.5 > 0.3 (tp2 vs dcp2)" in report and "highest passing QPS" not in report


async def test_arms_of_other_bytes_are_not_compared(
    plan: DockerPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", json.dumps({"other_bytes": "dcp2"}))
    with pytest.raises(UserError, match=r"differ in bytes \(tp2 16,777,216, dcp2 8,388,608\)"):
        await DockerRun(plan).run()
    assert cells(plan) == {"tp2": False}


def test_the_first_arms_bytes_are_the_others_too(plan: DockerPlan) -> None:
    """Where the profile leaves them; asked for, they are every arm's."""
    left = replace(plan, kv_bytes=0)
    assert "--kv-cache-memory-bytes" not in left.container(plan.arms[0]).command
    for asked, words in ((left, "12345"), (plan, str(1 << 24))):
        command = asked.container(plan.arms[1], 12345).command
        assert command[command.index("--kv-cache-memory-bytes") + 1] == words
    assert "what the profile leaves the first arm, and as many bytes in the others" in left.describe()
    assert "parity: prompts of 40, 127 tokens, 8 tokens each; tolerance 0.3 nats" in left.describe()


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
