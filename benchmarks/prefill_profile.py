# SPDX-License-Identifier: Apache-2.0
"""Where the time of a long prefill goes in each arm: real vLLM engines on two GPUs, kernel by kernel.

    python benchmarks/prefill_profile.py --out FOLDER [--slice kimi-k3] [--arms NAME ...] [--tokens 120000]
    python benchmarks/prefill_profile.py --read FOLDER/profile.json.gz      # prints the table again

Every arm is an offline engine of a slice (`harness.slices`) in a process of its own. When all have loaded they answer
in turns (A B C C B A), one prompt each, the same in every arm, with nothing else on the GPUs: a first prompt compiles
kernels, --prompts others are timed to their first token, and are then asked again under PyTorch's profiler. The
prefix cache is off.

FOLDER gets profile.json.gz and each arm's log and answer. Printed is what differs between the arms: first tokens, the
profiled prompts' span on the GPU, how much of it anything ran there, and every kernel or copy whose time differs
between two arms by --least milliseconds or more, every prompt of one above every prompt of the other. Times are rank
0's and rank 1's, means over prompts, and overlapping ones both count. A kernel that waits for the other rank, of a
collective or of peer memory, counts its waiting: the rank that comes last waits least. The profiler slows launches:
idle time in a profiled span may be its own.
"""

import argparse
import gzip
import json
import math
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count, permutations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from decode_arms import ARMS, UNCURED, engine_arguments, slug
from decode_parity import start, stop
from decode_verdict import last_words

from harness.files import write_bytes
from harness.long_context import prompts
from harness.manifest import package_versions
from harness.nvidia import gpu_facts
from harness.slices import FULL_ATTENTION, VOCAB_SIZE, write_slice

CHUNK_TOKENS = 8192
NAME_WIDTH = 200  # characters of a kernel's name
ByPrompt = Sequence[Sequence[float]]
"""Milliseconds of each prompt on every rank."""
KV_BYTES = 3 << 30  # of a rank: more than a prompt of 200,000 tokens takes under TP in the all-MLA slice


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = options.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path)
    what.add_argument("--read", type=Path, metavar="PROFILE", help="a profile.json.gz; runs nothing")
    options.add_argument("--slice", choices=list(FULL_ATTENTION), default="kimi-k3")
    served = [name for name, arm in ARMS.items() if name not in UNCURED and not arm.get("graphs")]
    options.add_argument("--arms", nargs="+", choices=served, default=["tp2", "fa3+a2a", "peer fa3"])
    options.add_argument("--tokens", type=int, default=120_000)
    options.add_argument("--prompts", type=int, default=3)
    options.add_argument("--least", type=float, default=0.5, help="milliseconds")
    options.add_argument("--timeout", type=float, default=400.0, help="seconds for all arms")
    options.add_argument("--arm", choices=served, help=argparse.SUPPRESS)
    args = options.parse_args()
    args.arms = list(dict.fromkeys(args.arms))
    if args.read:
        print("\n".join(table(json.loads(gzip.decompress(args.read.read_bytes()))["arms"], args.least)))
        return
    if args.arm:
        profile_arm(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.iterdir()):
        sys.exit(f"{args.out} is not empty; name a new folder")
    write_slice(args.slice, args.out)
    gpus = gpu_facts()
    wrong = run(args)
    answered = [name for name in args.arms if answer_file(args.out, name).is_file()]
    arms = {name: json.loads(answer_file(args.out, name).read_text()) for name in answered}
    report = {
        "command": shlex.join(["python", *sys.argv]),
        "packages": package_versions(),
        "gpus": gpus,
        "slice": args.slice,
        "tokens": args.tokens,
        "chunk_tokens": CHUNK_TOKENS,
        "arms": arms,
    }
    packed = gzip.compress(json.dumps(report, allow_nan=False).encode(), mtime=0)
    write_bytes(args.out / "profile.json.gz", packed)
    if arms:
        print("\n".join(table(arms, args.least)))
    if wrong:
        sys.exit("\n".join(wrong))


def answer_file(out: Path, name: str) -> Path:
    return out / f"{slug(name)}.json"


def run(args: argparse.Namespace) -> list[str]:
    """Every arm to its answer, or none any further once one has failed or the time is up; what is wrong with whom."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # so that nothing stays behind
    running: dict[str, Any] = {}
    deadline = time.monotonic() + args.timeout
    try:
        for index, name in enumerate(args.arms):
            running[name] = start([__file__, *sys.argv[1:]], name, args.out, index)
        while True:
            ended = [name for name in running if running[name].poll() is not None]
            waited_for = [name for name in running if not answer_file(args.out, name).is_file()]
            failed = [name for name in ended if name in waited_for]
            if failed or not waited_for or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        if failed:
            return [f"{name} failed: {last_words(args.out / f'{slug(name)}.log')}" for name in failed]
        return [f"no answer of {name} within {args.timeout:g} s; see its log" for name in waited_for]
    finally:
        for process in running.values():
            stop(process)


def profile_arm(args: argparse.Namespace) -> None:
    """In an arm's process."""
    signal.alarm(math.ceil(args.timeout) + 10)  # should nobody be left to end it
    from vllm import LLM

    engine = LLM(
        model=str(args.out / f"slice-{args.slice}"),
        **engine_arguments(args.arm),
        enforce_eager=True,
        compilation_config={"mode": 0},
        max_model_len=args.tokens + 64,
        max_num_batched_tokens=CHUNK_TOKENS,
        max_num_seqs=16,
        gpu_memory_utilization=0.15,  # of memory that must be free at the start; the KV cache has its own figure
        kv_cache_memory_bytes=KV_BYTES,
        worker_extension_cls="prefill_probe.PrefillProbe",
    )
    compiling, *asked = prompts(0, args.prompts + 1, args.tokens, VOCAB_SIZE)
    (args.out / f"{slug(args.arm)}.loaded").touch()
    seconds: list[float] = []
    profiled: list[float] = []
    profiles: list[Any] = []
    rounds = count()

    def my_turn() -> AbstractContextManager[None]:
        return turn(args.out, args.arms, args.arm, next(rounds))

    with my_turn():
        first_token(engine, compiling)
    for prompt in asked:
        with my_turn():
            seconds.append(first_token(engine, prompt))
    for prompt in asked:
        with my_turn():
            engine.collective_rpc("start_kernels")
            profiled.append(first_token(engine, prompt))
            profiles.append(engine.collective_rpc("end_kernels"))
    found = {"ttft_s": seconds, "profiled_ttft_s": profiled, "prompts": profiles}
    write_bytes(answer_file(args.out, args.arm), json.dumps(found).encode())


@contextmanager
def turn(out: Path, arms: Sequence[str], arm: str, number: int) -> Iterator[None]:
    """An arm's turn of this number, from 0, in the order A B C C B A: the first of all begins when all have loaded."""

    def mark(name: str, what: int | str) -> Path:
        return out / f"{slug(name)}.{what}"

    order = arms[::-1] if number % 2 else arms
    if index := order.index(arm):
        awaited = [mark(order[index - 1], number)]
    elif number:
        awaited = [mark(arm, number - 1)]  # who was the last is the first
    else:
        awaited = [mark(name, "loaded") for name in arms]
    while not all(path.exists() for path in awaited):
        time.sleep(0.02)
    yield
    mark(arm, number).touch()


def first_token(engine: Any, prompt: list[int]) -> float:
    """Seconds until an offline engine has answered with one token."""
    from vllm import SamplingParams

    began = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return time.perf_counter() - began


def table(arms: Mapping[str, Mapping[str, Any]], least: float) -> Iterator[str]:
    """Lines: one column an arm, milliseconds; kernels by how much they differ."""
    columns = list(arms.values())
    times = [kernel_ms(arm) for arm in columns]
    listed = differing([{name: means(found[name]) for name in found} for found in times], least)
    yield line(arms, "milliseconds: rank 0, rank 1")
    for what, key in (("not profiled", "ttft_s"), ("profiled", "profiled_ttft_s")):
        medians = [f"{1000 * statistics.median(arm[key]):.1f}" for arm in columns]
        yield line(medians, f"first token, median, {what}")
    for what, key in (("span on the GPU", "span_ms"), ("of it anything ran", "busy_ms")):
        yield line(
            [shown([[rank[key] for rank in ranks] for ranks in arm["prompts"]]) for arm in columns], what
        )
    yield line([shown(summed(found)) for found in times], "all kernels, summed")
    for kernel in listed:
        yield line([shown(found[kernel]) if kernel in found else "-" for found in times], kernel[:NAME_WIDTH])
    others = [{name: by_rank for name, by_rank in found.items() if name not in listed} for found in times]
    yield line([shown(summed(found)) if found else "-" for found in others], "kernels not listed, summed")


def line(columns: Iterable[str], what: str) -> str:
    return "".join(f"{column:>18s}" for column in columns) + f"  {what}"


def shown(by_prompt: ByPrompt) -> str:
    """Each rank's mean over prompts."""
    return " ".join(f"{statistics.mean(prompts):8.1f}" for prompts in zip(*by_prompt, strict=True))


def means(by_prompt: ByPrompt) -> list[float]:
    """Of each prompt, over ranks."""
    return [statistics.mean(ranks) for ranks in by_prompt]


def summed(found: Mapping[str, ByPrompt]) -> ByPrompt:
    """Of every prompt and rank, over kernels."""
    return [[sum(times) for times in zip(*ranks, strict=True)] for ranks in zip(*found.values(), strict=True)]


def differing(times: Sequence[Mapping[str, Sequence[float]]], least: float) -> list[str]:
    """Kernels of which two arms lie `least` apart, and every prompt of one above every prompt of the other."""
    apart = {}
    for kernel in sorted({kernel for found in times for kernel in found}):
        arms = [found.get(kernel, [0.0]) for found in times]
        apart[kernel] = max(
            (
                statistics.mean(slow) - statistics.mean(fast)
                for fast, slow in permutations(arms, 2)
                if min(slow) > max(fast)
            ),
            default=0.0,
        )
    return sorted((kernel for kernel in apart if apart[kernel] >= least), key=lambda kernel: -apart[kernel])


def kernel_ms(arm: Mapping[str, Any]) -> dict[str, ByPrompt]:
    """By kernel, of each prompt what it took on every rank; 0 where a rank did not launch it."""
    by_prompt = [[rank["kernels"] for rank in ranks] for ranks in arm["prompts"]]
    names = {name for ranks in by_prompt for kernels in ranks for name in kernels}
    return {
        name: [[kernels.get(name, {"ms": 0.0})["ms"] for kernels in ranks] for ranks in by_prompt]
        for name in names
    }


if __name__ == "__main__":
    main()
