# SPDX-License-Identifier: Apache-2.0
"""The image `bench` holds what the harness imports: found out here, not when the image is built."""

import ast
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONAL = {"transformers"}  # tokenises text prompts; larger than all the rest


def imported() -> set[str]:
    """Top-level modules that any file of the harness imports, at any place."""
    found = set()
    for path in (ROOT / "harness").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"harness"} - OPTIONAL


def test_every_import_is_locked_for_the_image() -> None:
    pinned = {line.partition("==")[0] for line in (ROOT / "locks" / "bench.txt").read_text().splitlines()}
    owners = metadata.packages_distributions()
    modules = imported()
    assert "aiohttp" in modules
    lacking = {
        name: owners.get(name) for name in modules if not {d.lower() for d in owners.get(name, [])} & pinned
    }
    assert not lacking, "add them to locks/bench.in and run make lock-images"
