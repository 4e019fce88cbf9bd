# SPDX-License-Identifier: Apache-2.0
"""One process a GPU: this rank of W, its publisher and stock's path. For the checks of publish_two_gpus.py."""

import os
from typing import Any

import torch
import torch.distributed as dist
from publish_stock import Inputs, Stock
from publish_world import LATENT, ROPE

from kimi_k3_serve.publish.layout import Layout
from kimi_k3_serve.publish.publisher import PrefillKV, Publisher
from kimi_k3_serve.symmetric import connect

CAPACITY = 65536
DELAY = 2_000_000
"""Clock cycles: about a millisecond, many times a publication."""
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


class World:
    """This rank among W, and what it needs for its checks."""

    def __init__(self) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # the last check costs a rank its CUDA context
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.host_group = dist.new_group(backend="gloo")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stock = Stock(dist.group.WORLD)
        self.one = torch.ones(1, device=self.device)
        self.kept: Any = None

    def publisher(
        self, dtype: torch.dtype, model_dtype: torch.dtype = BF16, timeout_s: float = 60, ubatches: int = 1
    ) -> Publisher:
        layout = Layout(self.size, CAPACITY, LATENT * dtype.itemsize, ROPE * dtype.itemsize, ubatches)
        region = connect(
            layout.nbytes, dist.group.WORLD, self.device, ("peer",), host_group=self.host_group
        ).get()
        return Publisher(
            region,
            layout,
            dtype,
            transport="peer",
            implementation="triton",
            timeout_s=timeout_s,
            model_dtype=model_dtype,
        )

    def inputs(self, contexts: list[int], dtype: torch.dtype, **changes: Any) -> Inputs:
        return Inputs(contexts, dtype, self.rank, self.size, **changes)

    def output_collective(self) -> None:
        """What ends a layer."""
        dist.all_reduce(self.one)


def gather(source: PrefillKV, inputs: Inputs, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale = inputs.scale if inputs.quantised else None
    return source.gather(inputs.cache, inputs.table, inputs.chunk, slot=slot, scale=scale)


def differing(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Rows that are not equal bit for bit; on the device."""
    return sum(  # type: ignore[return-value]
        (a.view(torch.uint8) != b.view(torch.uint8)).any(dim=1).sum()
        for a, b in zip(found, wanted, strict=True)
    )
