# SPDX-License-Identifier: Apache-2.0
"""Where the time of a long prefill goes in each arm: real vLLM engines on two GPUs, kernel by kernel.

    python benchmarks/prefill_profile.py --out FOLDER [--slice kimi-k3] [--arms NAME ...] [--tokens 120000]

Every arm is an offline engine of a slice (`harness.slices`) in a process of its own. All load at the same time, then
take turns, with nothing else on the GPUs: a first prompt compiles kernels, --prompts further ones are timed to their
first token, and the last of them is asked again under PyTorch's profiler (kernels alone, prefix cache off).

FOLDER gets profile.json and each arm's log; printed is what differs between the arms: the profiled prompt's span on
the GPU, how much of it any kernel ran, and every kernel whose time differs by --least milliseconds or more. Times are
means over the ranks. A collective's kernel waits for the other rank, so its time is not transport alone.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from decode_arms import ARMS, UNCURED, slug
from decode_parity import stop, turn
from decode_verdict import last_words

from harness.files import write_bytes
from harness.long_context import prompts
from harness.slices import FULL_ATTENTION, VOCAB_SIZE, write_slice

ROOT = Path(__file__).parents[1]
CHUNK = 8192
KV_BYTES = 3 << 30  # of a rank: more than a prompt of 200,000 tokens takes under TP in the all-MLA slice


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--slice", choices=list(FULL_ATTENTION), default="kimi-k3")
    served = [name for name in ARMS if name not in UNCURED]
    options.add_argument("--arms", nargs="+", choices=served, default=["tp2", "fa3+a2a", "peer fa3"])
    options.add_argument("--tokens", type=int, default=120_000)
    options.add_argument("--prompts", type=int, default=3)
    options.add_argument("--least", type=float, default=0.5, help="milliseconds")
    options.add_argument("--timeout", type=float, default=400.0, help="seconds for all arms")
    options.add_argument("--arm", choices=served, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.arm:
        profile_arm(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.iterdir()):
        sys.exit(f"{args.out} is not empty; name a new folder")
    write_slice(args.slice, args.out)
    run(args)
    arms = {name: json.loads((args.out / f"{slug(name)}.json").read_text()) for name in args.arms}
    report = {"slice": args.slice, "tokens": args.tokens, "chunk_tokens": CHUNK, "arms": arms}
    (args.out / "profile.json").write_text(json.dumps(report, indent=1, allow_nan=False) + "\n")
    print("\n".join(table(arms, args.least)))


def run(args: argparse.Namespace) -> None:
    """Every arm to its end. Exits where one fails or the time is up."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}/benchmarks:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    running = {}
    deadline = time.monotonic() + args.timeout
    try:
        for index, name in enumerate(args.arms):
            own = dict(ARMS[name].get("env", {})) | {
                "VLLM_PORT": str(21000 + 200 * index),
                "MASTER_PORT": str(20500 + index),
            }
            with (args.out / f"{slug(name)}.log").open("w") as log:
                running[name] = subprocess.Popen(
                    [sys.executable, __file__, *sys.argv[1:], "--arm", name],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment | own,
                    start_new_session=True,
                )
        while None in (ended := {name: process.poll() for name, process in running.items()}).values():
            if any(ended.values()) or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        for name, status in ended.items():
            if status:
                sys.exit(f"{name} failed: {last_words(args.out / f'{slug(name)}.log')}")
        if late := [name for name, status in ended.items() if status is None]:
            sys.exit(f"no answer of {', '.join(late)} within {args.timeout:g} s; see the logs in {args.out}")
    finally:
        for process in running.values():
            stop(process)


def profile_arm(args: argparse.Namespace) -> None:
    """In an arm's process."""
    from vllm import LLM

    arm = ARMS[args.arm]
    dcp: dict[str, Any] = {}
    if args.arm != "tp2":
        dcp = {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 1}
    if "dcp_comm_backend" in arm:
        dcp["dcp_comm_backend"] = arm["dcp_comm_backend"]
    engine = LLM(
        model=str(args.out / f"slice-{args.slice}"),
        skip_tokenizer_init=True,
        load_format="kimi_k3_seeded",
        dtype="bfloat16",
        tensor_parallel_size=2,
        attention_backend=arm["backend"],
        enforce_eager=True,
        compilation_config={"mode": 0},
        max_model_len=args.tokens + 64,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=16,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.15,  # of memory that must be free at the start; the KV cache has its own figure
        kv_cache_memory_bytes=KV_BYTES,
        worker_extension_cls="prefill_probe.PrefillProbe",
        disable_log_stats=True,
        seed=0,
        **dcp,
    )
    asked = prompts(0, args.prompts + 1, args.tokens, VOCAB_SIZE)
    with turn(args.out):
        first_token(engine, asked[0])
        engine.collective_rpc("start_kernels")  # the profiler's own first start takes seconds
        engine.collective_rpc("end_kernels")
        seconds = [first_token(engine, prompt) for prompt in asked[1:]]
        engine.collective_rpc("start_kernels")
        profiled = first_token(engine, asked[-1])
        ranks = engine.collective_rpc("end_kernels")
    found = {"ttft_s": seconds, "profiled_ttft_s": profiled, "ranks": ranks}
    write_bytes(args.out / f"{slug(args.arm)}.json", json.dumps(found).encode())


def first_token(engine: Any, prompt: list[int]) -> float:
    """Seconds until an offline engine has answered with one token."""
    from vllm import SamplingParams

    began = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return time.perf_counter() - began


def table(arms: Mapping[str, Mapping[str, Any]], least: float) -> Iterator[str]:
    """Lines: one column an arm, milliseconds; kernels by how much they differ."""
    yield f"{'milliseconds':70s}" + "".join(f"{name:>12s}" for name in arms)
    totals = {
        "first token, median": lambda arm: 1000 * statistics.median(arm["ttft_s"]),
        "span of the profiled prompt": lambda arm: mean(arm, "span_ms"),
        "of it a kernel ran": lambda arm: mean(arm, "busy_ms"),
    }
    for what, total in totals.items():
        yield f"{what:70s}" + "".join(f"{total(arm):12.1f}" for arm in arms.values())
    times = {name: kernel_ms(arm) for name, arm in arms.items()}
    spread = {}
    for kernel in sorted(set().union(*times.values())):
        of = [found.get(kernel, 0.0) for found in times.values()]
        spread[kernel] = max(of) - min(of)
    for kernel in sorted(spread, key=lambda kernel: -spread[kernel]):
        if spread[kernel] >= least:
            yield f"{kernel[:68]:70s}" + "".join(
                f"{found.get(kernel, 0.0):12.1f}" for found in times.values()
            )


def mean(arm: Mapping[str, Any], what: str) -> float:
    return statistics.mean(rank[what] for rank in arm["ranks"])


def kernel_ms(arm: Mapping[str, Any]) -> dict[str, float]:
    """By kernel, the mean over the ranks; a rank that did not launch it counts as zero."""
    ranks = [rank["kernels"] for rank in arm["ranks"]]
    return {
        name: sum(rank[name]["ms"] for rank in ranks if name in rank) / len(ranks)
        for name in {name for rank in ranks for name in rank}
    }


if __name__ == "__main__":
    main()
