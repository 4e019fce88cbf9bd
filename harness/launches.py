# SPDX-License-Identifier: Apache-2.0
"""Engine launches of a pair: their order, and what names an engine beyond its process."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from harness.parity import ArmAnswers, Position
from harness.validity import OWN_TO_A_LAUNCH, lasting

T = TypeVar("T")

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
    return read_answers(run, manifest) if (manifest["parity"] or {}).get("ok") else {}


def read_answers(run: Path, manifest: Mapping[str, Any]) -> dict[str, ArmAnswers]:
    """By arm, whatever the verdict was."""
    return answers_in(run / "parity", manifest)


def answers_in(folder: Path, manifest: Mapping[str, Any]) -> dict[str, ArmAnswers]:
    """By arm, those that a folder holds."""
    paths = {arm["name"]: folder / f"{arm['name']}.json.gz" for arm in manifest["arms"]}
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
