# SPDX-License-Identifier: Apache-2.0
"""Engine launches of a pair: their order, what names an engine beyond its process, what limited it."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from harness.client import RequestRecord
from harness.parity import ArmAnswers, Position
from harness.validity import OWN_TO_A_LAUNCH, lasting

T = TypeVar("T")

BOUND_KV_USAGE = 0.9
NAMED_OTHERWISE = ("--model",)
"""Options whose values have a digest of their own."""


def launch_order(arms: Sequence[T], launches: int) -> list[tuple[T, int]]:
    """A B B A A B ...: every arm once a launch, backward in turns, so that drift favours none."""
    return [(arm, launch) for launch in range(launches) for arm in (reversed(arms) if launch % 2 else arms)]


def flags_of(argv: Sequence[str]) -> list[str]:
    """The arguments that make it this engine: without interpreter, port and paths."""
    kept: list[str] = lasting(list(argv[argv.index("serve") :]), (*OWN_TO_A_LAUNCH, *NAMED_OTHERWISE))
    return kept


def kept_answers(run: Path, manifest: Mapping[str, Any]) -> dict[str, ArmAnswers]:
    """By arm: the parity answers that an earlier session of this run kept, if they passed."""
    if not (manifest["parity"] or {}).get("ok"):
        return {}
    paths = {arm["name"]: run / "parity" / f"{arm['name']}.json.gz" for arm in manifest["arms"]}
    return {name: _read_answers(path) for name, path in paths.items() if path.exists()}


def _read_answers(path: Path) -> ArmAnswers:
    raw = json.loads(gzip.decompress(path.read_bytes()))

    def parsed(answers: dict[str, list[dict[str, Any]]]) -> dict[str, list[Position]]:
        return {
            name: [
                Position(p["token"], {int(token): logprob for token, logprob in p["top"].items()})
                for p in positions
            ]
            for name, positions in answers.items()
        }

    return ArmAnswers(parsed(raw["alone"]), parsed(raw["concurrent"]), raw["prefills_beside"])


def what_bound(
    arm: str,
    rate: float,
    samples: Sequence[Mapping[str, float | None]],
    records: Sequence[RequestRecord] = (),
) -> str:
    """One sentence on whether KV capacity or computation limited an arm in a cell, whose samples and records these are.

    A request that waits to be scheduled may wait for KV blocks, for a place in the batch or for its turn to be
    prefilled. KV capacity is what bound it where the cache was nearly full at the same moment, or where no prompt was
    being prefilled: all that ran had its first token, so the one that waited did not fit beside them. (Or had no
    place in the batch; a pair's engines have more places than contexts fit.)
    """
    seen = [
        (usage, waiting, _nothing_prefills(sample, records))
        for sample in samples
        if (usage := sample["kv_usage"]) is not None and (waiting := sample["waiting_capacity"]) is not None
    ]
    if not seen:
        return f"{arm} at {rate:g} QPS: what bound it is unknown, the engine exports no such metrics."
    waits = [waiting for _, waiting, _ in seen]
    full = sum(waiting > 0 and (usage > BOUND_KV_USAGE or idle) for usage, waiting, idle in seen)
    return (
        f"{arm} at {rate:g} QPS: {'KV capacity' if full else 'computation, not KV capacity,'} bound it"
        f" (in {full} of {len(seen)} samples, at 1 Hz, requests waited while KV usage was over {BOUND_KV_USAGE:g} or"
        f" none was being prefilled; KV usage up to {max(usage for usage, *_ in seen):.2f};"
        f" {sum(waits) / len(waits):.2f} requests waiting to be scheduled on average, at most {max(waits):g})."
    )


def _nothing_prefills(sample: Mapping[str, float | None], records: Sequence[RequestRecord]) -> bool:
    """Whether requests run and all of them were decoding, as far as the client saw."""
    t_s, running = sample.get("t_s"), sample.get("running")
    if t_s is None or not running:
        return False
    decoding = sum(
        record.first_token_s is not None
        and record.first_token_s <= t_s
        and (record.done_s is None or t_s < record.done_s)
        for record in records
    )
    return decoding >= running
