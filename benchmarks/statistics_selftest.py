# SPDX-License-Identifier: Apache-2.0
"""Do the 95 % intervals of harness/paired.py cover the truth in 95 % of cases?

    python benchmarks/statistics_selftest.py [--pairs 500] [--out results/selftest/statistics.json]

Each simulated pair is a whole experiment: a new trace, launches of two arms, and a queue that serves the trace
in every launch. The queue is first come, first served, with one server:

    wait[j] = max(0, wait[j-1] + service[j-1] - gap[j])          (Lindley, 1952)
    TTFT[j] = wait[j] + service[j] + overhead

with prompts of 60,000-180,000 tokens, Poisson arrivals, service of 1.9 s * L + 1.2 s * L^2 (L = prompt length /
120,000 tokens) times a factor of the arm, a factor of the launch (log-normal, 1 %) and one of the request (log-
normal, 3 %). So neighbours wait for one another, and a launch that is 1 % slower is slower in all its requests,
more so where the queue is long.

The truth is exact where arms differ by an overhead only; where one serves more slowly, the queue multiplies the
difference, and the truth is the mean estimate over further simulated pairs (its standard error is printed).
Exit code 1 unless every required case prints an interval in 90 % of its pairs, covers the truth in 92-98 % of
those, and declares a zero difference in at most 7 %. The cases that are not required show where the method ends:
near saturation it refuses to print an interval (harness/saturation.py).
"""

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from harness import __version__
from harness.client import RequestRecord
from harness.paired import launch_differences, paired_estimate, resolved
from harness.saturation import waiting_share

Floats = npt.NDArray[np.float64]
Result = TypeVar("Result")

TRUTH_PAIRS = 2000
COVERAGE = (0.92, 0.98)
MAX_FALSE = 0.07
MIN_PRINTED = 0.90
LAUNCH_SPREAD, REQUEST_SPREAD = 0.01, 0.03


@dataclass(frozen=True)
class Case:
    """`load` is the first arm's utilisation; the other arm serves `factor` times as long and adds `overhead_s`.

    Each launch serves the trace `passes` times.
    """

    name: str
    required: bool
    load: float
    factor: float
    overhead_s: float
    launches: int = 4
    cohorts: int = 36
    cohort_size: int = 10
    passes: int = 1


CASES = (
    Case("no difference", True, load=0.6, factor=1.0, overhead_s=0.0),
    Case("20 ms more after the queue", True, load=0.6, factor=1.0, overhead_s=0.02),
    Case("5 % slower service", True, load=0.6, factor=1.05, overhead_s=0.0),
    Case("5 % slower service, light load", True, load=0.4, factor=1.05, overhead_s=0.0),
    Case("no difference, two launches (ABBA)", True, load=0.6, factor=1.0, overhead_s=0.0, launches=2),
    Case("5 % slower service, two launches (ABBA)", True, load=0.6, factor=1.05, overhead_s=0.0, launches=2),
    Case("5 % slower service, busier", False, load=0.7, factor=1.05, overhead_s=0.0),
    Case("5 % slower service, busy", False, load=0.8, factor=1.05, overhead_s=0.0),
    Case("no difference, near saturation", False, load=0.9, factor=1.0, overhead_s=0.0),
    Case("5 % slower service, near saturation", False, load=0.85, factor=1.05, overhead_s=0.0),
    Case("5 % slower, 60 requests three times", False, 0.6, 1.05, 0.0, launches=2, cohorts=6, passes=3),
)


def service_s(tokens: Floats) -> Floats:
    """Unloaded prefill time: linear and quadratic in the prompt, 3.1 s at 120,000 tokens."""
    length = tokens / 120_000
    return 1.9 * length + 1.2 * length**2


MEAN_SERVICE_S = float(service_s(np.linspace(60_000, 180_000, 10_001)).mean())


def simulate(case: Case, generator: np.random.Generator) -> tuple[Floats, Floats, Floats]:
    """Due times (requests) of one new trace, and TTFT (launches * passes, requests) of the two arms over it."""
    n = case.cohorts * case.cohort_size
    tokens = generator.permutation(60_000 + (np.arange(n) + generator.random(n)) / n * 120_000)
    gaps = generator.exponential(MEAN_SERVICE_S / case.load, n - 1)
    cells = case.launches * case.passes
    arms = np.repeat([1.0, case.factor], cells)[:, None]
    launches = np.exp(generator.normal(0, LAUNCH_SPREAD, (2 * case.launches, 1))).repeat(case.passes, axis=0)
    ttft = _serve(service_s(tokens) * arms * launches, gaps, generator)
    return _due_s(gaps), ttft[:cells], ttft[cells:] + case.overhead_s


def simulate_cell(case: Case, generator: np.random.Generator) -> tuple[Floats, Floats]:
    """Due times and TTFT (requests) of one cell of the first arm."""
    n = case.cohorts * case.cohort_size
    tokens = generator.permutation(60_000 + (np.arange(n) + generator.random(n)) / n * 120_000)
    gaps = generator.exponential(MEAN_SERVICE_S / case.load, n - 1)
    return _due_s(gaps), _serve(service_s(tokens)[None], gaps, generator)[0]


def _due_s(gaps: Floats) -> Floats:
    return np.concatenate(([0.0], np.cumsum(gaps)))


def _serve(service: Floats, gaps: Floats, generator: np.random.Generator) -> Floats:
    """TTFT (launches, requests) of a queue with one server, first come, first served."""
    service = service * np.exp(generator.normal(0, REQUEST_SPREAD, service.shape))
    wait = np.zeros_like(service)
    for j in range(1, service.shape[1]):
        wait[:, j] = np.maximum(0, wait[:, j - 1] + service[:, j - 1] - gaps[j - 1])
    return wait + service


def point_estimate(case: Case, seed: int) -> float:
    _, first, other = simulate(case, np.random.default_rng([1, seed]))
    return float(np.mean([np.median(b - a) for a in first for b in other]))


@dataclass(frozen=True)
class Outcome:
    low_s: float
    high_s: float
    declared: bool


def measure(case: Case, seed: int) -> Outcome | None:
    """One pair through the harness's own code; None where that refuses an interval."""
    due_s, first, other = simulate(case, np.random.default_rng([2, seed]))
    arm_a, arm_b = _launches(first, case.passes), _launches(other, case.passes)
    cohort_of = {name: index // case.cohort_size for index, (_, name) in enumerate(arm_a[0])}
    waiting = max(
        float(np.mean([waiting_share(as_records(due_s, row)) for row in arm])) for arm in (first, other)
    )
    estimate = paired_estimate(arm_a, arm_b, cohort_of, waiting=waiting)
    if estimate.interval is None:
        return None
    floor = max(abs(value) for launches in (arm_a, arm_b) for value in launch_differences(launches))
    return Outcome(estimate.interval.low, estimate.interval.high, resolved(estimate, floor))


def as_records(due_s: Floats, ttft_s: Floats, decode_s: float = 0.0) -> list[RequestRecord]:
    """What the harness would have recorded, as far as its statistics look at it."""
    return [
        RequestRecord(
            str(index), 0, "default", 1, 1,
            due_s=due, dispatched_s=due, first_token_s=due + ttft, done_s=due + ttft + decode_s,
        )
        for index, (due, ttft) in enumerate(zip(due_s.tolist(), ttft_s.tolist(), strict=True))
    ]  # fmt: skip


def _launches(ttft: Floats, passes: int) -> list[dict[tuple[int, str], float]]:
    """The TTFT of each launch by pass and request; its passes stand next to one another."""
    return [
        {
            (turn, f"r{index:04d}"): float(value)
            for turn, row in enumerate(ttft[begin : begin + passes])
            for index, value in enumerate(row)
        }
        for begin in range(0, len(ttft), passes)
    ]


@dataclass(frozen=True)
class CaseResult:
    """Shares: `printed`, `wrong` (printed without the truth) and `declared` of all pairs; the others of those with an
    interval (null: none)."""

    case: Case
    pairs: int
    truth_s: float
    truth_standard_error_s: float
    printed: float
    coverage: float | None
    wrong: float
    truth_below: float | None
    truth_above: float | None
    excludes_zero: float | None
    declared: float
    median_width_s: float | None
    ok: bool | None
    """None where the case is not required."""


def run_case(case: Case, pairs: int, truth_pairs: int, pool: ProcessPoolExecutor) -> CaseResult:
    if case.factor == 1.0:
        truth, error = case.overhead_s, 0.0
    else:
        estimates = np.array(_map(pool, partial(point_estimate, case), truth_pairs))
        truth, error = float(estimates.mean()), float(estimates.std(ddof=1) / math.sqrt(truth_pairs))
    outcomes = [outcome for outcome in _map(pool, partial(measure, case), pairs) if outcome]

    def share(of: Callable[[Outcome], bool]) -> float | None:
        return sum(map(of, outcomes)) / len(outcomes) if outcomes else None

    below, above = share(lambda o: truth < o.low_s), share(lambda o: truth > o.high_s)
    excludes_zero = share(lambda o: not o.low_s <= 0 <= o.high_s)
    coverage = share(lambda o: o.low_s <= truth <= o.high_s)
    printed = len(outcomes) / pairs
    fine = (
        printed >= MIN_PRINTED
        and COVERAGE[0] <= (coverage or 0.0) <= COVERAGE[1]
        and (truth != 0 or (excludes_zero or 0.0) <= MAX_FALSE)
    )
    return CaseResult(
        case=case,
        pairs=pairs,
        truth_s=truth,
        truth_standard_error_s=error,
        printed=printed,
        coverage=coverage,
        wrong=printed * (1 - (coverage or 0.0)),
        truth_below=below,
        truth_above=above,
        excludes_zero=excludes_zero,
        declared=sum(o.declared for o in outcomes) / pairs,
        median_width_s=float(np.median([o.high_s - o.low_s for o in outcomes])) if outcomes else None,
        ok=fine if case.required else None,
    )


def _map(pool: ProcessPoolExecutor, function: Callable[[int], Result], count: int) -> list[Result]:
    return list(pool.map(function, range(count), chunksize=max(1, count // 50)))


def table(results: list[CaseResult]) -> str:
    lines = [
        "| case | load | launches an arm | true difference | interval printed | covered | printed and wrong "
        "| truth below / above | interval excludes 0 | declared | median width | required |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for r in results:
        verdict = "not required" if r.ok is None else "met" if r.ok else "NOT MET"
        lines.append(
            f"| {r.case.name} | {r.case.load:g} | {r.case.launches} | {r.truth_s * 1e3:.1f} ms"
            f" (± {r.truth_standard_error_s * 1e3:.1f}) | {r.printed:.1%} | {_percent(r.coverage)} | {r.wrong:.1%}"
            f" | {_percent(r.truth_below)} / {_percent(r.truth_above)} | {_percent(r.excludes_zero)}"
            f" | {r.declared:.1%} | {_ms(r.median_width_s)} | {verdict} |"
        )
    return "\n".join(lines)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"


def keep(out: Path, record: Mapping[str, Any], text: str) -> None:
    """The record as JSON, and the table beside it as Markdown."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n")
    out.with_suffix(".md").write_text(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Coverage of the harness's paired intervals.")
    parser.add_argument("--pairs", type=int, default=500, help="simulated pairs a case (default 500)")
    parser.add_argument("--truth-pairs", type=int, default=TRUTH_PAIRS)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="JSON; the table is written beside it as .md")
    arguments = parser.parse_args()
    began = time.monotonic()
    results = []
    with ProcessPoolExecutor(arguments.workers) as pool:
        for case in CASES:
            results.append(run_case(case, arguments.pairs, arguments.truth_pairs, pool))
            print(
                f"[{time.monotonic() - began:4.0f} s] {table(results[-1:]).splitlines()[-1]}", file=sys.stderr
            )
    text = table(results)
    print(text)
    if arguments.out:
        record = {
            "command": "python benchmarks/statistics_selftest.py"
            f" --pairs {arguments.pairs} --truth-pairs {arguments.truth_pairs}",
            "harness_version": __version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "seconds": round(time.monotonic() - began, 1),
            "required": {"coverage": COVERAGE, "zero_excluded_at_most": MAX_FALSE},
            "cases": [asdict(result) for result in results],
        }
        keep(arguments.out, record, text)
    return 0 if all(result.ok is not False for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
