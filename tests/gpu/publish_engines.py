# SPDX-License-Identifier: Apache-2.0
"""The publication in real vLLM engines on two GPUs: every chunk's bytes, and prefill logprobs of long prompts.

    python tests/gpu/publish_engines.py --out FOLDER [--cases NAME ...] [--tokens 120000]

Every case is an offline engine of two ranks (TP2, DCP2) with seeded weights, in a process of its own; all start at
once. In one engine, one after the other, its workers take

    verified    published context, every chunk of every layer compared byte for byte with vLLM's own path
    published   published context
    stock       vLLM's own method put back, in the same engine; the first prompt twice, which shows what chance does

and the logprobs of every prompt position (the token that follows, and the first TOP) are compared between the last
two. The fp8 cases have another `k_scale` in every layer, set in the workers once the weights are loaded: seeded
weights have none. Kimi-K3's own layer takes an fp8 cache only together with fp8 prefill queries, which vLLM 0.32.0
has for compute capability 10 alone: on Hopper that case must die saying so.

Without GPUs `--cases cpu --tokens 1500` tries all of it on a small model, over shared memory.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
for folder in (ROOT, ROOT / "benchmarks"):
    sys.path.insert(0, str(folder))

TOP = 5
TOLERANCE = 0.05
"""Nats. Equal bytes through the same kernels give equal logprobs, or nearly where a sum's order is chance."""
K_SCALE = 0.37
REFUSAL = "Kimi-K3 fp8 KV cache requires an fp8 prefill query"
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"slice": "mla", "kv_bytes": 1_600_000_000},
    "fp8": {"slice": "deepseek", "kv_cache_dtype": "fp8", "kv_bytes": 800_000_000},
    "fp8-peer": {
        "slice": "deepseek",
        "kv_cache_dtype": "fp8",
        "kv_bytes": 800_000_000,
        "backend": "PEER_FLASHMLA",
    },
    "fp8-kimi": {
        "slice": "kimi",
        "kv_cache_dtype": "fp8",
        "kv_bytes": 800_000_000,
        "attention_config": {"use_prefill_query_quantization": True},
        "refusal": REFUSAL,
    },
    "cpu": {"slice": "cpu", "kv_bytes": 64 << 20, "backend": "CPU_MLA"},
}
ON_GPUS = [name for name in CASES if name != "cpu"]


class Arms:
    """Mixed into vLLM's worker: which way its prefill context takes, and what there is to know about it."""

    vllm_config: Any  # the worker's
    published: Any
    compare: Any

    def take(self, arm: str) -> None:
        from vllm.model_executor.layers.attention.mla_attention import MLACommonBaseImpl

        from kimi_k3_serve.publish import verify

        name = "_context_parallel_compute_prefill_context"
        if not hasattr(self, "published"):
            self.published, self.compare = getattr(MLACommonBaseImpl, name), verify.compare
        setattr(MLACommonBaseImpl, name, self.published.__wrapped__ if arm == "stock" else self.published)
        verify.compare = self.compare if arm == "verified" else lambda *_: None

    def mla(self) -> list[Any]:
        from kimi_k3_serve.inspection import mla_layers

        return mla_layers(self.vllm_config)

    def set_scales(self, first: float) -> None:
        """`k_scale` of every layer, each a little larger than the one before."""
        for index, layer in enumerate(self.mla()):
            layer._k_scale.fill_(first + 0.05 * index)

    def facts(self) -> dict[str, Any]:
        from kimi_k3_serve.publish import hook, verify

        layers = self.mla()
        return {
            "prefill_kv": hook.state(),
            "attention_backend": layers[0].attn_backend.get_name(),
            "manager": type(layers[0].dcp_manager).__name__,
            "kv_cache_dtype": layers[0].kv_cache_dtype,
            "k_scales": [round(float(layer._k_scale), 4) for layer in layers],
            "compared": dict(verify.compared),
        }


def write_model(kind: str, folder: Path) -> None:
    """config.json of a case's slice; for the CPU a whole small checkpoint."""
    from kimi_k3_serve import checkpoint

    if kind == "cpu":
        checkpoint.write_checkpoint(folder)
        return
    if kind == "mla":
        from harness.slices import slice_config

        config = slice_config("mla")
    elif kind == "kimi":
        from decode_arms import CONFIG

        layers = {"kda_layers": [], "full_attn_layers": [1, 2, 3, 4]}
        config = CONFIG | {"linear_attn_config": CONFIG["linear_attn_config"] | layers}
    else:  # the shared MLA layer, whose fp8 cache Hopper can serve
        sizes = {"hidden_size": 4096, "intermediate_size": 4096, "vocab_size": 32768, "q_lora_rank": 1536}
        heads = {"num_attention_heads": 64, "num_key_value_heads": 64}
        layers = {"num_hidden_layers": 4, "first_k_dense_replace": 4, "max_position_embeddings": 1 << 17}
        config = checkpoint.CONFIG | sizes | heads | layers | {"torch_dtype": "bfloat16"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def engine_of(case: dict[str, Any], model: Path, tokens: int) -> Any:
    from vllm import LLM

    on_cpu = case["slice"] == "cpu"
    own: dict[str, Any] = {
        "load_format": "kimi_k3_seeded",
        "dtype": "bfloat16",
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.1,
        "dcp_comm_backend": "a2a",
        "compilation_config": {"mode": 0},
    }
    if on_cpu:
        own = {
            "dtype": "float32",
            "max_num_batched_tokens": 256,
            "compilation_config": {"custom_ops": ["none"]},
        }
        own |= {"distributed_executor_backend": "mp"}
    if "backend" in case:  # else what vLLM chooses
        own["attention_backend"] = case["backend"]
    if "attention_config" in case:
        own["attention_config"] = case["attention_config"]
    return LLM(
        model=str(model),
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        decode_context_parallel_size=2,
        cp_kv_cache_interleave_size=1,
        kv_cache_dtype=case.get("kv_cache_dtype", "auto"),
        enforce_eager=True,
        max_model_len=tokens + 64,
        max_num_seqs=4,
        max_logprobs=20,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=case["kv_bytes"],
        worker_extension_cls="publish_engines.Arms",
        disable_log_stats=True,
        seed=0,
        **own,
    )


def answer(name: str, out: Path, tokens: int, prompts: int) -> None:
    """In a case's process: run all arms, write what is known after each into NAME.json."""
    case, begun = CASES[name], time.monotonic()
    record: dict[str, Any] = {"case": name, "seconds": {}}

    def note(**facts: Any) -> None:
        record.update(facts)
        (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")

    write_model(case["slice"], out / f"model-{name}")
    vocabulary = json.loads((out / f"model-{name}" / "config.json").read_text())["vocab_size"]
    generator = np.random.Generator(np.random.PCG64(11))
    asked = [generator.integers(3, vocabulary, size=tokens).tolist() for _ in range(prompts)]
    engine = engine_of(case, out / f"model-{name}", tokens)
    if "kv_cache_dtype" in case:
        engine.collective_rpc("set_scales", args=(K_SCALE,))
    record["seconds"]["loaded"] = round(time.monotonic() - begun, 1)
    note(ranks=engine.collective_rpc("facts"), tokens=tokens)

    def run(arm: str, some: list[list[int]]) -> list[Logprobs]:
        engine.collective_rpc("take", args=(arm,))
        since = time.monotonic()
        found = [prefill(engine, prompt) for prompt in some]
        record["seconds"].setdefault(arm, []).append(round(time.monotonic() - since, 1))
        return found

    run("verified", asked[:1])
    note(ranks=engine.collective_rpc("facts"))
    ours, theirs = run("published", asked), run("stock", asked)
    note(published_against_stock=differences(ours, theirs), informative=spread(theirs))
    note(stock_against_itself=differences(run("stock", asked[:1]), theirs[:1]))
    # Last, since it says nothing about prefill: whether this cache can be decoded from at all.
    engine.collective_rpc("take", args=("published",))
    note(decoded=list(complete(engine, asked[0][: min(tokens, 3000)], 4).outputs[0].token_ids))
    os._exit(0)  # the engine's own end takes as long as its work; main ends the process group


class Logprobs:
    """Of a prompt of n tokens: the token that follows [n - 1], the first TOP [n - 1, TOP]; and 20 behind the prompt."""

    def __init__(self, output: Any) -> None:
        flat = output.prompt_logprobs
        values = np.array(flat.logprobs).reshape(-1, TOP + 1)  # position 0 has none
        tokens = np.array(flat.token_ids).reshape(-1, TOP + 1)
        self.following, self.top, self.top_tokens = values[:, 0], values[:, 1:], tokens[:, 1:]
        last = output.outputs[0].logprobs
        self.last = dict(zip(last.token_ids, last.logprobs, strict=True))


def complete(engine: Any, prompt: list[int], count: int, **more: Any) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **more)
    return engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]


def prefill(engine: Any, prompt: list[int]) -> Logprobs:
    return Logprobs(complete(engine, prompt, 1, logprobs=20, prompt_logprobs=TOP, flat_logprobs=True))


def differences(left: list[Logprobs], right: list[Logprobs]) -> dict[str, Any]:
    """Largest differences in nats over all positions of all prompts."""
    from harness.parity import logprob_distance

    pairs = list(zip(left, right, strict=True))
    return {
        "positions": sum(len(a.following) for a, _ in pairs),
        "following_max": max(float(np.abs(a.following - b.following).max()) for a, b in pairs),
        "top_max": max(float(np.abs(a.top - b.top).max()) for a, b in pairs),
        "bit_equal": sum(int((a.following == b.following).sum()) for a, b in pairs),
        "other_first_token": sum(int((a.top_tokens[:, 0] != b.top_tokens[:, 0]).sum()) for a, b in pairs),
        "after_the_prompt_max": max(logprob_distance(a.last, b.last) for a, b in pairs),
    }


def spread(found: list[Logprobs]) -> dict[str, Any]:
    """Whether these logprobs could show anything: one value everywhere could not."""
    first = np.concatenate([logprobs.top_tokens[:, 0] for logprobs in found])
    following = np.concatenate([logprobs.following for logprobs in found])
    return {
        "deviation": round(float(following.std()), 3),
        "distinct_first_tokens": len(np.unique(first)),
    }


def verdict(record: dict[str, Any], log: str) -> tuple[bool, str]:
    """Whether a case shows what it should, and a line that says what."""
    case = CASES[record["case"]]
    if "refusal" in case:
        return case["refusal"] in log, f"refused: {case['refusal'] in log} ({last_words(log)})"
    if "stock_against_itself" not in record:
        return False, f"ended early: {last_words(log)}"
    [rank, *_] = record["ranks"]
    found, chunks = record["published_against_stock"], [r["compared"]["chunks"] for r in record["ranks"]]
    largest = max(found["following_max"], found["top_max"], found["after_the_prompt_max"])
    scaled = "kv_cache_dtype" not in case or all(scale != 1 for scale in rank["k_scales"])
    ok = min(chunks) > 0 and largest <= TOLERANCE and scaled and rank["prefill_kv"]["transport"] != "stock"
    return ok, (
        f"{rank['attention_backend']}, {rank['kv_cache_dtype']}, k_scale {rank['k_scales']}, prefill KV by "
        f"{rank['prefill_kv']['transport']}; {min(chunks)} chunks of {rank['compared']['rows']} rows a rank equal byte "
        f"for byte; {found['positions']} logprobs, published against stock at most {largest:.4f} nats apart, "
        f"{found['bit_equal']} bit-equal; stock against itself {record['stock_against_itself']['following_max']:.4f}; "
        f"deviation {record['informative']['deviation']} nats; decoded {record.get('decoded', 'NOT')}"
    )


def last_words(log: str) -> str:
    """The last line that names an error, else the last one, without folders."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [
        line for line in lines if "Error" in line and "EngineDead" not in line and "core.py" not in line
    ]
    return " ".join(word.rsplit("/", 1)[-1] for word in (errors or lines or ["nothing"])[-1].split())[-300:]


def start(name: str, index: int, args: argparse.Namespace) -> Any:
    """A case in a process group of its own, with ports of its own."""
    folders = [
        str(Path(__file__).parent),
        str(ROOT / "benchmarks"),
        str(ROOT),
        os.environ.get("PYTHONPATH", ""),
    ]
    own = {
        "PYTHONPATH": ":".join(folders),
        "KIMI_K3_PREFILL_KV": "auto",
        "KIMI_K3_VERIFY_PREFILL_KV": "1",  # vLLM's gather buffers stay, which its own path needs
        "VLLM_PORT": str(23000 + 200 * index),
        "MASTER_PORT": str(22500 + index),
    }
    command = [sys.executable, __file__, "--out", str(args.out), "--tokens", str(args.tokens)]
    command += ["--prompts", str(args.prompts), "--case", name]
    with (args.out / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | own, start_new_session=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=ON_GPUS)
    parser.add_argument("--tokens", type=int, default=120_000, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for everything")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        answer(args.case, args.out, args.tokens, args.prompts)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    running = {name: start(name, index, args) for index, name in enumerate(args.cases)}
    while running:
        for name, process in list(running.items()):
            late = time.monotonic() - began > args.timeout
            if not late and process.poll() is None:
                continue
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            del running[name]
            print(
                f"{time.monotonic() - began:5.0f} s  {name} {'is late' if late else process.wait()}",
                flush=True,
            )
        time.sleep(0.5)
    report = {}
    for name in args.cases:
        path = args.out / f"{name}.json"
        record = json.loads(path.read_text()) if path.is_file() else {"case": name}
        ok, text = verdict(record, (args.out / f"{name}.log").read_text(errors="replace"))
        report[name] = {"ok": ok, "text": text} | record
        print(f"{'ok' if ok else 'FAILED':<6} {name}: {text}", flush=True)
    (args.out / "engines.json").write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(0 if all(entry["ok"] for entry in report.values()) else 1)


if __name__ == "__main__":
    main()
