# SPDX-License-Identifier: Apache-2.0
"""Host time of the context map, once a batch, beside what vLLM's `reorg_kvcache` spends in every layer.

python benchmarks/context_map.py [--json FILE]    # needs vLLM; no GPU. Microseconds, medians of 50.

At W = 2 and 8; the map also with the runs of other ranks' rows (tiles), which e4m3 rows to be scaled need.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import reorg_kvcache

from kimi_k3_serve.context_map import build_context_map
from kimi_k3_serve.publish.chunks import upload

WORLD_SIZES = (2, 8)
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
    rows = [measure(world_size, *named) for world_size in WORLD_SIZES for named in CHUNKS.items()]
    if args.json:
        facts = {"load_average": os.getloadavg()[0], "rows": rows}
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


def measure(world_size: int, name: str, sizes: tuple[int, int]) -> dict[str, Any]:
    """One chunk of `sizes`: requests, and tokens of each."""
    requests, context = sizes
    padded = [context // world_size] * requests
    lens, starts = [[context // world_size] * world_size] * requests, [0] * requests
    # On the meta device every slice and concatenation is made and no row is moved: what is left is host time.
    gathered = torch.empty(world_size * sum(padded), 1, 576, device="meta", dtype=torch.bfloat16)
    kv_c, k_pe = gathered.split([512, 64], dim=-1)
    chunk, rows_in_all = (padded, lens, starts), requests * context
    build = partial(build_context_map, *chunk, rank=0, world_size=world_size)
    send = partial(upload, [chunk], rank=0, world_size=world_size, device=torch.device("cpu"))
    stock = partial(reorg_kvcache, kv_c, k_pe, *chunk, rows_in_all, context, sum(padded))
    row = {
        "world_size": world_size,
        "chunk": name,
        "map_us": median_us(build),
        "map_and_buffer_us": median_us(send),
        "map_tiles_and_buffer_us": median_us(partial(send, tiles=True)),
        "stock_each_layer_us": median_us(stock),
    }
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


if __name__ == "__main__":
    main()
