# SPDX-License-Identifier: Apache-2.0
"""The upstream text this plugin was written against, by name and SHA-256 (`upstream.toml`).

A replaced or subclassed function that has changed underneath us would fail in ways no test of ours saw. The
plugin compares before it installs anything and refuses by name.
"""

import hashlib
import importlib
import inspect
import os
import tomllib
from pathlib import Path
from typing import Any

from kimi_k3_serve.errors import UserError

OVERRIDE = "KIMI_K3_ALLOW_UNLOCKED"
LOCK = Path(__file__).with_name("upstream.toml")


class SourceLockError(UserError):
    """vLLM's text differs from the lock."""


def locked() -> dict[str, str]:
    """Qualified name of each upstream object -> SHA-256 of its source text."""
    functions: dict[str, str] = tomllib.loads(LOCK.read_text())["functions"]
    return functions


def update() -> list[str]:
    """Rewrite the digests that differ from what is installed; return the names of the objects."""
    text, changed = LOCK.read_text(), []
    for name, expected in locked().items():
        if (found := digest(name)) != expected:
            text = text.replace(expected, found)
            changed.append(name)
    LOCK.write_text(text)
    return changed


def digest(name: str) -> str:
    """SHA-256 of the source text of `package.module.object[.attribute]`.

    Raises:
        SourceLockError: the object does not exist.
    """
    owner, attribute = resolve(name)
    found = inspect.getattr_static(owner, attribute)
    found = getattr(found, "__func__", found)
    return hashlib.sha256(inspect.getsource(found).encode()).hexdigest()


def resolve(name: str) -> tuple[Any, str]:
    """What holds `package.module.object[.attribute]` (a module or a class), and the last name in it.

    Raises:
        SourceLockError: the object does not exist.
    """
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        try:
            for attribute in parts[split:-1]:
                owner = inspect.getattr_static(owner, attribute)
            inspect.getattr_static(owner, parts[-1])
        except AttributeError:
            break
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
        if digest(name) == expected:
            continue
        if os.environ.get(OVERRIDE) != "1":
            raise SourceLockError(
                f"the text of {name} differs from upstream.toml; install vllm 0.32.0 from locks/, "
                f"or set {OVERRIDE}=1 (results are then marked unlocked)"
            )
        state = "unlocked"
    return state
