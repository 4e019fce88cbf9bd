# SPDX-License-Identifier: Apache-2.0
"""Fill vLLM's DeepSeek-V3 model at each tensor-parallel size; every rank saves its parameters.

`seeded_shards.py MODEL_FOLDER OUT_FOLDER WORLD_SIZE ...`.
"""

import os
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp
from vllm.config import LoadConfig, ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader import get_model_loader

from kimi_k3_serve import cpu, loader


def rank_main(rank: int, world_size: int, model: str, out: str) -> None:
    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=64),
        parallel_config=ParallelConfig(tensor_parallel_size=world_size),
        load_config=LoadConfig(load_format=loader.FORMAT),
    )
    with set_current_vllm_config(config):
        init_distributed_environment(world_size, rank, f"file://{out}/store-{world_size}", rank, "gloo")
        initialize_model_parallel(world_size)
        torch.set_default_dtype(torch.float32)
        model_loader = get_model_loader(config.load_config)
        filled = model_loader.create_model(vllm_config=config, model_config=config.model_config)
        model_loader.load_weights(filled, config.model_config)
        plain = {name: parameter.data.clone() for name, parameter in filled.named_parameters()}
        torch.save(plain, f"{out}/tp{world_size}-{rank}.pt")


if __name__ == "__main__":
    cpu.install()
    loader.install()
    loader.install()
    os.environ["VLLM_DIST_IDENT"] = f"seeded-{os.getpid()}"  # names the ranks' shared-memory segment
    model, out, *world_sizes = sys.argv[1:]
    for world_size in map(int, world_sizes):
        mp.start_processes(rank_main, (world_size, model, out), world_size, start_method="fork")
    for segment in Path("/dev/shm").glob(f"seeded-{os.getpid()}-*"):  # which vLLM leaves behind
        segment.unlink()
