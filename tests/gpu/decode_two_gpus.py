# SPDX-License-Identifier: Apache-2.0
"""Peer decode with vLLM's own MLA kernels on real GPUs, one process each, against float64 over the whole context.

    torchrun --nproc-per-node 2 tests/gpu/decode_two_gpus.py --json FILE

Every backend of this project that wraps a kernel of vLLM's: its implementation, its metadata builder's `_build_decode`,
vLLM's groups; only the engine around them is missing. Kimi-K3's heads and widths, BF16, paged caches that hold every
W-th token, 1 to 200,000 tokens a request; eager, and in a CUDA graph whose inputs change between replays. The peer
buffers hold 64 tokens, so that the largest batch takes vLLM's collectives over NCCL; a row says which way it went.
Prints one line a check and exits with 1 if one failed. Needs vLLM.

An error is stated element by element as a share of the attention over the values' magnitudes. It bounds what rounding
to BF16 can do: to the kernel's probabilities, to the partial outputs and to the result, each by at most its unit
roundoff, 2^-8 (eight bits of significand).
"""

import argparse
import faulthandler
import gc
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))

from decode_inputs import (
    BLOCK,
    HEADS,
    LATENT,
    LONGEST,
    NOPE,
    ROPE,
    SCALE,
    VALUE,
    Buffers,
    Inputs,
    error_of,
    local_length,
)

PEER_TOKENS = 64
"""Of a batch, at most: larger ones go over NCCL."""
BATCHES = (1, 3, 8, 32, PEER_TOKENS, 72)
KERNELS = ("PEER_FLASH_ATTN_MLA", "PEER_FLASHMLA", "PEER_TRITON_MLA")
SETS = 3
"""Inputs of a batch: what a graph's buffers hold by turns."""
TOLERANCE = 3 * 2**-8
"""Three roundings to BF16."""
CONTROL_BATCH = 8
CHECK_LIMIT_S = 120
"""Of a check: a rank whose host stands still says where, and ends the run."""


class Watched:
    """In place of an implementation's collectives: keeps what passes through, so that it can be poisoned."""

    def __init__(self, collectives: Any) -> None:
        self.collectives = collectives
        self.kept: list[torch.Tensor] = []

    def gather(self, nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = self.collectives.gather(nope, rope)
        self.kept = [gathered]
        return gathered

    def merge(self, partial: torch.Tensor, lse: torch.Tensor, **options: Any) -> torch.Tensor:
        merged: torch.Tensor = self.collectives.merge(partial, lse, **options)
        self.kept += [partial, lse, merged]
        return merged

    def poison(self) -> None:
        """NaN wherever the last step wrote. After an eager step also what the next one will be given."""
        for tensor in self.kept:
            tensor.fill_(torch.nan)


class World:
    """This rank in vLLM's groups, with a configuration that the implementations can be built from."""

    def __init__(self) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        os.environ["KIMI_K3_PEER_DECODE_MAX_TOKENS"] = str(PEER_TOKENS)
        os.environ.setdefault("KIMI_K3_PEER_DECODE_TIMEOUT_S", "60")
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
        from vllm.distributed import get_dcp_group, init_distributed_environment, initialize_model_parallel

        parallel = ParallelConfig(tensor_parallel_size=self.size, decode_context_parallel_size=self.size)
        self.config = VllmConfig(parallel_config=parallel)
        with set_current_vllm_config(self.config):
            init_distributed_environment(self.size, self.rank, "env://", self.device.index, "nccl")
            initialize_model_parallel(self.size, decode_context_model_parallel_size=self.size)
        self.host_group = get_dcp_group().cpu_group
        self.layer = SimpleNamespace(_k_scale=torch.ones((), device=self.device))


class Attention:
    """One backend: its implementation, and its builder as far as decode goes."""

    def __init__(self, world: World, name: str) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.attention.mla_attention import MLADims

        from kimi_k3_serve.attention.backends import BACKENDS

        module, _, backend_name = BACKENDS[name].rpartition(".")
        backend = getattr(importlib.import_module(module), backend_name)
        self.world = world
        heads = HEADS // world.size
        # All that an implementation reads of a model.
        object.__setattr__(world.config, "model_config", SimpleNamespace(dtype=torch.bfloat16))
        try:
            with set_current_vllm_config(world.config):
                self.impl = backend.get_impl_cls()(
                    heads, LATENT + ROPE, SCALE, 1, None, None, "auto", None, "decoder", None,
                    q_lora_rank=1536, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
                    qk_head_dim=NOPE + ROPE, v_head_dim=VALUE, kv_b_proj=None,
                )  # fmt: skip
        finally:
            object.__setattr__(world.config, "model_config", None)
        assert self.impl.collectives.exchange is not None, self.impl.collectives.way
        self.watched = self.impl.collectives = Watched(self.impl.collectives)
        self.builders = {}
        for captured in (False, True):
            # A builder's constructor wants a model's layers; these are all that `_build_decode` reads.
            builder = backend.get_builder_cls().__new__(backend.get_builder_cls())
            splits = world.config.attention_config.flash_attn_max_num_splits_for_cuda_graph
            facts = {
                "device": world.device,
                "dcp_world_size": world.size,
                "num_heads": heads,
                "num_q_heads": heads,
                "mla_dims": MLADims(1536, LATENT, NOPE, ROPE, VALUE),
                "kv_cache_spec": SimpleNamespace(dtype=torch.bfloat16),
                "page_size": BLOCK,
                "is_fp8_kvcache": False,
                "fa_aot_schedule": True,
                "use_full_cuda_graph": captured,
                "max_cudagraph_size": max(BATCHES),
                "max_num_splits": splits if captured else 0,
                "scheduler_metadata": torch.zeros(
                    1 + 4 * max(BATCHES), dtype=torch.int32, device=world.device
                ),
            }
            for key, value in facts.items():
                setattr(builder, key, value)
            self.builders[captured] = builder

    def metadata(self, buffers: Buffers, *, captured: bool, longest: int | None = None) -> Any:
        """As vLLM's builder makes it of a batch of decodes."""
        from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

        longest, batch = longest or buffers.longest, buffers.batch
        decode = self.builders[captured]._build_decode(
            block_table_tensor=buffers.table,
            seq_lens_device=buffers.lens,
            max_seq_len=longest,
            query_start_loc_cpu=buffers.starts_cpu,
            query_start_loc_device=buffers.starts,
            num_decode_tokens=batch,
            max_query_len=1,
            dcp_tot_seq_lens_device=buffers.totals,
        )
        return MLACommonMetadata(
            num_reqs=batch,
            max_query_len=1,
            max_seq_len=longest,
            num_actual_tokens=batch,
            query_start_loc=buffers.starts,
            slot_mapping=torch.zeros(batch, dtype=torch.int64, device=self.world.device),
            num_decodes=batch,
            num_decode_tokens=batch,
            num_prefills=0,
            decode=decode,
        )

    def step(self, buffers: Buffers, metadata: Any) -> torch.Tensor:
        query = buffers.query[..., :LATENT], buffers.query[..., LATENT:]
        output: torch.Tensor = self.impl.forward_mqa(query, buffers.cache, metadata, self.world.layer)[0]
        return output

    def eager(self, buffers: Buffers, pool: list[Inputs], *, drop: bool = False) -> float:
        """The largest error of eager steps; each finds NaN in the memory that the one before has freed."""
        errors = []
        for inputs in pool:
            buffers.load(inputs, drop=drop)
            metadata = self.metadata(buffers, captured=False)
            self.step(buffers, metadata)
            self.watched.poison()
            self.watched.kept = []
            metadata = self.metadata(buffers, captured=False)
            errors.append(error_of(self.step(buffers, metadata), inputs))
        return max(errors)

    def captured(self, buffers: Buffers, pool: list[Inputs]) -> float:
        """The largest error of a graph's replays, captured for the longest context as vLLM does."""
        bound = local_length(LONGEST, 0, self.world.size)
        buffers.load(pool[0])
        self.step(buffers, self.metadata(buffers, captured=True, longest=bound))
        metadata = self.metadata(buffers, captured=True, longest=bound)  # FlashMLA plans at its first step
        gc.collect()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog queries events
            output = self.step(buffers, metadata)
        errors, chance = [], random.Random(self.world.rank)
        for which in (1, 0, 2, 2, 1):
            buffers.load(pool[which])
            self.metadata(
                buffers, captured=True
            )  # renews the schedule that the graph reads, where it reads one
            self.watched.poison()
            torch.cuda._sleep(chance.randrange(1000, 1_000_000))  # type: ignore[no-untyped-call]
            graph.replay()
            errors.append(error_of(output, pool[which]))
        self.watched.kept = []
        return max(errors)


def wrong_base(attention: Attention, buffers: Buffers, pool: list[Inputs]) -> float:
    """The control: natural LSEs read as logarithms of base 2."""
    stated = attention.impl.lse_base_on_e
    attention.impl.lse_base_on_e = not stated
    try:
        return attention.eager(buffers, pool)
    finally:
        attention.impl.lse_base_on_e = stated


def checks_of(
    world: World, batch: int, attentions: dict[str, Attention], buffers: Buffers, pool: list[Inputs]
) -> list[tuple[dict[str, Any], Callable[[], float]]]:
    """What to run of a batch: facts of a row, and what gives its error."""
    found: list[tuple[dict[str, Any], Callable[[], float]]] = []
    last = world.rank == world.size - 1
    for name, attention in attentions.items():
        over = "NCCL" if attention.watched.collectives.exchange_of(batch) is None else "peers"
        ways: list[tuple[str, bool, Callable[[], float]]] = [
            ("", False, partial(attention.eager, buffers, pool)),
            ("", True, partial(attention.captured, buffers, pool)),
        ]
        if batch == CONTROL_BATCH:
            dropped = partial(attention.eager, buffers, pool, drop=last)
            ways.append(("LSEs read in the wrong base", False, partial(wrong_base, attention, buffers, pool)))
            ways.append(("the last rank's shard dropped", False, dropped))
        for control, captured, check in ways:
            facts = {"kernel": name, "batch": batch, "over": over, "captured": captured, "control": control}
            found.append((facts, check))
    return found


def judge(world: World, facts: dict[str, Any], check: Callable[[], float]) -> dict[str, Any]:
    """Run one check on all ranks; the row of the worst. A control is right where it is wrong on some rank."""
    begun = time.monotonic()
    error, reason = float("inf"), ""
    try:
        error = check()
    except Exception as failure:  # whatever one kernel raises, the others are still to be checked
        reason = f"rank {world.rank}: {type(failure).__name__}: {str(failure).strip()[:300]}"
    results: list[Any] = [None] * world.size
    dist.all_gather_object(results, (error, reason), group=world.host_group)
    errors, reasons = [one for one, _ in results], [said for _, said in results if said]
    worst = max(errors)
    ok = not reasons and (worst > TOLERANCE if facts["control"] else worst <= TOLERANCE)
    seconds = round(time.monotonic() - begun, 2)
    finite = worst if worst < float("inf") else None  # JSON has no infinity
    row = {**facts, "largest_error": finite, "tolerance": TOLERANCE, "ok": ok, "seconds": seconds}
    return {**row, "reason": "; ".join(reasons)} if reasons else row


def say(row: dict[str, Any]) -> None:
    way = ("in a graph" if row["captured"] else "eager") + f", over {row['over']}"
    control = f", control: {row['control']}" if row["control"] else ""
    error = "not a number" if row["largest_error"] is None else f"{row['largest_error']:.2e}"
    wanted = "more than" if row["control"] else "at most"
    text = row.get("reason") or f"largest error {error}, {wanted} {row['tolerance']:.2e}"
    print(
        f"{'ok' if row['ok'] else 'FAILED':<6} {row['kernel']}, batch {row['batch']}, {way}{control}: {text}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--batches", type=int, nargs="+", choices=BATCHES, default=BATCHES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begun, world, rows = time.monotonic(), World(), []
    device_name = torch.cuda.get_device_name()

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        if world.rank == 0:
            say(row)

    plain = {"over": "peers", "captured": False, "control": ""}

    def keep(passed: bool) -> None:
        """After each batch: a rank that is lost in a later one ends the others, too."""
        if world.rank or not args.json:
            return
        import vllm

        facts = {
            "world_size": world.size,
            "device": device_name,
            "torch": torch.__version__,
            "vllm": vllm.__version__,
            "seconds": round(time.monotonic() - begun, 1),
            "passed": passed,
            "rows": rows,
        }
        args.json.write_text(json.dumps(facts, indent=1) + "\n")

    attentions: dict[str, Attention] = {}
    for name in args.kernels:

        def build(name: str = name) -> float:
            attentions[name] = Attention(world, name)
            return 0.0

        faulthandler.dump_traceback_later(CHECK_LIMIT_S, exit=True)
        row = judge(world, plain | {"kernel": name, "batch": 0}, build)
        if not row["ok"]:
            attentions.pop(name, None)
            note(row)
    for batch in args.batches:
        faulthandler.dump_traceback_later(CHECK_LIMIT_S, exit=True)
        pool: list[Inputs] = []

        def draw(batch: int = batch, pool: list[Inputs] = pool) -> float:
            for seed in range(SETS):
                pool.append(Inputs.make(batch, seed, world.rank, world.size, world.device))
            torch.cuda.synchronize()
            return 0.0

        row = judge(world, plain | {"kernel": "inputs", "batch": batch}, draw)
        if not row["ok"]:  # a CUDA context is lost: nothing can be checked any more
            note(row)
            break
        buffers = Buffers(pool, world.rank, world.size)
        for facts, check in checks_of(world, batch, attentions, buffers, pool):
            faulthandler.dump_traceback_later(CHECK_LIMIT_S, exit=True)
            note(judge(world, facts, check))
        del pool, buffers
        gc.collect()
        torch.cuda.empty_cache()
        keep(passed=False)
    passed = bool(rows) and all(row["ok"] for row in rows)
    keep(passed)
    if world.rank == 0:
        print(
            f"{len(rows)} checks, {sum(not row['ok'] for row in rows)} failed, {time.monotonic() - begun:.1f} s",
            flush=True,
        )
    sys.stdout.flush()
    dist.barrier(world.host_group)
    os._exit(0 if passed else 1)  # no clean-up: a failed kernel may have cost a rank its CUDA context


if __name__ == "__main__":
    main()
