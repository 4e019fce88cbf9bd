# SPDX-License-Identifier: Apache-2.0
"""The pair on a host with GPUs: each arm in a container of one image, the source's own workload and limits.

The layout of results is the CPU pair's. What differs: no float32 reference exists for a model of this size, so
the run says that parity was not checked, and limits are the source's, not derived from an unloaded TTFT.
With fewer GPUs than the model needs, a slice of it is served: fewer layers, real widths, dummy weights.
Grade: research; of this file, planning, --dry-run and the refusals are tested.
"""

import argparse
import asyncio
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.arms import Arm
from harness.engines import docker
from harness.engines.endpoint import ask_model
from harness.errors import UserError
from harness.load import Target
from harness.options import parse_rates
from harness.progress import ProgressLine
from harness.report import write_report
from harness.sla import SOURCE_LIMITS_S, Limits
from harness.store import RunStore, new_arm, new_manifest
from harness.sweep import Plan, measure
from harness.trace import Trace, make_trace

PROFILES = {  # (part of the GPU's name, how many) -> profile of the image, arms
    ("B300", 8): ("b300-8", ("tp8", "dcp8")),
    ("RTX PRO 6000", 16): ("rtx6000-16", ("tp16", "dcp16")),
    ("H200", 8): ("slice-h200-8", ("tp8", "dcp8")),
    ("H200", 2): ("slice-h200-2", ("tp2", "dcp2")),
}
RATES = "0.5,0.7,0.9,1.0,1.15"  # QPS around the source's crossing
REQUESTS, COHORT_SIZE, OUTPUT_TOKENS = 60, 5, 400
SOURCE_TOKENS = (60_000, 180_000)
VOCAB_SIZE = 163_840
PORT = 8000


@dataclass(frozen=True)
class GPUPlan:
    """Everything that a run would do. `arms`: in order; `model` is a folder of this host, mounted at /model."""

    image: str
    profile: str
    arms: tuple[Arm, ...]
    model: Path
    rates: tuple[float, ...]
    out: Path
    seed: int

    def container(self, arm: Arm) -> docker.Container:
        command = ["serve", "--profile", self.profile, "--topology", arm.name, "--model", "/model"]
        command += ["--host", "127.0.0.1", "--port", str(PORT)]
        return docker.Container(
            self.image,
            command,
            gpus="all",
            ulimits=docker.GPU_ULIMITS,
            volumes={
                str(self.model.resolve()): {"bind": "/model", "mode": "ro"},
                "kimi-k3-cache": {"bind": "/cache", "mode": "rw"},
            },
        )

    def trace(self) -> Trace:
        low, high = SOURCE_TOKENS
        return make_trace(
            requests=REQUESTS,
            min_tokens=low,
            max_tokens=high,
            output_tokens=OUTPUT_TOKENS,
            cohort_size=COHORT_SIZE,
            arrivals="poisson",
            seed=self.seed,
            vocab_size=VOCAB_SIZE,
        )

    def describe(self) -> str:
        """Every step, with the docker command line that each container amounts to."""
        seconds = sum(REQUESTS / rate for rate in self.rates) * len(self.arms)
        lines = [
            f"trace: {REQUESTS} requests of {SOURCE_TOKENS[0]}-{SOURCE_TOKENS[1]} prompt tokens and"
            f" {OUTPUT_TOKENS} output tokens, seed {self.seed}",
            f"limits: {', '.join(f'{limit:g} s' for limit in SOURCE_LIMITS_S.values())} on TTFT, the source's own",
        ]
        for arm in self.arms:
            lines += [
                f"arm {arm.name}: start, until it has generated a token",
                f"  {shlex.join(docker.command_line(self.container(arm)))}",
                *(f"  cell {arm.name} @ {rate:g} QPS, {REQUESTS / rate:.0f} s" for rate in self.rates),
                f"arm {arm.name}: stop and remove the container",
            ]
        lines.append(
            f"report in {self.out}; about {seconds / 60:.0f} min of load, and each arm's loading time"
        )
        return "\n".join(lines)


def visible_gpus(nvidia_smi: Sequence[str] = ("nvidia-smi",)) -> list[str]:
    """Names of this host's GPUs; none where nvidia-smi is not there or fails."""
    command = [*nvidia_smi, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def choose(gpus: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Profile and arms for a host's GPUs.

    Raises:
        UserError: there is no pair for them.
    """
    for (name, count), found in PROFILES.items():
        if len(gpus) == count and all(name in gpu for gpu in gpus):
            return found
    offered = ", ".join(f"{count}x {name}" for name, count in PROFILES)
    raise UserError(
        f"no pair is known for {len(gpus)}x {gpus[0]} (known: {offered}); name --profile and --arms"
    )


def add_arguments(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--gpu", action="store_true", help="serve on this host's GPUs, from --image")
    bench.add_argument("--profile", help="with --gpu: of the image (default: by this host's GPUs)")
    bench.add_argument(
        "--model", type=Path, metavar="DIR", help="with --gpu: checkpoint, or its config.json for a slice"
    )
    bench.add_argument("--dry-run", action="store_true", help="print everything that would be done")


def plan_from(arguments: argparse.Namespace, gpus: Sequence[str]) -> GPUPlan:
    """Raises UserError for what is missing."""
    if not arguments.image:
        raise UserError("--gpu serves from an image; name it with --image kimi-k3-serve@sha256:…")
    if arguments.model is None or not (arguments.model / "config.json").is_file():
        raise UserError("--gpu needs --model DIR with the model's config.json")
    if arguments.profile:
        profile, names = arguments.profile, arguments.arms.split(",")
    elif not gpus:
        raise UserError(
            "no GPU is visible; without --gpu the pair runs on the CPU, or name --profile to plan"
        )
    else:
        profile, names = choose(gpus)
    return GPUPlan(
        image=arguments.image,
        profile=profile,
        arms=tuple(Arm.parse(name) for name in names),
        model=arguments.model,
        rates=parse_rates(arguments.rates or RATES),
        out=arguments.out or Path("results") / f"{profile}-pair",
        seed=arguments.seed,
    )


def run(arguments: argparse.Namespace) -> None:
    """Prints the plan; without --dry-run carries it out and reports."""
    plan = plan_from(arguments, visible_gpus())
    print(plan.describe())
    if not arguments.dry_run:
        asyncio.run(carry_out(plan))
        print(f"\nresults are in {plan.out}")


async def carry_out(plan: GPUPlan) -> None:
    trace, url = plan.trace(), f"http://127.0.0.1:{PORT}"
    manifest = new_manifest(
        trace=trace,
        trace_path="trace.jsonl.gz",
        arms=[new_arm(arm.name, url, topology=arm.topology) for arm in plan.arms],
        rates=plan.rates,
        repeats=1,
        limits=Limits(SOURCE_LIMITS_S, rule="the source's own"),
        fixed_cohort=trace.cohorts[len(trace.cohorts) // 2],
        shared_cores=False,
        notes=[
            "Parity was not checked: there is no reference for a model of this size. Compare answers before speed."
        ],
    )
    store = RunStore.create(plan.out, manifest, trace)
    try:
        for arm in plan.arms:
            log = plan.out / "logs" / f"{arm.name}.log"
            engine = await docker.start(arm.name, plan.container(arm), url=url, log_path=log, progress=say)
            with engine:
                entry = next(entry for entry in manifest["arms"] if entry["name"] == arm.name)
                entry["engine"] = engine.started_as()
                store.write_manifest(manifest)
                target = Target(arm.name, url, await ask_model(url, None))
                facts = {arm.name: {"log": f"logs/{arm.name}.log", "image": entry["engine"]["image_id"]}}
                with ProgressLine(sys.stderr) as line:
                    measuring = measure(
                        store, [target], trace, Plan(plan.rates), engines=facts, on_progress=line
                    )
                    await engine.guard(measuring, "measuring")
    finally:
        print(write_report(store), end="")


def say(text: str) -> None:
    print(text, file=sys.stderr)
