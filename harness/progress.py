# SPDX-License-Identifier: Apache-2.0
"""How far a run is: one line for people, events for programs."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TextIO

from harness.load import Progress
from harness.sweep import Position

PLAIN_INTERVAL_S = 5.0


class JsonEvents:
    """One JSON object a line, `event` first: plan, progress (once a second), cell (each that ended), done."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __enter__(self) -> "JsonEvents":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, position: Position, progress: Progress) -> None:
        event = "cell" if progress.done == progress.total else "progress"
        self.tell(event, **asdict(position.key), index=position.index, of=position.total, **asdict(progress))

    def tell(self, event: str, **facts: Any) -> None:
        self._write({"event": event, "unix_s": time.time(), **facts})

    def _write(self, record: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(record) + "\n")
        self._stream.flush()


class ProgressLine:
    """Rewrites one line a second on a terminal; elsewhere prints one every 5 s and at each cell's end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._printed_at = 0.0
        self._open = False  # a line on the terminal has not been ended yet

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._stream.write("\n")

    def __call__(self, position: Position, progress: Progress) -> None:
        line = progress_line(position, progress)
        ended = progress.done == progress.total
        if self._terminal:
            self._stream.write(f"\r\x1b[K{line}" + ("\n" if ended else ""))
            self._open = not ended
        elif ended or time.monotonic() - self._printed_at >= PLAIN_INTERVAL_S:
            self._stream.write(line + "\n")
            self._printed_at = time.monotonic()
        self._stream.flush()


def progress_line(position: Position, progress: Progress) -> str:
    """`cell 3/8 tp2 @ 0.9 QPS  sent 12 running 4 done 8/24  P50 0.45 s  2:10 left`, failures where there are any."""
    key = position.key
    failed = f"  failed {progress.failed}" if progress.failed else ""
    p50 = "" if progress.ttft_p50_s is None else f"  P50 {progress.ttft_p50_s:.3g} s"
    minutes, seconds = divmod(round(position.left_s + progress.schedule_left_s), 60)
    return (
        f"cell {position.index}/{position.total} {key.arm} @ {key.offered_qps:g} QPS  "
        f"sent {progress.sent} running {progress.running} done {progress.done}/{progress.total}{failed}"
        f"{p50}  {minutes}:{seconds:02d} left"
    )
