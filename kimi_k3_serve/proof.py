# SPDX-License-Identifier: Apache-2.0
"""What each worker proves about itself: one JSON file a rank, written where the launcher asked for it.

vLLM swallows a plugin that fails to import and goes on as stock. So nobody trusts a server's name: a worker
inspects its own loaded model, writes what it found, and whoever started the engine refuses to go on without
a proof from every rank.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

PROOF_DIR = "KIMI_K3_PROOF_DIR"

_proof: dict[str, Any] = {}
_used: set[str] = set()


def publish(proof: dict[str, Any]) -> None:
    """Write this rank's proof to `$KIMI_K3_PROOF_DIR/rank-<rank>.json` (nothing where that is unset)."""
    _proof.update(proof)
    _write()


def mark_used(path: str) -> None:
    """Record that a code path has run at least once in this worker. Costs a set look-up after the first time."""
    if path not in _used:
        _used.add(path)
        if _proof:
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
    partial.write_text(json.dumps({**_proof, "used": sorted(_used)}, indent=1))
    partial.replace(target)
