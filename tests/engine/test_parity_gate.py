# SPDX-License-Identifier: Apache-2.0
"""The parity gate on real engines: it passes what is right and catches each fault it exists for.

The engine runs without a C++ compiler on PATH, as on a bare machine.
"""

import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engines.process import Engine, free_port, start
from harness.errors import UserError
from harness.load import Target
from harness.parity import ArmAnswers, ParityResult, Prompt, compare, make_prompts
from harness.parity_collect import collect, continue_freely
from kimi_k3_serve.checkpoint import VOCAB, write_checkpoint
from kimi_k3_serve.reference import greedy

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent
LENGTHS = (300, 1290)
"""The second needs three chunks of 512 tokens, so that its context is gathered over DCP twice."""
OUTPUT_TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> tuple[Prompt, ...]:
    return make_prompts(7, VOCAB, LENGTHS)


@pytest.fixture(scope="module")
def reference(model: Path, prompts: tuple[Prompt, ...]) -> dict[str, object]:
    from harness.parity import parse_reference

    asked = [{"id": p.id, "prompt": list(p.tokens), "output_tokens": OUTPUT_TOKENS} for p in prompts]
    return parse_reference(greedy(model, asked))


def path_without_compilers(folder: Path) -> str:
    """A PATH that holds only links to what the engine may need; no compiler."""
    for tool in ("sh", "env", "cat", "uname", "nice", "ldconfig", "lscpu"):
        found = shutil.which(tool, path=os.environ["PATH"] + ":/sbin:/usr/sbin")
        if found:
            (folder / tool).symlink_to(found)
    for compiler in ("g++", "gcc", "c++", "cc", "clang", "clang++"):
        assert shutil.which(compiler, path=str(folder)) is None
    return str(folder)


def launch(model: Path, folder: Path, topology: str, *extra: str, **variables: str) -> Engine:
    port = free_port()
    argv = [sys.executable, "-m", "kimi_k3_serve", "serve", "--topology", topology, "--model", str(model)]
    argv += [
        "--port",
        str(port),
        "--kv-cache-memory-bytes",
        str(16 << 20),
        "--proof-dir",
        str(folder / "proof"),
    ]
    bare = folder / "bin"
    bare.mkdir()
    environment = {
        "PATH": path_without_compilers(bare),
        "PYTHONPATH": str(HERE),
        "KIMI_K3_TEST_FAULT_FILE": str(folder / "fault"),
        **variables,
    }
    (folder / "fault").write_text("none")
    return asyncio.run(
        start(
            topology,
            [*argv, "--", *extra],
            url=f"http://127.0.0.1:{port}",
            log_path=folder / "engine.log",
            proof_dir=folder / "proof",
            env=environment,
            ready_timeout_s=900.0,
        )
    )


def judge(
    engine: Engine, model: Path, prompts: tuple[Prompt, ...], reference: dict[str, object]
) -> ParityResult:
    continuations = {name: [position.token for position in answer] for name, answer in reference.items()}
    target = Target(engine.name, engine.url, str(model))
    answers: ArmAnswers = asyncio.run(collect(target, prompts, continuations, VOCAB))
    return compare(prompts, reference, {engine.name: answers})


@pytest.fixture(scope="module")
def faulty(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path]]:
    folder = tmp_path_factory.mktemp("faulty")
    with launch(model, folder, "dcp2", "--worker-cls", "faulty.FaultyCPUWorker") as engine:
        yield engine, folder


def test_a_healthy_dcp_engine_passes(faulty, model, prompts, reference) -> None:  # type: ignore[no-untyped-def]
    engine, folder = faulty
    verdict = judge(engine, model, prompts, reference)
    assert verdict.ok, verdict.refusal()
    proofs = [json.loads((folder / "proof" / f"rank-{rank}.json").read_text()) for rank in (0, 1)]
    used = {"prefill_context_gather", "prefill_kv_shared", "decode_merge"}
    assert all(used <= set(proof["used"]) for proof in proofs)
    assert all(proof["prefill_kv"]["transport"] == "shared" for proof in proofs)


@pytest.mark.parametrize(
    "fault", ["dropped_shard", "swapped_heads", "mixed_bases", "decode_block", "context_block"]
)
def test_each_fault_is_caught(faulty, model, prompts, reference, fault: str) -> None:  # type: ignore[no-untyped-def]
    engine, folder = faulty
    (folder / "fault").write_text(fault)
    try:
        verdict = judge(engine, model, prompts, reference)
    finally:
        (folder / "fault").write_text("none")
    assert not verdict.ok
    assert "vs reference" in (verdict.refusal() or "")


def test_the_check_of_published_rows_ends_the_engine(model, prompts, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """KIMI_K3_VERIFY_PREFILL_KV=1: right rows pass; then rank 0 publishes another block in place of one."""
    faulty = ("--worker-cls", "faulty.FaultyCPUWorker")
    with launch(model, tmp_path, "dcp2", *faulty, KIMI_K3_VERIFY_PREFILL_KV="1") as engine:
        target, longest = Target(engine.name, engine.url, str(model)), prompts[-1:]
        assert asyncio.run(continue_freely(target, longest, 1))
        proof = json.loads((tmp_path / "proof" / "rank-1.json").read_text())
        assert "prefill_kv_verified" in proof["used"]
        (tmp_path / "fault").write_text("context_block")
        with pytest.raises(UserError):
            asyncio.run(continue_freely(target, longest, 1))
        assert asyncio.run(engine.dying(within_s=60.0))
    line = r"PublishedRowsDiffer: rank \d: kv_c of context chunk 0 differs from vLLM's in row \d+ of 512; report it"
    assert re.search(line, (tmp_path / "engine.log").read_text())


def test_vllms_own_strided_ops_are_caught(model, prompts, reference, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Without `custom_ops: none`, the CPU build's rotary_embedding and rms_norm misread strided views."""
    with launch(model, tmp_path, "tp2", "--compilation-config", '{"custom_ops":["all"]}') as engine:
        proof = json.loads((tmp_path / "proof" / "rank-0.json").read_text())
        assert not proof["features"]["native_ops"]["active"]
        assert not judge(engine, model, prompts, reference).ok
