# SPDX-License-Identifier: Apache-2.0
"""What to show a user of an engine's log."""

import os
import re
from pathlib import Path

TAIL_LINES = 15
FIRST_ERRORS = 3
READ_BYTES = 512 * 1024  # from the end

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"\bERROR\b")
_NOISE = re.compile(r"nanobind|resource_tracker| - leaked |skipped remainder")


def log_end(path: Path, width: int = 200) -> list[str]:
    """The last lines, and before them the first errors, which name the cause that a long traceback hides.

    Without empty lines, colours, and the leak reports that every vLLM process ends with; each line is cut to
    `width` characters.
    """
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
        text = _COLOUR.sub("", file.read().decode(errors="replace"))
    lines = [line[:width] for line in text.splitlines() if line.strip() and not _NOISE.search(line)]
    before, tail = lines[:-TAIL_LINES], lines[-TAIL_LINES:]
    errors = [line for line in before if _ERROR.search(line)][:FIRST_ERRORS]
    return [*errors, "...", *tail] if errors else tail


def quote_log(path: Path) -> str:
    """The path, then the log's end, a line each."""
    return "\n".join((f"its log is {path} and ends:", *(f"  | {line}" for line in log_end(path))))
