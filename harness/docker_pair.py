# SPDX-License-Identifier: Apache-2.0
"""A pair from an image on a host with GPUs: one container after the other, each with all GPUs.

Grade: research; planning, --dry-run and what a rank must prove are tested.
"""

import asyncio
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.arms import Arm
from harness.calibrate import brief, keep
from harness.engines import docker
from harness.engines.endpoint import ask_model
from harness.engines.in_image import let_in
from harness.engines.process import Engine
from harness.engines.proof import Proof
from harness.load import Target
from harness.manifest import new_arm, new_manifest
from harness.nvidia import gpu_facts
from harness.pair import SOURCE_TOKENS
from harness.progress import ProgressLine
from harness.serving import GPU_FLAGS, kv_tokens_of, longest_context, on_gpus
from harness.sla import SOURCE_LIMITS_S, Limits
from harness.slices import VOCAB_SIZE
from harness.store import RunStore
from harness.sweep import Plan, measure
from harness.trace import Trace, make_trace

PORT = 8000
URL = f"http://127.0.0.1:{PORT}"
PROOFS = "/proof"


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
        command += ["--host", "127.0.0.1", "--port", str(PORT), "--proof-dir", PROOFS]
        if self.kv_bytes:
            command += ["--kv-cache-memory-bytes", str(self.kv_bytes)]
        environment = {}
        if self.seeded:
            longest = longest_context(SOURCE_TOKENS[1], 1.0, self.output_tokens)
            serving = on_gpus((), self.profile, self.model, self.kv_bytes, longest, seeded=True, graphs=True)
            command += ["--", *serving.extra, *arm.variant.extra]
            environment = dict(serving.environment(arm))
        else:
            command += ["--", "--worker-cls", str(GPU_FLAGS["worker-cls"])]
        return docker.Container(
            self.image,
            command,
            environment=environment,
            gpus="all",
            ulimits=docker.GPU_ULIMITS,
            volumes={
                str(self.model.resolve()): {"bind": "/model", "mode": "ro"},
                str(self.proof_dir(arm).resolve()): {"bind": PROOFS, "mode": "rw"},
                "kimi-k3-cache": {"bind": "/cache", "mode": "rw"},
            },
        )

    def proof_dir(self, arm: Arm) -> Path:
        return self.out / "proof" / arm.name

    def require_proof(self, arm: Arm, proofs: Sequence[Proof]) -> None:
        """Of the topology; of a slice also the arm's variant, which a profile's own backend need not be."""
        arm.require_proof(proofs, gpu=True, variant=self.seeded)

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


class DockerRun:
    """Measures arm after arm. `store` is None until there is a folder to keep anything in."""

    def __init__(self, plan: DockerPlan) -> None:
        self.plan = plan
        self.store: RunStore | None = None
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    def interrupt(self) -> None:
        """For a signal handler: ends the cell that runs and keeps it, or cancels whatever else is done."""
        if self._stop is not None and not self._stop.is_set():
            self._stop.set()
        elif self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """Raises UserError where an arm is not what its name says, CancelledError when interrupted."""
        self._task = asyncio.current_task()
        plan, trace = self.plan, self.plan.trace()
        manifest = new_manifest(
            trace=trace,
            trace_path="trace.jsonl.gz",
            arms=[new_arm(arm.name, URL, topology=arm.topology) for arm in plan.arms],
            rates=plan.rates,
            repeats=1,
            limits=Limits(SOURCE_LIMITS_S, rule="the source's own"),
            fixed_cohort=trace.cohorts[len(trace.cohorts) // 2],
            shared_cores=False,
            notes=[
                "Parity was not checked: there is no reference for a model of this size. Compare answers before speed."
            ],
        )
        manifest |= {"gpus": gpu_facts(), "timeouts": Plan(plan.rates).timeouts}
        keep(manifest, await brief(trace, min(plan.rates)))
        self.store = store = RunStore.create(plan.out, manifest, trace)
        for arm in plan.arms:
            proof_dir = plan.proof_dir(arm)
            proof_dir.mkdir(parents=True)
            let_in(proof_dir, 0o077)  # the image's own user writes there
            log = plan.out / "logs" / f"{arm.name}.log"
            engine = await docker.start(
                arm.name, plan.container(arm), url=URL, log_path=log, proof_dir=proof_dir, progress=say
            )
            with engine:
                entry = next(entry for entry in manifest["arms"] if entry["name"] == arm.name)
                ranks = [proof.raw for proof in engine.proofs]
                entry["engine"] = {**engine.started_as(), "ranks": ranks}
                entry["kv_bytes"], entry["kv_tokens"] = engine.proofs[0].kv_bytes, kv_tokens_of(log)
                store.write_manifest(manifest)
                plan.require_proof(arm, engine.proofs)
                await self._measure(engine, arm, trace, entry["engine"]["image_id"])

    async def _measure(self, engine: Engine, arm: Arm, trace: Trace, image: str) -> None:
        assert self.store is not None
        target = Target(arm.name, URL, await ask_model(URL, None))
        facts = {arm.name: {"log": f"logs/{arm.name}.log", "image": image}}
        self._stop = stop = asyncio.Event()
        with ProgressLine(sys.stderr) as line:
            measuring = measure(
                self.store,
                [target],
                trace,
                Plan(self.plan.rates),
                engines=facts,
                on_progress=line,
                stop=stop,
            )
            await engine.guard(measuring, "measuring")
        self._stop = None
        if stop.is_set():
            raise asyncio.CancelledError


def say(text: str) -> None:
    print(text, file=sys.stderr)
