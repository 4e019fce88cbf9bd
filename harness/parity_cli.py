# SPDX-License-Identifier: Apache-2.0
"""`python -m harness parity DIR`: judges a run's kept answers again, without a server.

For a run that was judged with another tolerance, by an older rule, or without a float32 reference (one made since from
parity/prompts.json, as parity/reference.json, counts). The verdict that it had goes with the new one, in parity.json
(`before`) and as a note of the report.
"""

import argparse
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import parity
from harness.checks import folder_of
from harness.errors import UserError
from harness.files import claim, read_json, write_json
from harness.launches import answers_in, read_answers
from harness.options import parse_counts
from harness.report import write_report
from harness.store import RunStore

AGAIN = "Parity was judged again"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser("parity", help="judge a run's kept parity answers again, without a server")
    parser.add_argument("dir", type=Path, metavar="DIR", help="the folder that `bench` wrote")
    parser.add_argument(
        "--tolerance", type=float, metavar="NATS", help="of a logprob (default: the run's own)"
    )
    parser.add_argument(
        "--lengths", metavar="N,N", help="tokens of the prompts, for a run that did not record them"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the report that follows from the new verdict."""
    if arguments.tolerance is not None and not 0 < arguments.tolerance < math.inf:
        raise UserError(f"--tolerance is {arguments.tolerance:g}; give a positive number of nats")
    store = RunStore.open(arguments.dir)
    claim(store.path)
    manifest = store.manifest
    before = manifest.get("parity")
    answers = read_answers(store.path, manifest)
    if before is None or len(answers) < 2:
        raise UserError(f"{store.path} holds no answers of two arms to judge; only `bench` keeps them")
    lengths = before.get("prompts") or _named(arguments.lengths)
    asked = [parity.Prompt(name, (0,) * length) for name, length in lengths.items()]
    if any(answer.alone.keys() != lengths.keys() for answer in answers.values()):
        raise UserError("these are not the prompts that were asked; name the length of each with --lengths")
    path = store.path / "parity" / "reference.json"
    reference = parity.parse_reference(json.loads(path.read_bytes())) if path.exists() else None
    record = _judged(asked, reference, answers, before, arguments.tolerance)
    beside = {name: answer.prefills_beside for name, answer in answers.items()}
    write_json(store.path / "parity.json", {**record, "prefills_beside": beside})
    _judge_checks(store.path, manifest, reference, arguments.tolerance)
    against = " and a float32 reference" if reference else ""
    note = (
        f"{AGAIN} from the kept answers{against}: {record['refusal'] or 'passed'}. The run's own verdict was:"
        f" {record['before']['refusal'] or 'passed'}."
    )
    manifest["parity"] = record
    for texts in ("findings", "notes"):
        others = [text for text in manifest.get(texts, ()) if not text.startswith(AGAIN)]
        manifest[texts] = [*others, note]
    store.write_manifest(manifest)
    print(write_report(store), end="")


def _judged(
    asked: Sequence[parity.Prompt],
    reference: parity.Answers | None,
    answers: Mapping[str, parity.ArmAnswers],
    before: Mapping[str, Any],
    tolerance: float | None,
) -> dict[str, Any]:
    limits = parity.Tolerance(tolerance or before["tolerance"]["logprob"])
    longest = max(len(answer.alone[prompt.id]) for answer in answers.values() for prompt in asked)
    verdict = parity.compare(asked, reference, answers, limits, longest)
    return {**verdict.record(asked), "before": before.get("before", before)}


def _judge_checks(
    run: Path, manifest: Mapping[str, Any], reference: parity.Answers | None, tolerance: float | None
) -> None:
    """Those of every launch likewise; with the reference where it was given the same prompts and continuations."""
    now = run / "parity" / "prompts.json"
    for number, check in enumerate(manifest.get("parity_checks", ()), start=1):
        folder = folder_of(run, number)
        before, prompts = read_json(folder / "verdict.json"), folder / "prompts.json.gz"
        asked = [parity.Prompt(name, (0,) * length) for name, length in before["prompts"].items()]
        same = prompts.exists() and gzip.decompress(prompts.read_bytes()) == now.read_bytes()
        answers = answers_in(folder, manifest)
        record = _judged(asked, reference if same else None, answers, before, tolerance)
        write_json(folder / "verdict.json", record)
        check |= {"ok": record["ok"], "refusal": record["refusal"]}


def _named(lengths: str | None) -> dict[str, int]:
    if lengths is None:
        raise UserError("this run did not record its prompts' lengths; name them with --lengths")
    return {f"p{index}": length for index, length in enumerate(parse_counts(lengths))}
