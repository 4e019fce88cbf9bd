# SPDX-License-Identifier: Apache-2.0
"""What a run's report adds to the notes of its manifest."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.nvidia import number
from harness.report.clocks import clock_notes
from harness.store import Cell

UNUSED_MIB = 1024
"""Drivers and displays take up to so much of a GPU on which nothing computes."""


def notes_of(manifest: Mapping[str, Any], cells: Sequence[Cell]) -> list[str]:
    """All notes of a run, a sentence or more each."""
    return [
        *manifest["notes"],
        *_set_aside(cells),
        *_vllm_nccl(manifest),
        *_other_gpus(manifest),
        *_others_on_the_gpus(manifest),
        *clock_notes(manifest, cells),
    ]


def _set_aside(cells: Sequence[Cell]) -> Iterator[str]:
    """How often cells were measured again; their first measurements are kept in a folder of their own."""
    if count := sum(cell.facts.get("measured_again", 0) for cell in cells):
        what = "1 cell was" if count == 1 else f"{count} cells were"
        why = "a late client, load of others or the end of an engine had spoiled"
        yield f"{what} set aside (set_aside/) and measured again: {why} {'it' if count == 1 else 'them'}."


def _vllm_nccl(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Where vLLM's own NCCL wrapper was disabled, by reason. Only proofs of GPUs tell, and older ones do not."""
    arms: dict[str, dict[str, None]] = {}
    for arm in manifest["arms"]:
        for rank in (arm["engine"] or {}).get("ranks", ()):
            state = rank["features"].get("vllm_nccl", {"active": True})
            if rank["world_size"] > 1 and not state["active"]:
                arms.setdefault(state["reason"], {})[arm["name"]] = None
    for reason, names in arms.items():
        yield (
            f"vLLM's own NCCL wrapper was disabled in {', '.join(names)}, collectives went through torch.distributed:"
            f" {reason}."
        )


def _other_gpus(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Sessions on other GPUs than the first: their launches differ by those too. Older records do not tell."""
    known = [
        (name, gpus)
        for name, session in _sessions(manifest)
        if (gpus := sorted(facts["uuid"] for facts in session.get("gpus", ()) if "uuid" in facts))
    ]
    for name, gpus in known[1:]:
        if gpus != known[0][1]:
            yield f"{name}: other GPUs than those of {known[0][0]}, so launches differ by the GPUs as well."


def _sessions(manifest: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each by its name, of which a comparison of runs gives its own."""
    for index, session in enumerate(manifest.get("sessions", ()), start=1):
        yield session.get("name", f"Session {index}"), session


def _others_on_the_gpus(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Memory in use before a session's engines started, or after they had ended: something else's, that may disturb."""
    for name, session in _sessions(manifest):
        for when, key in (
            ("before its engines started", "gpus"),
            ("after its engines had ended", "gpus_at_end"),
        ):
            used = [facts.get("memory.used", "") for facts in session.get(key, ())]
            held = [
                f"{amount} of GPU {gpu}"
                for gpu, amount in enumerate(used)
                if (number(amount) or 0) > UNUSED_MIB
            ]
            if held:
                yield (
                    f"{name}: {', '.join(held)} in use {when}, by none of them; whatever held it may have"
                    " disturbed the session."
                )
