# SPDX-License-Identifier: Apache-2.0
"""How a locked upstream function is changed: a few edits of its own text, compiled where it came from.

A copy of a 300-line method hides what was changed in it; a list of (old, new) pairs is exactly that. The source
lock (`source_lock.py`) has fixed the text before this runs, so an edit either applies as it was reviewed or the
plugin refuses to start.
"""

import inspect
import linecache
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kimi_k3_serve.source_lock import SourceLockError, resolve


@dataclass(frozen=True)
class Edit:
    """Replace the one occurrence of `old` in a function's dedented source by `new`."""

    old: str
    new: str


def edit_function(name: str, edits: Sequence[Edit]) -> None:
    """Put an edited `package.module.Class.method` in the place of the upstream one. Idempotent.

    Raises:
        SourceLockError: an edit's `old` text does not occur exactly once, or the function has had other edits.
    """
    owner, attribute = resolve(name)
    before = getattr(inspect.getattr_static(owner, attribute), "edits", None)
    if before is None:
        setattr(owner, attribute, edited(name, edits))
    elif before != tuple(edits):
        raise SourceLockError(
            f"{name} is edited twice, differently; this is a bug: put the edits in one place"
        )


def edited(name: str, edits: Sequence[Edit]) -> Any:
    """The upstream function with the edits; upstream keeps its own.

    It lives in the globals of the upstream module, keeps decorators, defaults and `super()`, and names the
    upstream function as `__wrapped__`.

    Raises:
        SourceLockError: an edit's `old` text does not occur exactly once.
    """
    owner, attribute = resolve(name)
    original = inspect.getattr_static(owner, attribute)
    source = textwrap.dedent(inspect.getsource(original))
    for edit in edits:
        if source.count(edit.old) != 1:
            raise SourceLockError(
                f"{name} holds {source.count(edit.old)} times what is to be edited once ({edit.old.strip()!r}); "
                "install vllm 0.32.0 from locks/"
            )
        source = source.replace(edit.old, edit.new)

    # `super()` without arguments reads the enclosing `__class__`; as a parameter it survives outside a class body.
    text = f"def build(__class__):\n{textwrap.indent(source, '    ')}\n    return {attribute}\n"
    filename = f"<{name}, edited by kimi_k3_serve>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    built: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), vars(sys.modules[original.__module__]), built)
    function = built["build"](owner)
    function.__qualname__ = original.__qualname__
    function.__wrapped__ = original
    function.edits = tuple(edits)
    return function
