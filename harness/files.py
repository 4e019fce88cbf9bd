# SPDX-License-Identifier: Apache-2.0
"""Files of a run: written whole or not at all, read with errors that name them, and one process at a time."""

import contextlib
import errno
import fcntl
import glob
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.client import one_line
from harness.errors import UserError


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write whole or not at all; equal values give equal bytes."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write whole or not at all."""
    with whole(path) as partial:
        partial.write_bytes(content)


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}; restore it or measure again") from error
    if not isinstance(value, dict):
        raise UserError(f"cannot read {path}: not a JSON object; restore it or measure again")
    return value


def read_parquet(path: Path) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"cannot read {path}: {one_line(str(error))}; restore it or measure again") from error
    return rows


def write_parquet(path: Path, table: pa.Table) -> None:
    with whole(path) as partial:
        pq.write_table(table, partial)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` once everything is written. UserError where it cannot be.

    What processes left that were killed while they wrote `path` is removed.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # no other process writes into it
    try:
        for killed in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
            if not _lives(killed.name.split(".")[-2]):
                killed.unlink(missing_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        cause = os.strerror(error.errno) if error.errno else one_line(str(error))
        remedy = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
        raise UserError(f"cannot write {path}: {cause}; {remedy}, what was measured is kept") from error


def _lives(pid: str) -> bool:
    """Whether a process has this number, or nobody knows."""
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        return True
    return True


_claims: dict[Path, int] = {}


def claim(path: Path) -> None:
    """Keeps other processes out of a run's folder until this one ends, however it ends.

    A lock on the folder itself leaves no file behind. Raises UserError where another process holds it; a file
    system without locks goes unguarded.
    """
    if path.resolve() in _claims:
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UserError(
            f"another process is at work in {path}; wait for it, or choose another --out"
        ) from None
    except OSError:
        os.close(folder)
        return
    _claims[path.resolve()] = folder
