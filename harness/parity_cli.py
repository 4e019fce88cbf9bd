# SPDX-License-Identifier: Apache-2.0
"""`python -m harness parity DIR`: judges a run's kept answers again, without a server.

For a run that was judged with another tolerance, by an older rule, or without a float32 reference (one made since from
parity/prompts.json, as parity/reference.json, counts). The verdict that it had goes with the new one, in parity.json
(`before`) and as a note of the report.
"""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

from harness import parity
from harness.errors import UserError
from harness.files import claim, write_json
from harness.launches import read_answers
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
    tolerance = parity.Tolerance(arguments.tolerance or before["tolerance"]["logprob"])
    longest = max(len(answer.alone[prompt.id]) for answer in answers.values() for prompt in asked)
    verdict = parity.compare(asked, reference, answers, tolerance, longest)
    record = {**asdict(verdict), "refusal": verdict.refusal(), "prompts": lengths}
    beside = {name: answer.prefills_beside for name, answer in answers.items()}
    kept = {"before": before.get("before", before)}
    write_json(store.path / "parity.json", {**record, "prefills_beside": beside, **kept})
    against = " and a float32 reference" if reference else ""
    note = (
        f"{AGAIN} from the kept answers{against}: {record['refusal'] or 'passed'}. The run's own verdict was:"
        f" {kept['before']['refusal'] or 'passed'}."
    )
    manifest["parity"] = {**record, **kept}
    for texts in ("findings", "notes"):
        others = [text for text in manifest.get(texts, ()) if not text.startswith(AGAIN)]
        manifest[texts] = [*others, note]
    store.write_manifest(manifest)
    print(write_report(store), end="")


def _named(lengths: str | None) -> dict[str, int]:
    if lengths is None:
        raise UserError("this run did not record its prompts' lengths; name them with --lengths")
    return {f"p{index}": length for index, length in enumerate(parse_counts(lengths))}
