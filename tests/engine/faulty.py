# SPDX-License-Identifier: Apache-2.0
"""A CPU worker that breaks context parallelism on request: the parity gate's negative controls.

`--worker-cls faulty.FaultyCPUWorker`. Before each step it reads one word from $KIMI_K3_TEST_FAULT_FILE:

    none            nothing is wrong
    dropped_shard   rank 1's partial result is left out of the merge
    swapped_heads   the two ranks get each other's heads back
    mixed_bases     rank 1 states its LSE in base 2, rank 0 in base e
    decode_block    decode reads another block in place of one in mid-prompt, on rank 0
    context_block   the same, where prefill gathers context rows
"""

import math
import os
from pathlib import Path
from typing import Any

import torch

from kimi_k3_serve.attention import cpu_mla
from kimi_k3_serve.publish.publisher import Publisher
from kimi_k3_serve.worker import ProvenCPUWorker

FAULT_FILE = "KIMI_K3_TEST_FAULT_FILE"
REPLACED_BLOCK = 5


class FaultyCPUWorker(ProvenCPUWorker):
    fault = "none"

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        worker, impl = self, cpu_mla.CPUDCPMLAImpl
        exchange, attend, publish = impl.exchange_partials, cpu_mla.attend_paged, Publisher.gather

        def exchange_partials(self: Any, output: torch.Tensor, lse: torch.Tensor) -> Any:
            if worker.fault == "dropped_shard" and worker.rank == 1:
                lse = torch.full_like(lse, -math.inf)
            if worker.fault == "mixed_bases" and worker.rank == 1:
                lse = lse * math.log2(math.e)
            if worker.fault == "swapped_heads":
                half = output.shape[1] // 2
                output, lse = output.roll(half, 1), lse.roll(half, 1)
            return exchange(self, output, lse)

        def attend_paged(query: Any, cache: Any, block_table: Any, *args: Any, **kwargs: Any) -> Any:
            if worker.fault == "decode_block" and worker.rank == 0:
                block_table = replace_block(block_table)
            return attend(query, cache, block_table, *args, **kwargs)

        def gather(self: Any, cache: Any, block_table: Any, *args: Any, **kwargs: Any) -> Any:
            if worker.fault == "context_block" and worker.rank == 0:
                block_table = replace_block(block_table)
            return publish(self, cache, block_table, *args, **kwargs)

        impl.exchange_partials = exchange_partials
        cpu_mla.attend_paged = attend_paged
        Publisher.gather = gather
        return times

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self.fault = Path(os.environ[FAULT_FILE]).read_text().strip()
        return super().execute_model(*args, **kwargs)


def replace_block(block_table: torch.Tensor) -> torch.Tensor:
    """Each request's block in mid-prompt becomes its first one."""
    changed = block_table.clone()
    changed[:, REPLACED_BLOCK] = changed[:, 0]
    return changed
