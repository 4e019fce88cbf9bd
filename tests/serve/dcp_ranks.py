# SPDX-License-Identifier: Apache-2.0
"""W real ranks over gloo: each decodes through the owner and compares its heads with the whole context in float64.

Run as a script: `dcp_ranks.py WORLD_SIZE:INTERLEAVE ...`. Prints each case on which every rank agreed.
"""

import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.multiprocessing as mp
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

from kimi_k3_serve.attention.cpu_mla import CPUDCPMLAImpl
from kimi_k3_serve.slot_mapping import slot_mapping

LATENT, ROPE, HEADS, BLOCK, SCALE = 512, 64, 2, 16, 192**-0.5
# Shorter than W ranks (empty shards), block-sized, ragged and long.
LENGTHS = (1, 3, 16, 129, 700)


def rank_main(rank: int, world_size: int, interleave: int, store: str) -> None:
    os.environ["VLLM_DIST_IDENT"] = Path(
        store
    ).parent.name  # names the shared-memory segment that the ranks of one run share
    parallel = ParallelConfig(tensor_parallel_size=world_size, decode_context_parallel_size=world_size)
    with set_current_vllm_config(VllmConfig(parallel_config=parallel)):
        init_distributed_environment(world_size, rank, f"file://{store}", rank, "gloo")
        initialize_model_parallel(world_size, decode_context_model_parallel_size=world_size)
        names = ("kv_b_proj", "q_lora_rank", "qk_nope_head_dim", "qk_head_dim", "v_head_dim")
        dims = dict.fromkeys(names) | {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
        impl = CPUDCPMLAImpl(
            HEADS, LATENT + ROPE, SCALE, 1, None, None, "auto", None, "decoder", None, **dims
        )
        assert impl.dcp_world_size == world_size

        generator = torch.Generator().manual_seed(0)
        rows = [torch.randn(length, LATENT + ROPE, generator=generator) for length in LENGTHS]
        queries = torch.randn(len(LENGTHS), world_size * HEADS, LATENT + ROPE, generator=generator)

        width = -(-max(LENGTHS) // (BLOCK * world_size))
        table = torch.randperm(width * len(LENGTHS), generator=generator).view(len(LENGTHS), width).int()
        cache = torch.full((width * len(LENGTHS), BLOCK, LATENT + ROPE), torch.nan)
        starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        slots = slot_mapping(
            starts,
            positions,
            table,
            block_size=BLOCK,
            world_size=world_size,
            rank=rank,
            interleave=interleave,
        )
        mine = slots >= 0
        cache.view(-1, LATENT + ROPE)[slots[mine]] = torch.cat(rows)[mine]
        bounds = starts.tolist()
        local_lens = torch.stack([mine[a:b].sum() for a, b in pairwise(bounds)])

        metadata = SimpleNamespace(decode=SimpleNamespace(block_table=table, seq_lens=local_lens))
        own = slice(rank * HEADS, (rank + 1) * HEADS)
        local = queries[:, own].split([LATENT, ROPE], dim=-1)
        output, lse = impl.forward_mqa(local, cache, metadata, None)
        assert lse is None
        for i, context in enumerate(rows):
            scores = SCALE * queries[i, own].double() @ context.double().T
            expected = torch.softmax(scores, -1) @ context[:, :LATENT].double()
            torch.testing.assert_close(output[i].double(), expected, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    for case in sys.argv[1:]:
        world_size, interleave = map(int, case.split(":"))
        with tempfile.TemporaryDirectory() as folder:
            arguments = (world_size, interleave, f"{folder}/store")
            # Forked: importing vLLM takes seconds, and nothing here has started a thread of it yet.
            mp.start_processes(rank_main, arguments, world_size, start_method="fork")
            for segment in Path("/dev/shm").glob(f"*{Path(folder).name}*"):  # vLLM leaves them behind
                segment.unlink()
        print(case, flush=True)
