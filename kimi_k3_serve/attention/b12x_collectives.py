# SPDX-License-Identifier: Apache-2.0
"""Query gather and LSE reduce-scatter over b12x's PCIe channel, for small decode batches; larger ones take NCCL.

A pool is stream-affine and is built by all ranks together. Every collective takes the `plan=` that was declared from
the live channel (`query_from_runtime` -> `plan`) and prepared once a shape, eagerly: `prepare_default` refuses to
compile inside a capture, and capturing is allowed only inside `pool.capture`. One channel serves eager steps and all
graphs: decode runs on one stream, and the channel picks its staging slot on the device once a graph was captured.

NOT RUN: needs SM120/SM121 and two GPUs.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from kimi_k3_serve.attention.peer import DecodeCollectives
from kimi_k3_serve.proof import mark_used

LATENT, ROPE = 512, 64


class B12xCollectives(DecodeCollectives):
    """Up to `max_tokens` tokens over the channel, more over NCCL: a choice that depends on the token count only."""

    def __init__(self, group: Any, heads: int, max_tokens: int) -> None:
        super().__init__(group, None, f"decode over b12x's channel, above {max_tokens} tokens over NCCL")
        pcie = importlib.import_module("b12x.comm.pcie")
        self.heads, self.max_tokens = heads, max_tokens
        self.pool = pcie.DcpAllToAllPool.from_exchange_group(
            exchange_group=group.cpu_group,
            device=torch.device("cuda", torch.cuda.current_device()),
            max_batch_size=max_tokens,
            total_heads=heads * group.world_size,
            head_dim=LATENT,
            query_head_dim=LATENT + ROPE,
            single_channel=True,
        )
        self.plans: dict[Any, Any] = {}

    def gather(self, nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        if nope.shape[0] > self.max_tokens:
            return super().gather(nope, rope)
        local = torch.cat([nope, rope], dim=-1)
        out = local.new_empty(local.shape[0], self.heads * self.group.world_size, LATENT + ROPE)
        with self.capturing():
            plan = self.plan("all_gather_heads", local, local_input=local, out=out)
            gathered: torch.Tensor = self.pool.all_gather_heads(local, out, plan=plan)
        mark_used("b12x_query_gather")
        return gathered

    def merge(
        self,
        partial: torch.Tensor,
        lse: torch.Tensor,
        *,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        base_e: bool,
    ) -> torch.Tensor:
        tokens = partial.shape[0]
        if tokens > self.max_tokens:
            return super().merge(
                partial, lse, seq_lens=seq_lens, query_start_loc=query_start_loc, base_e=base_e
            )
        # One token a request: a row past the last request, or of an empty shard, must not count.
        counted = torch.zeros(tokens, dtype=torch.bool, device=partial.device)
        counted[: seq_lens.shape[0]] = seq_lens[:tokens] > 0
        lse = torch.where(counted.unsqueeze(-1), lse.float(), -torch.inf).contiguous()
        partial = partial.contiguous()
        out = partial.new_empty(tokens, self.heads, LATENT)
        with self.capturing():
            plan = self.plan(
                "lse_reduce_scatter",
                partial,
                partial_output=partial,
                partial_lse=lse,
                out=out,
                is_lse_base_on_e=base_e,
            )
            merged: torch.Tensor = self.pool.lse_reduce_scatter(
                partial, lse, out, plan=plan, is_lse_base_on_e=base_e
            )
        mark_used("b12x_lse_reduce_scatter")
        return merged

    def capturing(self) -> AbstractContextManager[Any]:
        """The pool's capture scope, where this stream is being captured into a graph."""
        if torch.cuda.is_current_stream_capturing():
            scope: AbstractContextManager[Any] = self.pool.capture()
            return scope
        return nullcontext()

    def plan(self, name: str, sample: torch.Tensor, **call: Any) -> Any:
        """The prepared plan of one collective and shape. Every rank meets a shape at the same step."""
        key = (name, sample.dtype, tuple(sample.shape))
        if key not in self.plans:
            pcie = importlib.import_module("b12x.comm.pcie")
            channel = self.pool.for_stream()
            query = pcie.query_from_runtime(channel, surface=f"DcpAllToAll.{name}", call=call)
            plan = pcie.plan(query, runtime=channel)
            prepare(plan, f"kimi_k3.{name}", lambda state: state.run(**call), call["out"])
            self.plans[key] = plan
        return self.plans[key]


def prepare(plan: Any, name: str, run: Callable[[Any], Any], output: torch.Tensor) -> None:
    """Compile a declared collective and run it once, on every rank."""
    preparation = importlib.import_module("b12x.preparation")
    preparation.prepare_default(
        preparation.PreparationRequest(
            name=name,
            plan=plan,
            prepare_call=lambda state: preparation.PreparedCall(run=lambda: run(state), output=output),
        )
    )
