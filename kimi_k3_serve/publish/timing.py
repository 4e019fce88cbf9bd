# SPDX-License-Identifier: Apache-2.0
"""KIMI_K3_TIME_PREFILL_CONTEXT=FOLDER: what a layer's context path takes on the GPU, stock's or the one published.

Events around every call of `_context_parallel_compute_prefill_context`: all of a layer's chunks, from the first cached
row to the merged partial. One JSON line a call in FOLDER/rank-R.jsonl, `{"chunks": n, "rows": N, "ms": t}`. Nothing is
waited for: a call's line is written some calls later, when the GPU has passed it, the last ones when the process ends
of its own accord. Off, nothing is wrapped.

    python -m kimi_k3_serve.publish.timing FOLDER...    # medians for each number of chunks, beside one another
"""

import argparse
import atexit
import functools
import json
import os
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kimi_k3_serve.errors import UserError

SWITCH = "KIMI_K3_TIME_PREFILL_CONTEXT"


def asked(device_type: str) -> Path | None:
    """The folder, made; None where nothing is to be timed.

    Raises:
        UserError: it cannot be made, or there is no GPU whose time it could be.
    """
    if not (value := os.environ.get(SWITCH)):
        return None
    if device_type != "cuda":
        raise UserError(f"{SWITCH} times GPUs and this is {device_type}; unset it")
    folder = Path(value)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{SWITCH}={value}: {error.strerror}; name a folder that can be written") from error
    return folder


def timed(method: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """The method, with events around every call."""
    pending: deque[tuple[Any, Any, dict[str, int]]] = deque()
    lines: list[Any] = []  # the open file, once the rank is known

    def write(*, wait: bool = False) -> None:
        while pending and (wait or pending[0][1].query()):
            first, last, facts = pending.popleft()
            if wait:
                last.synchronize()
            lines[0].write(json.dumps(facts | {"ms": round(first.elapsed_time(last), 4)}) + "\n")

    atexit.register(write, wait=True)

    @functools.wraps(method)
    def _context_parallel_compute_prefill_context(
        self: Any, q: Any, cache: Any, attn_metadata: Any, *args: Any, **more: Any
    ) -> Any:
        context = attn_metadata.prefill.chunked_context
        if not lines:
            rank = context.dcp_manager.group.rank_in_group
            lines.append((folder / f"rank-{rank}.jsonl").open("a", buffering=1))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        answer = method(self, q, cache, attn_metadata, *args, **more)
        end.record()
        rows = sum(chunk.num_context_tokens for chunk in context.chunks)
        pending.append((begin, end, {"chunks": len(context.chunks), "rows": rows}))
        write()
        return answer

    return _context_parallel_compute_prefill_context


def summary(folder: Path) -> dict[int, dict[str, float]]:
    """For each number of chunks a call had: calls, their median rows, and median milliseconds a layer and chunk."""
    calls: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in path.read_text().splitlines():
            call = json.loads(line)
            calls.setdefault(call["chunks"], []).append(call)
    return {
        chunks: {
            "calls": len(group),
            "rows": statistics.median(call["rows"] for call in group),
            "ms_a_layer_and_chunk": round(statistics.median(call["ms"] for call in group) / chunks, 4),
        }
        for chunks, group in sorted(calls.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = {str(folder): summary(folder) for folder in args.folder}
    for name, table in found.items():
        for chunks, facts in table.items():
            print(
                f"{name}: {chunks} chunks, {facts['rows']:.0f} rows, {facts['calls']} calls: "
                f"{facts['ms_a_layer_and_chunk']} ms a layer and chunk"
            )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
