# SPDX-License-Identifier: Apache-2.0
"""What each worker proves about itself: one JSON file a rank, written where the launcher asked for it.

vLLM swallows a plugin that fails to import and goes on as stock. So nobody trusts a server's name: a worker
inspects its own loaded model, writes what it found, and whoever started the engine refuses to go on without
a proof from every rank.
"""

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

PROOF_DIR = "KIMI_K3_PROOF_DIR"

_proof: dict[str, Any] = {}
_used: dict[str, Counter[str]] = {}
"""Code path -> calls of it by when: "startup" (until the proof is published), "captured" or "serving"."""


def publish(proof: dict[str, Any]) -> None:
    """Write this rank's proof to `$KIMI_K3_PROOF_DIR/rank-<rank>.json` (nothing where that is unset)."""
    _proof.update(proof)
    _write()


def mark_used(path: str) -> None:
    """Count a call of a code path. A replay of a CUDA graph calls nothing: it repeats what was "captured".

    The file follows when a count has doubled: it costs a step nothing, and states a count to within a half.
    """
    import torch  # here: the launcher reads this module without it

    # Without a CUDA context nothing is captured, and a CPU build of PyTorch cannot be asked.
    context: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    capturing = context and torch.cuda.is_current_stream_capturing()
    when = "captured" if capturing else "serving" if _proof else "startup"
    calls = _used.setdefault(path, Counter())
    calls[when] += 1
    if _proof and calls[when] & (calls[when] - 1) == 0:
        _write()


def code_sha256() -> str:
    """SHA-256 over the plugin's own source: two engines of one version number may run different code."""
    package = Path(__file__).parent
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def _write() -> None:
    directory = os.environ.get(PROOF_DIR)
    if directory is None:
        return
    target = Path(directory) / f"rank-{_proof['rank']}.json"
    partial = target.with_suffix(".tmp")
    report = {**_proof, "used": sorted(_used), "calls": dict(sorted(_used.items()))}
    partial.write_text(json.dumps(report, indent=1))
    partial.replace(target)
