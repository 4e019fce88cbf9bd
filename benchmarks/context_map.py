# SPDX-License-Identifier: Apache-2.0
"""Host time of the context map, once a batch, beside what vLLM's `reorg_kvcache` spends in every layer.

python benchmarks/context_map.py [--json FILE]    # needs vLLM; no GPU. Microseconds, medians of 50.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from vllm.model_executor.layers.attention.mla_attention import reorg_kvcache

from kimi_k3_serve.context_map import build_context_map
from kimi_k3_serve.publish.chunks import upload

WORLD_SIZE = 2
CHUNKS = {"1 x 65536": (1, 65536), "16 x 4096": (16, 4096), "64 x 1000": (64, 1000)}


def median_us(work: Callable[[], object]) -> float:
    times = []
    for _ in range(53):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return round(statistics.median(times[3:]) * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name, (requests, context) in CHUNKS.items():
        padded = [context // WORLD_SIZE] * requests
        lens, starts = [[context // WORLD_SIZE] * WORLD_SIZE] * requests, [0] * requests
        # On the meta device every slice and concatenation is made and no row is moved: what is left is host time.
        gathered = torch.empty(WORLD_SIZE * sum(padded), 1, 576, device="meta", dtype=torch.bfloat16)
        kv_c, k_pe = gathered.split([512, 64], dim=-1)
        chunk, rows_in_all = (padded, lens, starts), requests * context
        build = partial(build_context_map, *chunk, rank=0, world_size=WORLD_SIZE)
        send = partial(upload, [chunk], rank=0, world_size=WORLD_SIZE, device=torch.device("cpu"))
        stock = partial(reorg_kvcache, kv_c, k_pe, *chunk, rows_in_all, context, sum(padded))
        rows.append(
            {
                "chunk": name,
                "map_us": median_us(build),
                "map_and_buffer_us": median_us(send),
                "stock_each_layer_us": median_us(stock),
            }
        )
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"world_size": WORLD_SIZE, "load_average": os.getloadavg()[0], "rows": rows}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
