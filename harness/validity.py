# SPDX-License-Identifier: Apache-2.0
"""Reasons why a cell must not count. Pure functions of what was recorded: `report` judges old runs alike."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from harness.client import CANCELLED, OK, RequestRecord
from harness.load import refusal
from harness.stats import quantile, slope
from harness.store import Cell, CellKey

SPAN_TOLERANCE = 0.01
SPAN_FLOOR_S = 0.010
RESENT_SHARE = 0.01
GROWTH_ARRIVALS = 10
GROWTH_Z = 2.0
"""One-sided 2 %. How often that calls cells unstable at which load: benchmarks/stability_selftest.py."""


@dataclass(frozen=True)
class Evidence:
    """All that a verdict about a cell rests on; `metrics` as `store.summarise_samples` gives them.

    `no_preemption`: the run was declared free of preemptions. `shares_prefixes`: the trace's prompts begin alike
    on purpose. `engine_change`: in words, how the cell's engine
    differs from that of the arm's first cell; see `engine_changes`.
    """

    records: Sequence[RequestRecord]
    loop_lag_p99_s: float | None
    metrics: Mapping[str, Any]
    aborted: bool
    shared_cores: bool
    no_preemption: bool = False
    shares_prefixes: bool = False
    engine_change: str | None = None


def evidence_of(
    manifest: Mapping[str, Any],
    facts: Mapping[str, Any],
    records: Sequence[RequestRecord],
    engine_change: str | None = None,
) -> Evidence:
    """What a cell of a run is judged by: the run's manifest, the cell's facts and its records (store.py)."""
    lag_ms = facts["loop_lag_ms"]["p99"]
    generator = manifest["trace"].get("header", {}).get("generator", {})
    return Evidence(
        records=records,
        loop_lag_p99_s=None if lag_ms is None else lag_ms / 1e3,
        metrics=facts["metrics"],
        aborted=facts["aborted"],
        shared_cores=manifest["shared_cores"],
        no_preemption=manifest.get("no_preemption", False),
        shares_prefixes=bool(generator.get("shared_tokens")),
        engine_change=engine_change,
    )


def evidence_by_cell(manifest: Mapping[str, Any], cells: Sequence[Cell]) -> dict[CellKey, Evidence]:
    """What each cell of a run is judged by."""
    found: dict[CellKey, Evidence] = {}
    declared = {arm["name"]: {**manifest, **arm.get("declared", {})} for arm in manifest["arms"]}
    for arm in {cell.key.arm for cell in cells}:
        mine = sorted(
            (cell for cell in cells if cell.key.arm == arm), key=lambda cell: cell.facts["started_unix_s"]
        )
        changes = engine_changes([cell.facts["engine"] for cell in mine])
        found |= {
            cell.key: evidence_of(declared[arm], cell.facts, cell.records, change)
            for cell, change in zip(mine, changes, strict=True)
        }
    return found


def cells_that_count(manifest: Mapping[str, Any], cells: Sequence[Cell]) -> list[Cell]:
    """The cells of a run that count."""
    evidence = evidence_by_cell(manifest, cells)
    return [cell for cell in cells if judge(evidence[cell.key]).valid]


def ttft_s(record: RequestRecord) -> float:
    """First token minus due time; infinite for a request that failed in any way."""
    if record.status != "ok" or record.first_token_s is None:
        return math.inf
    return record.first_token_s - record.due_s


def waited_s(record: RequestRecord) -> float:
    """TTFT, or a bound from below: a request cancelled before its first token waited at least so long.

    Infinite for a request that failed of itself; the server will never answer it.
    """
    ttft = ttft_s(record)
    if math.isfinite(ttft) or record.status != CANCELLED or record.done_s is None:
        return ttft
    first = record.done_s if record.first_token_s is None else record.first_token_s
    return first - record.due_s


def slip_s(records: Sequence[RequestRecord]) -> list[float]:
    """How long after its due time each sent request was dispatched."""
    return [r.dispatched_s - r.due_s for r in records if r.dispatched_s is not None]


def slip_limit_s(median_ttft_s: float, shared_cores: bool) -> float:
    """How late the client may be: max(10 ms, 1 % of the median TTFT), or max(50 ms, 5 %) on shared cores."""
    floor_s, share = (0.050, 0.05) if shared_cores else (0.010, 0.01)
    return max(floor_s, share * median_ttft_s) if math.isfinite(median_ttft_s) else floor_s


@dataclass(frozen=True)
class Verdict:
    """Whether a cell counts: it does where there are no `reasons`, one sentence each.

    `unstable`: its server cannot keep up with this load, whatever else is wrong with the cell. `spoiled`: it says
    nothing about the server at this load; measured again, it may count.
    """

    reasons: tuple[str, ...] = ()
    unstable: bool = False
    spoiled: bool = False

    @property
    def valid(self) -> bool:
        return not self.reasons


def judge(evidence: Evidence) -> Verdict:
    """A cell that carried another load than the trace's, or not all of it, is not unstable, whatever grew in it."""
    if evidence.aborted:
        cause = refusal(evidence.records)
        return Verdict((f"stopped: {cause}" if cause else "interrupted",))
    found = {check: tuple(check(evidence)) for check in _CHECKS}
    if any(found[check] for check in _OTHER_LOAD):
        found[_unstable] = ()
    unstable = bool(found[_unstable])
    spoiled = not unstable and not found[_burst] and any(found[check] for check in _SPOILING)
    return Verdict(tuple(itertools.chain(*found.values())), unstable, spoiled)


def backlog_slope_rps(records: Sequence[RequestRecord]) -> float | None:
    """Least-squares slope of the requests in flight at each dispatch, over time; requests per second."""
    sent = [
        (r.dispatched_s, math.inf if r.done_s is None else r.done_s)
        for r in records
        if r.dispatched_s is not None
    ]
    times = [start for start, _ in sent]
    in_flight = [float(sum(start <= t < end for start, end in sent)) for t in times]
    return slope(times, in_flight)


@dataclass(frozen=True)
class Growth:
    """How the number of requests in flight changes from one arrival to the next, after the ramp.

    `per_arrival`: of each request that arrives, so much is not served in time; `z`: that mean over its standard
    error.
    """

    arrivals: int
    per_arrival: float
    z: float

    @property
    def proven(self) -> bool:
        return self.z > GROWTH_Z


def backlog_growth(records: Sequence[RequestRecord]) -> Growth | None:
    """Does the backlog grow through the cell? None where too few requests arrive after the ramp to tell.

    The ramp ends with the cell's first third, and not before the first request is done: until then the backlog
    rises in any server. After it, a server that keeps up sees as many leave as arrive. The steps between
    arrivals are taken as independent, as in a random walk; in a queue that keeps up, rises are followed by
    falls, which makes the test more careful, not less.
    """
    sent = sorted(
        (r.dispatched_s, math.inf if r.done_s is None else r.done_s)
        for r in records
        if r.dispatched_s is not None
    )
    if not sent:
        return None
    first, last = sent[0][0], sent[-1][0]
    ramp_end = max(min(end for _, end in sent), first + (last - first) / 3)
    backlog = [sum(start <= t < end for start, end in sent) for t, _ in sent if t >= ramp_end]
    steps = [after - before for before, after in itertools.pairwise(backlog)]
    if len(steps) < GROWTH_ARRIVALS:
        return None
    mean, error = fmean(steps), stdev(steps) / math.sqrt(len(steps))
    z = mean / error if error else math.copysign(math.inf, mean) if mean else 0.0
    return Growth(len(steps), mean, z)


ENGINE_IDENTITY = ("digest", "image", "argv", "flags", "packages", "environment")
OWN_VARIABLES = ("KIMI_K3_PROOF_DIR",)
OWN_TO_A_LAUNCH = ("--port", "--proof-dir")
"""Options whose values differ between launches of one engine."""


def engine_identity(engine: Mapping[str, Any]) -> dict[str, Any]:
    """What tells one build and configuration from another, where it was recorded."""
    return {name: lasting(engine[name]) for name in ENGINE_IDENTITY if name in engine}


def lasting(value: Any, own: Sequence[str] = OWN_TO_A_LAUNCH) -> Any:
    """A command line without the options `own`, be they `--x 1` or `--x=1`; anything else as it is."""
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        return value
    kept: list[str] = []
    words = iter(value)
    for word in words:
        if word in own:
            next(words, None)
        elif word.partition("=")[0] not in own:
            kept.append(word)
    return kept


def lasting_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an engine that make it this one, a path told by its being there: folders differ by launch."""
    return {
        name: "a path" if "/" in value else value
        for name, value in environment.items()
        if name not in OWN_VARIABLES
    }


def engine_changes(engines: Sequence[Mapping[str, Any] | None]) -> list[str | None]:
    """For each cell of an arm, in the order of measurement: how its engine differs from the first cell's.

    By `engine_identity`: ports, process ids and logs may differ.
    """
    identities = [engine_identity(engine) if engine else None for engine in engines]
    first = next((identity for identity in identities if identity is not None), {})
    return [None if identity is None else _difference(first, identity) for identity in identities]


def _difference(first: Mapping[str, Any], engine: Mapping[str, Any]) -> str | None:
    changed = [name for name in ENGINE_IDENTITY if first.get(name) != engine.get(name)]
    return f"{' and '.join(changed)} differ from the arm's first cell" if changed else None


def _late_client(evidence: Evidence) -> Iterator[str]:
    median = quantile([ttft_s(r) for r in evidence.records], 50)
    limit = slip_limit_s(median, evidence.shared_cores)
    slip = slip_s(evidence.records)
    for name, p99 in (
        ("slip", quantile(slip, 99) if slip else None),
        ("loop lag", evidence.loop_lag_p99_s),
    ):
        if p99 is not None and p99 > limit:
            yield f"client {name} p99 {p99 * 1e3:.1f} ms is over {limit * 1e3:.1f} ms"


def _burst(evidence: Evidence) -> Iterator[str]:
    due = [record.due_s for record in evidence.records if record.dispatched_s is not None]
    if len(due) > 1 and (wanted := max(due) - min(due)) <= SPAN_FLOOR_S:
        yield f"the trace spans {wanted:.2g} s at this rate, which is no schedule but one burst"


def _wrong_span(evidence: Evidence) -> Iterator[str]:
    sent = [(r.due_s, r.dispatched_s) for r in evidence.records if r.dispatched_s is not None]
    if not sent:
        return
    due, dispatched = zip(*sent, strict=True)
    wanted, found = max(due) - min(due), max(dispatched) - min(dispatched)
    if abs(found - wanted) > max(SPAN_FLOOR_S, SPAN_TOLERANCE * wanted):
        yield f"requests were dispatched over {found:.3f} s, the trace spans {wanted:.3f} s"


def _wrong_prompts(evidence: Evidence) -> Iterator[str]:
    counts = [
        (r.id, r.server_prompt_tokens, r.prompt_tokens) for r in evidence.records if r.server_prompt_tokens
    ]
    wrong = [(name, server, ours) for name, server, ours in counts if server != ours]
    if wrong:
        name, server, ours = wrong[0]
        yield f"server counted other prompt tokens in {len(wrong)} requests ({name}: {server}, trace {ours})"


def _busy_before(evidence: Evidence) -> Iterator[str]:
    if before := evidence.metrics.get("requests_before"):
        yield f"{before:g} requests were in the engine before the cell began"


def _resent(evidence: Evidence) -> Iterator[str]:
    """One may be a race; more is a server that sheds load by closing connections, which would pass as slow."""
    resent = sum(record.reconnects for record in evidence.records)
    if resent > max(1, RESENT_SHARE * len(evidence.records)):
        yield f"{resent} requests were sent twice: the server had closed their connections unanswered"


def _prefix_hits(evidence: Evidence) -> Iterator[str]:
    hits = evidence.metrics.get("prefix_hits_delta")
    if hits and not evidence.shares_prefixes:
        yield f"prefix cache hits rose by {hits:g} tokens"


def _restarted(evidence: Evidence) -> Iterator[str]:
    if evidence.metrics.get("engine_restarted"):
        yield "engine restarted during the cell"
    elif not evidence.metrics.get("answered_at_end", True) and all(
        record.status != CANCELLED for record in evidence.records
    ):  # with requests left at the drain limit it may be too busy to answer
        yield "the engine had stopped answering /metrics when the cell ended"


def _preempted(evidence: Evidence) -> Iterator[str]:
    preemptions = evidence.metrics.get("preemptions_delta")
    if evidence.no_preemption and preemptions is None:
        yield "preemptions are unknown in a run declared --no-preemption: the server does not count them"
    if evidence.no_preemption and preemptions:
        yield f"{preemptions:g} preemptions in a run declared --no-preemption"


def _engine_changed(evidence: Evidence) -> Iterator[str]:
    if evidence.engine_change:
        yield f"engine changed: {evidence.engine_change}"


def _unstable(evidence: Evidence) -> Iterator[str]:
    left = sum(r.status == CANCELLED for r in evidence.records)
    if left:
        yield f"unstable: {left} of {len(evidence.records)} requests unfinished at the drain limit"
    growth = backlog_growth(evidence.records)
    if growth and growth.proven:
        slope_rps = backlog_slope_rps(evidence.records)
        yield (
            f"unstable: the backlog grows by {growth.per_arrival:.2f} requests with each that arrives"
            f" ({slope_rps:+.3f} /s, {growth.arrivals} arrivals, z {growth.z:.1f})"
        )


def _unanswered(evidence: Evidence) -> Iterator[str]:
    """A server that answers nothing is not slow; the cause belongs beside the share of misses."""
    records = evidence.records
    if records and all(record.status not in (OK, CANCELLED) for record in records):
        yield f"none of {len(records)} requests was answered ({records[0].error})"


_CHECKS: tuple[Callable[[Evidence], Iterator[str]], ...] = (
    _unanswered,
    _late_client,
    _burst,
    _wrong_span,
    _wrong_prompts,
    _busy_before,
    _resent,
    _prefix_hits,
    _restarted,
    _engine_changed,
    _preempted,
    _unstable,
)
_OTHER_LOAD = (_wrong_prompts, _busy_before, _restarted, _engine_changed)
_SPOILING = (_late_client, _wrong_span, _busy_before, _restarted)


def unchecked(evidence: Evidence) -> list[str]:
    """What nobody could check about a cell, for want of evidence from its server."""
    answered = [record for record in evidence.records if record.status == OK]
    counted = any(record.server_prompt_tokens for record in answered)
    found = [] if counted or not answered else ["prompt lengths (its answers state no usage)"]
    if not evidence.metrics.get("available"):
        found.append("prefix hits, preemptions, restarts and other load (it exports no metrics)")
    return found
