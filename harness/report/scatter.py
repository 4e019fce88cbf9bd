# SPDX-License-Identifier: Apache-2.0
"""How far apart the same request lies in cells of one rate: requests far off in one cell only, and what chance does to
the time per later token. Pure."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from harness.client import OK, RequestRecord
from harness.store import Cell
from harness.validity import ttft_s

FAR = 0.2
"""By so much of its time in the other cells a request must lie off."""
ALIKE = 0.25
"""Of that distance so much at most may lie between the other cells."""
FEW = 0.25
"""Of a cell's requests so many at most: more are no single ones, but a cell that is slower or faster."""


def answer_s(record: RequestRecord) -> float:
    """From the due time to the end of the whole answer, in seconds; a failure is infinite."""
    return record.done_s - record.due_s if record.status == OK and record.done_s is not None else math.inf


def tpot_s(record: RequestRecord) -> float | None:
    """Time per output token after the first, in seconds; a failure is infinite, None for an answer of one token."""
    if record.status != OK:
        return math.inf
    if len(record.token_counts) < 2:
        return None
    return (record.token_s[-1] - record.token_s[0]) / (record.token_counts[-1] - record.token_counts[0])


def far_off(valid: Sequence[Cell]) -> list[dict[str, Any]]:
    """Requests whose TTFT in one cell is far from that in the rate's other cells, at least two, which agree."""
    found = []
    for rate in sorted({cell.key.offered_qps for cell in valid}):
        cells = [cell for cell in valid if cell.key.offered_qps == rate]
        times = [{record.id: ttft_s(record) for record in cell.records} for cell in cells]
        for cell, mine in zip(cells, times, strict=True):
            off = []
            for name, value in mine.items():
                others = [other[name] for other in times if other is not mine and name in other]
                if _is_far(value, others):
                    off.append(
                        {
                            "arm": cell.key.arm,
                            "offered_qps": rate,
                            "repeat": cell.key.repeat,
                            "id": name,
                            "ttft_s": value if math.isfinite(value) else None,
                            "others_s": {"low": min(others), "high": max(others), "cells": len(others)},
                        }
                    )
            if len(off) <= max(1, FEW * len(mine)):
                found += off
    return found


def _is_far(value: float, others: Sequence[float]) -> bool:
    if len(others) < 2 or not all(map(math.isfinite, others)):
        return False
    distance = min(abs(value - other) for other in others)
    return distance > FAR * median(others) and max(others) - min(others) <= ALIKE * distance


def tpot_scatter(valid: Sequence[Cell], rate: float | None) -> dict[str, Any] | None:
    """Of one request in cells of the same arm at one rate, the two times per later token with the largest ratio."""
    seen: dict[tuple[str, str], list[float]] = {}
    for cell in valid:
        if cell.key.offered_qps == rate:
            for record in cell.records:
                value = tpot_s(record)
                if value and math.isfinite(value):
                    seen.setdefault((cell.key.arm, record.id), []).append(value)
    spans = [(max(values) / min(values), *key) for key, values in seen.items() if len(values) > 1]
    if not spans:
        return None
    _, arm, name = max(spans)
    return {"arm": arm, "id": name, "low_s": min(seen[arm, name]), "high_s": max(seen[arm, name])}
