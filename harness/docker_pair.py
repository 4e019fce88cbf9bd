# SPDX-License-Identifier: Apache-2.0
"""A pair from an image on a host with GPUs: one container after the other, each with all GPUs.

Each arm answers the parity prompts before its cells, and is compared with those before it and with itself; there is no
float32 reference for a model of this size. Grade: research; planning, --dry-run and, with a stand-in for the container,
proofs, parity and equal bytes are tested.
"""

import asyncio
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import parity
from harness.arms import Arm
from harness.calibrate import brief, keep
from harness.engines import docker
from harness.engines.endpoint import ask_model
from harness.engines.in_image import let_in
from harness.engines.process import Engine
from harness.engines.proof import Proof
from harness.errors import UserError
from harness.load import Target
from harness.manifest import add_session, new_arm, new_manifest
from harness.nvidia import gpu_facts
from harness.pair import SOURCE_TOKENS
from harness.parity_collect import collect, continue_freely
from harness.prepare import keep_prompts
from harness.progress import ProgressLine
from harness.run_folder import RunFolder
from harness.serving import GPU_FLAGS, kv_tokens_of, longest_context, on_gpus
from harness.sla import SOURCE_LIMITS_S, Limits
from harness.slices import VOCAB_SIZE
from harness.steps import Steps
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
    whose weights the engine makes. `kv_bytes` of one rank, 0 for what the profile leaves the first arm: the others get
    as much. Parity: `parity_tokens` after prompts of `parity_lengths`; arms that disagree by more than `tolerance` are
    not timed but `despite_refusal`.
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
    parity_lengths: tuple[int, ...]
    parity_tokens: int
    tolerance: parity.Tolerance
    despite_refusal: bool = False

    def container(self, arm: Arm, kv_bytes: int | None = None) -> docker.Container:
        """`kv_bytes`: those of the first arm, where the plan leaves them to the profile."""
        kv_bytes = self.kv_bytes or kv_bytes
        command = ["serve", "--profile", self.profile, "--topology", arm.topology_name, "--model", "/model"]
        command += ["--host", "127.0.0.1", "--port", str(PORT), "--proof-dir", PROOFS]
        if kv_bytes:
            command += ["--kv-cache-memory-bytes", str(kv_bytes)]
        environment = {}
        if self.seeded:
            others = (length + self.parity_tokens for length in self.parity_lengths)
            longest = longest_context(SOURCE_TOKENS[1], 1.0, self.output_tokens, *others)
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

    def require_proof(self, arm: Arm, proofs: Sequence[Proof], *, used: bool = False) -> None:
        """Of the topology; of a slice also the arm's variant, which a profile's own backend need not be."""
        arm.require_proof(proofs, used=used, gpu=True, variant=self.seeded)

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
        kv_cache = "what the profile leaves the first arm, and as many bytes in the others"
        if self.kv_bytes:
            kv_cache = f"{self.kv_bytes:,} bytes in every arm"
        lines = [
            f"trace: {self.requests} requests of {SOURCE_TOKENS[0]}-{SOURCE_TOKENS[1]} prompt tokens and"
            f" {self.output_tokens} output tokens, seed {self.seed}",
            f"limits: {', '.join(f'{limit:g} s' for limit in SOURCE_LIMITS_S.values())} on TTFT, the source's own",
            f"KV cache of each rank: {kv_cache}",
        ]
        lengths = ", ".join(f"{length:,}" for length in self.parity_lengths)
        for arm in self.arms:
            lines += [
                f"arm {arm.name}: start, until it has generated a token",
                f"  {shlex.join(docker.command_line(self.container(arm)))}",
                f"  parity: prompts of {lengths} tokens, {self.parity_tokens} tokens each; tolerance"
                f" {self.tolerance.logprob:g} nats",
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
        self.steps = Steps(sys.stderr)
        self._folder: RunFolder | None = None
        self._prompts = parity.make_prompts(plan.seed, VOCAB_SIZE, plan.parity_lengths)
        self._continuations: Mapping[str, Sequence[int]] = {}
        self._answers: dict[str, parity.ArmAnswers] = {}
        self._stop: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def store(self) -> RunStore | None:
        return self._folder.store if self._folder else None

    def interrupt(self) -> None:
        """For a signal handler: ends the cell that runs and keeps it, or cancels whatever else is done."""
        if self._stop is not None and not self._stop.is_set():
            self._stop.set()
        elif self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """UserError where an arm is not what its name says or not comparable, CancelledError when interrupted."""
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
            notes=["Parity compares the arms with each other: there is no float32 reference for them."],
        )
        manifest["timeouts"] = Plan(plan.rates).timeouts
        add_session(manifest, gpus=gpu_facts())
        keep(manifest, await brief(trace, min(plan.rates)))
        self._folder = run = RunFolder(RunStore.create(plan.out, manifest, trace), manifest)
        for arm in plan.arms:
            proof_dir = run.folder("proof", arm.name)
            let_in(proof_dir, 0o077)  # the image's own user writes there
            log = plan.out / "logs" / f"{arm.name}.log"
            container = plan.container(arm, run.arm(plan.arms[0].name)["kv_bytes"])
            engine = await docker.start(
                arm.name, container, url=URL, log_path=log, proof_dir=proof_dir, progress=self.steps.say
            )
            with engine:
                entry = run.arm(arm.name)
                ranks = [proof.raw for proof in engine.proofs]
                entry["engine"] = {**engine.started_as(), "ranks": ranks}
                entry["kv_bytes"], entry["kv_tokens"] = engine.proofs[0].kv_bytes, kv_tokens_of(log)
                run.save()
                plan.require_proof(arm, engine.proofs)
                run.require_equal_bytes()
                target = Target(arm.name, URL, await ask_model(URL, None))
                with self.steps.step(f"{arm.name} parity"):
                    await engine.guard(self._check(run, arm, target), "answering the parity prompts")
                await self._measure(run.store, engine, target, trace, entry["engine"]["image_id"])

    async def _check(self, run: RunFolder, arm: Arm, target: Target) -> None:
        """The arm's answers beside those of the arms before it. UserError where it must not be timed."""
        plan, prompts = self.plan, self._prompts
        if not self._continuations:
            self._continuations = await continue_freely(target, prompts, plan.parity_tokens)
            keep_prompts(run.folder("parity"), prompts, plan.parity_tokens, self._continuations)
        self._answers[arm.name] = await collect(
            target,
            prompts,
            self._continuations,
            VOCAB_SIZE,
            self.steps.progress,
            prefill_tokens=sum(SOURCE_TOKENS) // 2,
        )
        proofs = run.read_proofs(arm.name)
        refusal = run.judge(
            prompts,
            None,
            self._answers,
            self.steps,
            launches={arm.name: 0},
            tolerance=plan.tolerance,
            output_tokens=plan.parity_tokens,
        )
        plan.require_proof(arm, proofs, used=True)
        if refusal and not plan.despite_refusal:
            raise UserError(refusal)

    async def _measure(
        self, store: RunStore, engine: Engine, target: Target, trace: Trace, image: str
    ) -> None:
        facts = {target.name: {"log": f"logs/{target.name}.log", "image": image}}
        self._stop = stop = asyncio.Event()
        with ProgressLine(sys.stderr) as line:
            measuring = measure(
                store,
                [target],
                trace,
                Plan(self.plan.rates),
                engines=facts,
                launches={target.name: 0},
                on_progress=line,
                stop=stop,
            )
            await engine.guard(measuring, "measuring")
        self._stop = None
        if stop.is_set():
            raise asyncio.CancelledError
