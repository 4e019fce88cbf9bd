# SPDX-License-Identifier: Apache-2.0
"""How right each decode path of Kimi-K3's own MLA layer is: real vLLM engines on two GPUs against a float32 run.

    python benchmarks/decode_parity.py --out FOLDER [--slice NAME] [--arms NAME ...] [--together 6] [--tolerance 0.3]

A small slice (`decode_arms.py`: the real hidden width and MLA geometry, 2 MLA and 2 KDA layers, few small experts), or
one of `harness.slices`, with the weights of `kimi_k3_serve.weights`. `slice_reference` decodes every prompt greedily in
float32; every arm is an offline engine in a process of its own, teacher-forced on those tokens, first each prompt
alone, then all prompts at once (chunked prefill of 2,048 tokens, so that decodes run beside prefills and prefills have
context). Engines load at the same time and answer one after the other.

Compared are top-20 logprobs: with the reference, with TP2, and an arm alone with itself in company; the first token
of an answer (its prefill) apart from the others (its decodes). Besides, `decode_probe` records one decode step of
each MLA layer inside the workers and holds every step of it (query gather, partial outputs, LSEs, merge) against
float64, so that a wrong answer names the step that made it.

An arm is right when it agrees with the reference, with TP2 and with itself in company within the tolerance at every
position.

FOLDER gets parity.json, the table that is printed, and each arm's log. An arm that dies is reported with its last
words, and fails the run. An arm that is given up before it has answered is reported as late, with how far it came, and
fails the run. Uncured arms, vLLM without this project's cures, run only where --arms names them; they may be wrong and
may die. What each arm's vLLM says of its own NCCL wrapper, on which ag_rs depends, stands in parity.json
(VLLM_DISABLE_PYNCCL=1 disables it).
"""

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from decode_arms import (
    ARMS,
    CONFIG,
    GRAPHS,
    LENGTHS,
    OUTPUT_TOKENS,
    UNCURED,
    arm_environment,
    engine_arguments,
    environment,
    slug,
)
from decode_verdict import judge, last_words, progress, progress_file, table

from harness.files import write_bytes  # whole or not at all: an arm may be killed at any time
from harness.slices import FULL_ATTENTION, slice_config

TOP_K = 20
RESTARTS = 8
PROBED = 2  # index of the prompt whose second decode step is recorded
READY_S = 300.0  # for the reference, which the arms wait for
TURN_S = 200  # after which an arm that hangs ends itself and lets the next one answer


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--slice", choices=["small", *FULL_ATTENTION], default="small", help="the model")
    served = [name for name in ARMS if name not in UNCURED]
    options.add_argument("--arms", nargs="+", choices=list(ARMS), default=served)
    options.add_argument("--together", type=int, default=6, help="engines that are up at once")
    options.add_argument("--tolerance", type=float, default=0.3, help="largest accepted difference in nats")
    options.add_argument("--timeout", type=float, default=420.0, help="seconds until an arm is given up")
    options.add_argument("--reference-device", default="cuda:1")
    options.add_argument("--arm", choices=list(ARMS), help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.arm:
        answer(args.arm, args.out)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.iterdir()):
        sys.exit(f"{args.out} is not empty; name a new folder")
    config = CONFIG if args.slice == "small" else slice_config(args.slice)
    (args.out / "config.json").write_text(json.dumps(config, indent=1))
    generator = np.random.Generator(np.random.PCG64(7))
    prompts = [
        {
            "id": f"p{length}",
            "prompt": generator.integers(3, config["vocab_size"], size=length).tolist(),
            "output_tokens": OUTPUT_TOKENS,
        }
        for length in LENGTHS
    ]
    (args.out / "prompts.json").write_text(json.dumps(prompts))

    started = time.monotonic()
    ended = run(args)
    report = judge(args.out, args.arms, ended, args.tolerance)
    report["seconds"] = round(time.monotonic() - started, 1)
    written = json.loads(json.dumps(report), parse_constant=lambda _: None)  # JSON has no infinity: null
    (args.out / "parity.json").write_text(json.dumps(written, indent=1, allow_nan=False) + "\n")
    lines = table(report)
    (args.out / "parity.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(0 if report["ok"] else 1)


def run(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The reference and every arm, at most `args.together` at once; by arm its exit status or that it was late."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # so that nothing stays behind
    reference = [sys.executable, "-m", "kimi_k3_serve.slice_reference", "--model", str(args.out)]
    reference += ["--prompts", str(args.out / "prompts.json"), "--out", str(args.out / "reference.part")]
    started = time.monotonic()
    reference_log = (args.out / "reference.log").open("w")
    referee = subprocess.Popen(
        [*reference, "--device", args.reference_device],
        stdout=reference_log,
        stderr=subprocess.STDOUT,
        env=environment(),
    )
    ended: dict[str, dict[str, Any]] = {}
    waiting = list(args.arms)  # started in this order
    running: dict[str, tuple[Any, float]] = {}
    try:
        while waiting or running or not (args.out / "reference.json").is_file():
            while waiting and len(running) < args.together:
                name = waiting.pop(0)
                command = [__file__, "--out", str(args.out)]
                running[name] = start(command, name, args.out, list(ARMS).index(name)), time.monotonic()
            for name, (process, since) in list(running.items()):
                late = time.monotonic() - since > args.timeout
                if late or process.poll() is not None:
                    stop(process)
                    if late:
                        ended[name] = {"late": {"limit_s": args.timeout, "since": "start"}}
                    elif process.returncode == -signal.SIGALRM:
                        ended[name] = {"late": {"limit_s": TURN_S, "since": "turn"}}
                    else:
                        ended[name] = {"died": process.returncode}
                    del running[name]
                    seconds, times = time.monotonic() - started, progress(args.out, name)
                    print(f"{seconds:5.0f} s  {name}: {ended[name]} {times}", flush=True)
            if referee.poll() == 0 and (args.out / "reference.part").is_file():
                (args.out / "reference.part").rename(args.out / "reference.json")
                print(f"{time.monotonic() - started:5.0f} s  the reference is there", flush=True)
            if referee.poll() not in (None, 0):
                sys.exit(f"the reference failed: {last_words(args.out / 'reference.log')}")
            time.sleep(0.5)
    finally:  # also where this run is interrupted
        for process, _ in running.values():
            stop(process)
        if referee.poll() is None:
            referee.kill()
    return ended


def start(command: Sequence[str], name: str, out: Path, index: int) -> subprocess.Popen[bytes]:
    """A script's arm in a process group of its own, with a log and ports of its own."""
    with (out / f"{slug(name)}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, *command, "--arm", name],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=arm_environment(name, index),
            start_new_session=True,
        )


def stop(process: Any) -> None:
    """An arm with everything it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def answer(name: str, out: Path) -> None:
    """In an arm's process: load, wait for the reference and for the turn, warm up, answer."""
    begun = time.monotonic()
    from vllm import LLM

    arm = ARMS[name]
    engine = LLM(
        model=str(out),
        **engine_arguments(name),
        enforce_eager=not arm.get("graphs", False),
        compilation_config=GRAPHS if arm.get("graphs") else {"mode": 0},
        max_model_len=16384,
        max_num_batched_tokens=2048,
        max_num_seqs=8,
        max_logprobs=TOP_K,
        gpu_memory_utilization=0.05,  # of memory that must be free at the start; the KV cache has its own figure
        kv_cache_memory_bytes=1 << 30,
        worker_extension_cls="decode_probe.DecodeProbe",
    )
    prompts = json.loads((out / "prompts.json").read_text())
    warm = [prompt["prompt"] for prompt in prompts[-2:]]
    times: dict[str, float] = {}

    def reached(what: str) -> None:
        """Kept at once, for the report of an arm that does not come to its answers."""
        times[what] = round(time.monotonic() - begun, 1)
        write_bytes(progress_file(out, name), json.dumps(times).encode())

    reached("loaded")
    vllm_nccl = engine.collective_rpc("nccl_state")[0]
    deadline = time.monotonic() + READY_S
    while not (out / "reference.json").is_file():
        if time.monotonic() > deadline:
            sys.exit("no reference")
        time.sleep(0.2)
    reference = {entry["id"]: entry for entry in json.loads((out / "reference.json").read_text())}
    with turn(out):
        reached("turn")
        # Also the first steps, which compile kernels: engines that wait for each other spin on the GPUs.
        complete(engine, [warm[0][:50], warm[1][:2500]], 3)
        reached("warm")
        alone: dict[str, Any] = {}
        probes: list[Any] = []
        for index, prompt in enumerate(prompts):
            probe = index == PROBED and name != "tp2" and not arm.get("graphs")
            if probe:
                engine.collective_rpc("start_probe")
            alone |= forced(engine, [prompt], reference)
            if probe:
                probes = engine.collective_rpc("end_probe", args=(str(out / f"probe-{slug(name)}"),))
        together = forced(engine, prompts, reference)
        reached("answered")
    result: dict[str, Any] = {"seconds": times, "alone": alone, "together": together}
    result["vllm_nccl"] = vllm_nccl
    if probes:
        from decode_probe import steps

        result["steps"] = steps(out / f"probe-{slug(name)}", 2)
    write_bytes(out / f"{slug(name)}.json", json.dumps(result).encode())


def forced(engine: Any, prompts: Sequence[Any], reference: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Prompt id -> for each position {"token", "top", "decoded"} in the context prompt + reference[:position].

    An engine decodes freely; where its token is not the reference's, the rest of its answer is dropped and a new
    request goes on behind the reference's token. The first position of each request comes from a prefill.
    """
    found: dict[str, list[Any]] = {prompt["id"]: [] for prompt in prompts}
    for _ in range(1 + RESTARTS):
        open_ones = [prompt for prompt in prompts if len(found[prompt["id"]]) < OUTPUT_TOKENS]
        if not open_ones:
            break
        contexts = [
            prompt["prompt"] + reference[prompt["id"]]["tokens"][: len(found[prompt["id"]])]
            for prompt in open_ones
        ]
        counts = [OUTPUT_TOKENS - len(found[prompt["id"]]) for prompt in open_ones]
        for prompt, answers in zip(open_ones, complete(engine, contexts, counts), strict=True):
            positions, tokens = found[prompt["id"]], reference[prompt["id"]]["tokens"]
            for count, (token, top) in enumerate(answers):
                positions.append({"token": token, "top": top, "decoded": count > 0})
                if token != tokens[len(positions) - 1]:
                    break
    return found


def complete(
    engine: Any, contexts: Sequence[Sequence[int]], counts: Sequence[int] | int
) -> list[list[tuple[int, dict[str, float]]]]:
    """Greedy tokens and top-20 logprobs of all contexts at once."""
    from vllm import SamplingParams

    each = [counts] * len(contexts) if isinstance(counts, int) else counts
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=TOP_K, detokenize=False)
        for n in each
    ]
    asked = [{"prompt_token_ids": list(context)} for context in contexts]
    outputs = engine.generate(asked, params, use_tqdm=False)
    return [
        [
            (token, {str(other): float(value.logprob) for other, value in top.items()})
            for token, top in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]
        for output in outputs
    ]


@contextmanager
def turn(out: Path) -> Iterator[None]:
    """One arm at a time: GPU work of several processes would share the GPUs by time slices."""
    with (out / "turn").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        signal.alarm(TURN_S)
        yield
        signal.alarm(0)


if __name__ == "__main__":
    main()
