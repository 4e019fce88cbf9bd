# SPDX-License-Identifier: Apache-2.0
"""A run on disk, in plain formats: all that it takes to rebuild every table and plot without a server.

    manifest.json                  what was run: arms, rates, limits, trace, host, versions
    trace.jsonl.gz                 the trace itself
    cells/<key>.parquet            one row a request, the columns of `RequestRecord`
    cells/<key>.json               facts of the cell: start, client lag, engine, summary of its metrics
    cells/<key>.metrics.parquet    the engine's metrics once a second, where it has any
    cells/<key>.gpus.parquet       clocks, power and temperature of this host's GPUs likewise, where nvidia-smi is
    set_aside/<key>-<n>.*          cells that were measured again, with their files

A key is `<arm>_q<rate>_r<repeat>`, the rate in requests a second as `format(rate, "g")`.
"""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa

from harness import __version__
from harness.client import RequestRecord
from harness.errors import UserError
from harness.files import claim, read_json, read_parquet, write_json, write_parquet
from harness.load import CellRun
from harness.manifest import require_fields, require_readable, require_same
from harness.nvidia import GpuSample, summarise_gpus
from harness.scrape import COLUMNS, Sample
from harness.stats import quantile
from harness.trace import Trace, load_trace, save_trace

NEEDED_OF_A_CELL = (
    "aborted",
    "arm",
    "engine",
    "loop_lag_ms",
    "metrics",
    "n",
    "offered_qps",
    "repeat",
    "started_unix_s",
    "trace_sha256",
)

_SERIES = ("metrics.parquet", "gpus.parquet")
"""What not every cell has."""
_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")

_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("cohort", pa.int64()),
        ("limit_class", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("output_tokens", pa.int64()),
        ("due_s", pa.float64()),
        ("dispatched_s", pa.float64()),
        ("connected_s", pa.float64()),
        ("sent_s", pa.float64()),
        ("first_byte_s", pa.float64()),
        ("first_token_s", pa.float64()),
        ("done_s", pa.float64()),
        ("token_s", pa.list_(pa.float64())),
        ("token_counts", pa.list_(pa.int64())),
        ("status", pa.string()),
        ("http_status", pa.int64()),
        ("error", pa.string()),
        ("completion_tokens", pa.int64()),
        ("server_prompt_tokens", pa.int64()),
        ("finish_reason", pa.string()),
        ("connection_reused", pa.bool_()),
        ("reconnects", pa.int64()),
    ]
)


@dataclass(frozen=True, order=True)
class CellKey:
    """Which cell: one arm at one offered rate (requests a second), one repeat (from 0)."""

    arm: str
    offered_qps: float
    repeat: int

    def __str__(self) -> str:
        return f"{self.arm}_q{self.offered_qps:g}_r{self.repeat}"


@dataclass(frozen=True)
class Cell:
    """A cell read back from disk. `samples` hold `t_s` (seconds from its start) and `scrape.COLUMNS`.

    `gpus` hold `t_s` and the fields of `nvidia.GpuSample` but `unix_s`.
    """

    key: CellKey
    facts: dict[str, Any]
    records: list[RequestRecord]
    samples: list[dict[str, float | None]]
    gpus: list[dict[str, Any]] = field(default_factory=list)


class RunStore:
    """The folder of one run. Files appear whole or not at all."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._cells = path / "cells"

    @classmethod
    def create(cls, path: Path, manifest: Mapping[str, Any], trace: Trace) -> "RunStore":
        """Start a run in a new or empty folder, which is this process's own from here on."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} is already in use; choose another folder or remove it")
        store = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            claim(path)
            store._cells.mkdir()
        except OSError as error:
            raise UserError(f"cannot create {path}: {error.strerror}; choose another folder") from error
        save_trace(trace, path / "trace.jsonl.gz")
        store.write_manifest(manifest)
        return store

    @classmethod
    def resume(cls, path: Path, manifest: Mapping[str, Any], trace: Trace) -> "RunStore":
        """Go on with a run of the same trace, or start it where it never came to its manifest."""
        if path.is_dir():
            claim(path)
            for killed in (*path.glob("manifest.json.*.tmp"), *path.glob("cells/*.tmp")):
                killed.unlink(missing_ok=True)
        if (path / "manifest.json").is_file():
            store = cls.open(path)
            if store.trace().sha256 != trace.sha256:
                raise UserError(f"{path} was measured with another trace; choose another --out")
            begun, asked = ([arm["name"] for arm in each["arms"]] for each in (store.manifest, manifest))
            if more := [name for name in asked if name not in begun]:
                raise UserError(
                    f"{path} was begun with the arms {', '.join(begun)}, without {', '.join(more)};"
                    " resume it with its own arms, or choose another --out"
                )
            return store
        if path.is_dir() and not any((path / "cells").glob("*.json")):
            (path / "trace.jsonl.gz").unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                (path / "cells").rmdir()
        return cls.create(path, manifest, trace)

    @classmethod
    def open(cls, path: Path) -> "RunStore":
        """An existing run."""
        if not (path / "manifest.json").is_file():
            raise UserError(f"{path} holds no run (no manifest.json); give the folder that `--out` named")
        store = cls(path)
        require_readable(store.manifest, path / "manifest.json")
        return store

    def require_same(self, asked: Mapping[str, Any]) -> None:
        """Raises UserError where the run was begun with other facts than `manifest.MUST_AGREE` allows."""
        require_same(self.manifest, asked, self.path)

    @property
    def manifest(self) -> dict[str, Any]:
        return read_json(self.path / "manifest.json")

    def write_manifest(self, manifest: Mapping[str, Any]) -> None:
        write_json(self.path / "manifest.json", manifest)

    def trace(self) -> Trace:
        """The run's own trace, checked against its hash and against the manifest's."""
        trace = load_trace(self.path / "trace.jsonl.gz")
        if trace.sha256 != (named := self.manifest["trace"]["sha256"]):
            raise UserError(
                f"{self.path} was measured with trace {named}, but holds {trace.sha256}; restore it"
            )
        return trace

    def write_cell(
        self,
        key: CellKey,
        run: CellRun,
        samples: Sequence[Sample] = (),
        *,
        trace_sha256: str,
        cache_salt: str,
        engine: Mapping[str, Any] | None = None,
        launch: int | None = None,
        prefix_cache_reset: bool = False,
        identity: str | None = None,
        client_processes: int = 1,
        gpus: Sequence[GpuSample] = (),
    ) -> None:
        """Keep a cell. The facts (`<key>.json`) are written last: a cell without them does not exist."""
        for suffix in ("json", *_SERIES):  # of an aborted cell that is measured again
            (self._cells / f"{key}.{suffix}").unlink(missing_ok=True)
        rows = {field.name: [getattr(r, field.name) for r in run.records] for field in fields(RequestRecord)}
        write_parquet(self._cells / f"{key}.parquet", pa.table(rows, schema=_SCHEMA))
        if samples:
            columns: dict[str, Any] = {"t_s": [s.unix_s - run.started_unix_s for s in samples]}
            columns |= {name: pa.array([getattr(s, name) for s in samples], pa.float64()) for name in COLUMNS}
            write_parquet(self._cells / f"{key}.metrics.parquet", pa.table(columns))
        if gpus:
            series = [{"t_s": s.unix_s - run.started_unix_s, **asdict(s)} for s in gpus]
            write_parquet(self._cells / f"{key}.gpus.parquet", pa.Table.from_pylist(series).drop(["unix_s"]))
        facts = {
            **asdict(key),
            "trace_sha256": trace_sha256,
            "cache_salt": cache_salt,
            "started_unix_s": run.started_unix_s,
            "n": len(run.records),
            "aborted": run.aborted,
            "harness_version": __version__,
            "loop_lag_ms": _lag_ms(run.loop_lag_s),
            "client": {
                "cpu_ms_per_request": 1e3 * run.cpu_s / len(run.records),
                "real_time": run.real_time,
                "processes": client_processes,
            },
            "engine": engine,
            "launch": launch,
            "identity": identity,
            "prefix_cache_reset": prefix_cache_reset,
            "measured_again": self._times_set_aside(key),
            "metrics": summarise_samples(samples, run.started_unix_s, _ended_unix_s(run)),
            "gpus": summarise_gpus(gpus),
        }
        write_json(self._cells / f"{key}.json", facts)

    def set_aside(self, key: CellKey) -> None:
        """Keeps a cell apart, numbered, before it is measured again."""
        folder = self.path / "set_aside"
        folder.mkdir(exist_ok=True)
        number = 1 + self._times_set_aside(key)
        for suffix in ("json", "parquet", *_SERIES):
            source = self._cells / f"{key}.{suffix}"
            if source.exists():
                source.rename(folder / f"{key}-{number}.{suffix}")

    def _times_set_aside(self, key: CellKey) -> int:
        return len(list((self.path / "set_aside").glob(f"{key}-*.json")))

    def cells(self) -> Iterator[Cell]:
        """Every cell kept so far, by arm, rate and repeat; all of one trace."""
        sha256 = self.manifest["trace"]["sha256"]
        found = [(_cell_facts(path), path) for path in self._cells.glob("*.json")]
        keyed = [(CellKey(f["arm"], f["offered_qps"], f["repeat"]), f, path) for f, path in found]
        for key, facts, path in sorted(keyed, key=lambda item: item[0]):
            if (found_sha256 := facts["trace_sha256"]) != sha256:
                raise UserError(
                    f"{path} was measured with trace {found_sha256}, not {sha256}; remove the cell"
                )
            yield self._read_cell(key, facts)

    def cell(self, key: CellKey) -> Cell:
        return self._read_cell(key, _cell_facts(self._cells / f"{key}.json"))

    def _read_cell(self, key: CellKey, facts: dict[str, Any]) -> Cell:
        path = self._cells / f"{key}.parquet"
        try:
            records = [RequestRecord(**row) for row in read_parquet(path)]
        except TypeError as error:
            raise UserError(
                f"{path} does not hold requests ({error}); restore it or measure again"
            ) from error
        if len(records) != facts["n"]:
            raise UserError(
                f"{path} holds {len(records)} of {facts['n']} requests; restore it or measure again"
            )
        series = (self._cells / f"{key}.{suffix}" for suffix in _SERIES)
        return Cell(key, facts, records, *(read_parquet(path) if path.exists() else [] for path in series))


def _cell_facts(path: Path) -> dict[str, Any]:
    facts = read_json(path)
    require_fields(facts, NEEDED_OF_A_CELL, path)
    return facts


def check_arm_name(name: str) -> str:
    """An arm's name goes into file names and tables: letters, digits, `.`, `+` and `-`."""
    if not _ARM_NAME.fullmatch(name):
        raise UserError(f"arm name {name!r} is not usable; use ASCII letters, digits, '.', '+' and '-'")
    return name


def _ended_unix_s(run: CellRun) -> float:
    """When its last request ended."""
    ended = (record.done_s for record in run.records if record.done_s is not None)
    return run.started_unix_s + max(ended, default=0.0)


def summarise_samples(
    samples: Sequence[Sample], began_unix_s: float = -math.inf, ended_unix_s: float = -math.inf
) -> dict[str, Any]:
    """What a cell's metrics come to: rises of counters, maxima of gauges; None for what was not exported.

    `requests_before`: how many were in the engine before the cell began. `answered_at_end`: whether an engine that
    exports metrics still did after the cell's last request had ended.
    """

    def values(name: str) -> list[float]:
        return [value for s in samples if (value := getattr(s, name)) is not None]

    def rise(name: str) -> float | None:
        return found[-1] - found[0] if (found := values(name)) else None

    def highest(name: str) -> float | None:
        return max(values(name), default=None)

    def mean(name: str) -> float | None:
        found = values(name)
        return sum(found) / len(found) if found else None

    counters_fell = any((rise(name) or 0) < 0 for name in ("prefix_hits_total", "preemptions_total"))
    return {
        "available": bool(samples),
        "requests_before": samples[0].requests if samples and samples[0].unix_s < began_unix_s else None,
        "prefix_hits_delta": rise("prefix_hits_total"),
        "preemptions_delta": rise("preemptions_total"),
        "kv_usage_max": highest("kv_usage"),
        "waiting_max": highest("waiting"),
        "waiting_capacity_max": highest("waiting_capacity"),
        "waiting_capacity_mean": mean("waiting_capacity"),
        "running_max": highest("running"),
        "engine_restarted": counters_fell or len(set(values("process_start_unix_s"))) > 1,
        "answered_at_end": not samples or samples[-1].unix_s >= ended_unix_s,
        "process_start_unix_s": max(values("process_start_unix_s"), default=None),
    }


def _lag_ms(lag_s: Sequence[float]) -> dict[str, float | None]:
    if not lag_s:
        return {"p50": None, "p99": None, "max": None}
    return {
        "p50": 1e3 * quantile(lag_s, 50),
        "p99": 1e3 * quantile(lag_s, 99),
        "max": 1e3 * max(lag_s),
    }
