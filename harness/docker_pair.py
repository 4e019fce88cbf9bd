# SPDX-License-Identifier: Apache-2.0
"""A pair from an image on a host with GPUs: one container after the other, each with all GPUs.

Grade: research; planning and --dry-run are tested.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.arms import Arm
from harness.engines import docker
from harness.engines.endpoint import ask_model
from harness.load import Target
from harness.nvidia import gpu_facts
from harness.pair import SOURCE_TOKENS
from harness.progress import ProgressLine
from harness.report import write_report
from harness.serving import longest_context, on_gpus
from harness.sla import SOURCE_LIMITS_S, Limits
from harness.slices import VOCAB_SIZE
from harness.store import RunStore, new_arm, new_manifest
from harness.sweep import Plan, measure
from harness.trace import Trace, make_trace

PORT = 8000


@dataclass(frozen=True)
class DockerPlan:
    """Everything that a run would do.

    `arms`: in order. `model` is a folder of this host, mounted at /model; `seeded`: it is a slice's configuration,
    whose weights the engine makes. `kv_bytes` of one rank, 0 for what the profile leaves.
    """

    image: str
    profile: str
    arms: tuple[Arm, ...]
    model: Path
    seeded: bool
    rates: tuple[float, ...]
    requests: int
    cohort_size: int
    output_tokens: int
    kv_bytes: int
    out: Path
    seed: int

    def container(self, arm: Arm) -> docker.Container:
        command = ["serve", "--profile", self.profile, "--topology", arm.topology_name, "--model", "/model"]
        command += ["--host", "127.0.0.1", "--port", str(PORT)]
        if self.kv_bytes:
            command += ["--kv-cache-memory-bytes", str(self.kv_bytes)]
        environment = {}
        if self.seeded:
            longest = longest_context(SOURCE_TOKENS[1], 1.0, self.output_tokens)
            serving = on_gpus((), self.profile, self.model, self.kv_bytes, longest, seeded=True, graphs=True)
            command += ["--", *serving.extra, *arm.variant.extra]
            environment = dict(serving.environment(arm))
        return docker.Container(
            self.image,
            command,
            environment=environment,
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
            requests=self.requests,
            min_tokens=low,
            max_tokens=high,
            output_tokens=self.output_tokens,
            cohort_size=self.cohort_size,
            arrivals="poisson",
            seed=self.seed,
            vocab_size=VOCAB_SIZE,
        )

    def describe(self) -> str:
        """Every step, with the docker command line that each container amounts to."""
        seconds = sum(self.requests / rate for rate in self.rates) * len(self.arms)
        lines = [
            f"trace: {self.requests} requests of {SOURCE_TOKENS[0]}-{SOURCE_TOKENS[1]} prompt tokens and"
            f" {self.output_tokens} output tokens, seed {self.seed}",
            f"limits: {', '.join(f'{limit:g} s' for limit in SOURCE_LIMITS_S.values())} on TTFT, the source's own",
        ]
        for arm in self.arms:
            lines += [
                f"arm {arm.name}: start, until it has generated a token",
                f"  {shlex.join(docker.command_line(self.container(arm)))}",
                *(f"  cell {arm.name} @ {rate:g} QPS, {self.requests / rate:.0f} s" for rate in self.rates),
                f"arm {arm.name}: stop and remove the container",
            ]
        lines.append(
            f"report in {self.out}; about {seconds / 60:.0f} min of load, and each arm's loading time"
        )
        return "\n".join(lines)


async def carry_out(plan: DockerPlan) -> None:
    """Measures arm after arm and reports, also when it is ended early."""
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
    manifest["gpus"] = gpu_facts()
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
