# SPDX-License-Identifier: Apache-2.0
"""The upstream text this plugin was written against, by name and SHA-256 (`upstream.toml`).

A replaced or subclassed function that has changed underneath us would fail in ways no test of ours saw. The
plugin compares before it installs anything and refuses by name.
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import tomllib
from pathlib import Path
from typing import Any

from kimi_k3_serve.errors import UserError

OVERRIDE = "KIMI_K3_ALLOW_UNLOCKED"
LOCK = Path(__file__).with_name("upstream.toml")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class SourceLockError(UserError):
    """vLLM's text differs from the lock."""


def locked() -> dict[str, list[str]]:
    """Qualified name of each upstream object -> SHA-256 of its source text, or of each wheel's where these differ."""
    functions: dict[str, str | list[str]] = tomllib.loads(LOCK.read_text())["functions"]
    return {name: [texts] if isinstance(texts, str) else texts for name, texts in functions.items()}


def update() -> list[str]:
    """Rewrite the digests that differ from what is installed; return the names of the objects."""
    text, changed = LOCK.read_text(), []
    for name, expected in locked().items():
        if (found := digest(name)) not in expected:
            text = text.replace(f'"{expected[0]}"', f'"{found}"')
            changed.append(name)
    LOCK.write_text(text)
    return changed


def digest(name: str) -> str:
    """SHA-256 of the source text of `package.module.object[.attribute]`, decorators included.

    Read from the file: importing a GPU model's module only to look at it would upset a CPU process.

    Raises:
        SourceLockError: the object does not exist.
    """
    parts = name.split(".")
    package = importlib.util.find_spec(parts[0])
    root = Path(package.origin).parent if package and package.origin else Path()
    for split in range(len(parts) - 1, 0, -1):
        file = root.joinpath(*parts[1:split]).with_suffix(".py")
        if not file.is_file():
            continue
        text = file.read_text()
        node: ast.AST | None = ast.parse(text)
        for part in parts[split:]:
            node = definition(node, part) if node else None
        if isinstance(node, Definition):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = text.splitlines(keepends=True)[first - 1 : node.end_lineno]
            return hashlib.sha256("".join(lines).encode()).hexdigest()
    raise SourceLockError(f"{name} does not exist in the installed vLLM; install vllm 0.32.0 from locks/")


def definition(parent: ast.AST, name: str) -> Definition | None:
    """The class or function `name` directly inside `parent`."""
    for child in ast.iter_child_nodes(parent):
        if isinstance(child, Definition) and child.name == name:
            return child
    return None


def resolve(name: str) -> tuple[Any, str]:
    """Import what holds `package.module.object[.attribute]` (a module or a class); return it and the last name."""
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:-1]:
            owner = getattr(owner, attribute)
        return owner, parts[-1]
    raise SourceLockError(f"{name} does not exist in the installed vLLM; install vllm 0.32.0 from locks/")


def verify() -> str:
    """Compare every locked object with what is installed.

    Returns:
        "locked", or "unlocked" where KIMI_K3_ALLOW_UNLOCKED=1 let a difference pass.

    Raises:
        SourceLockError: naming the first object that differs.
    """
    state = "locked"
    for name, expected in locked().items():
        if digest(name) in expected:
            continue
        if os.environ.get(OVERRIDE) != "1":
            raise SourceLockError(
                f"the text of {name} differs from upstream.toml; install vllm 0.32.0 from locks/, "
                f"or set {OVERRIDE}=1 (results are then marked unlocked)"
            )
        state = "unlocked"
    return state
