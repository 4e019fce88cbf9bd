# SPDX-License-Identifier: Apache-2.0
"""One row of a merged projection over b12x's DCP copy collective (package b12x 1.5.1, SM120 and SM121).

The collective moves "heads" of a multiple of 8 half-precision elements: each rank's row is one head, padded up to that
quantum, and the padding of every rank is stripped afterwards. Pools are built and plans prepared by all ranks together,
as `attention/b12x_collectives.py` explains.

NOT RUN: needs SM120/SM121 and two GPUs. The padding, the order and the calls are tested on a stand-in.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kimi_k3_serve.projection.shard import padded, restore

QUANTUM = 8  # half-precision elements
WORLD_SIZES = (2, 4, 8, 16)


def objection(device: torch.device, world_size: int) -> str | None:
    """Why b12x cannot gather here; None where it can."""
    if device.type != "cuda":
        return f"b12x gathers between GPUs, not {device.type}"
    if torch.cuda.get_device_capability(device)[0] != 12:
        major, minor = torch.cuda.get_device_capability(device)
        return f"b12x runs on SM120 and SM121, this GPU is SM{major}{minor}"
    if importlib.util.find_spec("b12x") is None:
        return "b12x is not installed; install b12x==1.5.1"
    if world_size not in WORLD_SIZES:
        return f"b12x gathers between {WORLD_SIZES} ranks, not {world_size}"
    return None


class B12xRow:
    """Takes exactly one row of BF16 or FP16."""

    rows = 1

    def __init__(self, group: Any, local: Sequence[int], device: torch.device) -> None:
        """Collective.

        Args:
            group: vLLM's coordinator; its `cpu_group` exchanges addresses.
            local: columns of each part on one rank.
        """
        pcie = importlib.import_module("b12x.comm.pcie")
        self.world_size, self.local, self.device = group.world_size, tuple(local), device
        self.width = padded(sum(local), QUANTUM)
        self.pool = pcie.DcpAllToAllPool.from_exchange_group(
            exchange_group=group.cpu_group,
            device=device,
            max_batch_size=1,
            total_heads=group.world_size,
            head_dim=self.width,
            query_head_dim=self.width,
            single_channel=True,
        )
        self.plans: dict[torch.dtype, Any] = {}

    def warm_up(self) -> None:
        """Prepare both dtypes' plans: a graph's capture must not have to. Collective."""
        for dtype in (torch.bfloat16, torch.float16):
            self.merged(torch.zeros(1, sum(self.local), dtype=dtype, device=self.device))

    def takes(self, local: torch.Tensor) -> bool:
        return local.shape[0] == 1 and local.device == self.device

    def merged(self, local: torch.Tensor) -> torch.Tensor:
        """[1, local columns] -> [1, W times as many], in the logical order."""
        row = local.new_zeros(1, 1, self.width)
        row[0, :, : local.shape[1]] = local
        out = local.new_empty(1, self.world_size, self.width)
        with self.capturing():
            gathered = self.pool.all_gather_heads(row, out, plan=self.plan(row, out))
        return restore(gathered.transpose(0, 1), self.local)

    def capturing(self) -> AbstractContextManager[Any]:
        """The pool's capture scope, where this stream is being captured into a graph.

        A pool of a single channel needs no channel id, and lets the scope begin while the stream is captured.
        """
        if torch.cuda.is_current_stream_capturing():
            scope: AbstractContextManager[Any] = self.pool.capture()
            return scope
        return nullcontext()

    def plan(self, row: torch.Tensor, out: torch.Tensor) -> Any:
        """The prepared plan of this dtype; made by `warm_up`, on all ranks together."""
        if row.dtype not in self.plans:
            pcie = importlib.import_module("b12x.comm.pcie")
            call = {"local_input": row, "out": out}
            channel = self.pool.for_stream()
            query = pcie.query_from_runtime(channel, surface="DcpAllToAll.all_gather_heads", call=call)
            plan = pcie.plan(query, runtime=channel)
            self.prepare(plan, lambda state: state.run(**call), out)
            self.plans[row.dtype] = plan
        return self.plans[row.dtype]

    def prepare(self, plan: Any, run: Callable[[Any], Any], out: torch.Tensor) -> None:
        from kimi_k3_serve.attention.b12x_collectives import prepare

        prepare(plan, "kimi_k3.projection_row", run, out)
