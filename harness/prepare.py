# SPDX-License-Identifier: Apache-2.0
"""What a pair needs before its first engine starts: the checkpoint, and a reference's answers to compare with."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.engines.process import run_program
from harness.parity import OUTPUT_TOKENS, Answers, Prompt, parse_reference

HEADS = 4
"""Of a checkpoint that is not asked for more."""


async def make_checkpoint(
    program: Sequence[str], cache: Path, progress: Callable[[str], None], *, ranks: int
) -> Path:
    """Writes the checkpoint to a folder named by its content: never stale, and safe beside other runs.

    It has a head of attention for each of `ranks` at least.
    """
    cache.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=cache))
    try:
        argv = [*program, "checkpoint", "--out", str(fresh)]
        argv += ["--heads", str(ranks)] if ranks > HEADS else []
        await run_program("checkpoint", argv, log_path=cache / "checkpoint.log", progress=progress)
        kept = cache / f"checkpoint-{sha256_of(fresh)[:16]}"
        if not kept.exists():
            fresh.rename(kept)
        return kept
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


async def ask_reference(
    program: Sequence[str],
    model: Path,
    prompts: Sequence[Prompt],
    folder: Path,
    log_path: Path,
    progress: Callable[[str], None],
) -> Answers:
    """Greedy answers of a float32 run outside any engine; keeps prompts.json and reference.json in `folder`."""
    keep_prompts(folder, prompts, OUTPUT_TOKENS)
    argv = [*program, "reference", "--model", str(model)]
    argv += ["--prompts", str(folder / "prompts.json"), "--out", str(folder / "reference.json")]
    await run_program("reference", argv, log_path=log_path, progress=progress)
    return parse_reference(json.loads((folder / "reference.json").read_bytes()))


def keep_prompts(
    folder: Path,
    prompts: Sequence[Prompt],
    output_tokens: int,
    continuations: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Writes prompts.json, what a reference is asked; `continuations` by prompt id, where they are not its own.

    A kept reference.json that answers other prompts is removed.
    """
    asked = [
        {"id": prompt.id, "prompt": prompt.tokens, "output_tokens": output_tokens}
        | ({} if continuations is None else {"continuation": continuations[prompt.id]})
        for prompt in prompts
    ]
    path, text = folder / "prompts.json", json.dumps(asked)
    if not path.exists() or path.read_text() != text:
        (folder / "reference.json").unlink(missing_ok=True)
    path.write_text(text)


def sha256_of(folder: Path) -> str:
    """Over names and contents of a folder's files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = hashlib.sha256(path.read_bytes()).digest()
        digest.update(f"{path.relative_to(folder)}\0".encode() + content)
    return digest.hexdigest()
