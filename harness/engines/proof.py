# SPDX-License-Identifier: Apache-2.0
"""What every rank of an engine states about itself: the proof that an arm is what its name says.

A plugin that fails to load fails silently and the engine then serves the stock path under our arm's name. So
each worker writes `rank-<r>.json` once its model is loaded, and no arm is measured before all ranks have
written one and agree.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError


@dataclass(frozen=True)
class Feature:
    active: bool
    reason: str


@dataclass(frozen=True)
class Proof:
    """One rank's file. `kv_tokens` and `kv_bytes` are the engine's KV cache as this rank sees it."""

    rank: int
    world_size: int
    dcp_world_size: int
    features: dict[str, Feature]
    attention_backend: str | list[str]
    kv_tokens: int | None
    kv_bytes: int | None
    vllm: str
    pid: int
    used: frozenset[str]
    """Code paths that have run in this rank by now, other than while it started."""
    raw: dict[str, Any]
    """The whole file, for the manifest: it may hold more than is read here."""


def read_proofs(directory: Path) -> tuple[Proof, ...]:
    """The files that are complete, by rank; one that is being written is left for the next reading."""
    proofs = []
    for path in directory.glob("rank-*.json"):
        try:
            raw = json.loads(path.read_bytes())
        except json.JSONDecodeError:
            continue
        proofs.append(parse_proof(raw, str(path)))
    return tuple(sorted(proofs, key=lambda proof: proof.rank))


def clear_proofs(directory: Path) -> None:
    """An earlier engine's proofs must not pass for those of the one about to start."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.glob("rank-*.json"):
        path.unlink()


def complete(proofs: Sequence[Proof]) -> bool:
    return bool(proofs) and [proof.rank for proof in proofs] == list(range(proofs[0].world_size))


def objections(
    proofs: Sequence[Proof], *, tp: int, dcp: int, features: Iterable[str] = (), used: Iterable[str] = ()
) -> list[str]:
    """Why these ranks are not the wanted arm, a sentence each; empty where they are.

    `tp` is the number of ranks, `dcp` the size of their decode context-parallel groups; on every rank
    `features` must be active, and the code paths `used` must have run.
    """
    features, used = tuple(features), tuple(used)
    found = []
    for proof in proofs:
        rank = f"rank {proof.rank}"
        if proof.world_size != tp:
            found.append(f"{rank} belongs to {proof.world_size} ranks, not {tp}")
        if proof.dcp_world_size != dcp:
            found.append(f"{rank} runs DCP {proof.dcp_world_size}, not {dcp}")
        for name in features:
            feature = proof.features.get(name, Feature(False, "it says nothing of it"))
            if not feature.active:
                found.append(f"{name} is not active on {rank}: {feature.reason}")
        found += [f"{path} has not run on {rank}" for path in used if path not in proof.used]
    for fact in ("attention_backend", "vllm", "kv_tokens", "kv_bytes"):
        values = {json.dumps(proof.raw[fact]) for proof in proofs}
        if len(values) > 1:
            found.append(f"ranks differ in {fact}: {', '.join(sorted(values))}")
    return found


def parse_proof(raw: dict[str, Any], name: str) -> Proof:
    """`name` says in an error whose proof it is."""
    calls = raw.get("calls")  # recorded runs may be older: their proofs do not say when a path ran
    try:
        return Proof(
            rank=int(raw["rank"]),
            world_size=int(raw["world_size"]),
            dcp_world_size=int(raw["dcp_world_size"]),
            features={
                name: Feature(state["active"], state["reason"]) for name, state in raw["features"].items()
            },
            attention_backend=raw["attention_backend"],
            kv_tokens=raw["kv_tokens"],
            kv_bytes=raw["kv_bytes"],
            vllm=raw["vllm"],
            pid=int(raw["pid"]),
            used=frozenset(path for path in raw["used"] if calls is None or calls[path].keys() - {"startup"}),
            raw=raw,
        )
    except KeyError as missing:
        raise UserError(f"{name} lacks {missing}; the plugin in the engine is of another version") from None
