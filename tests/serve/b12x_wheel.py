# SPDX-License-Identifier: Apache-2.0
"""b12x 1.5.1's own Python over CPU tensors: plans, scratch, bindings and signatures are the wheel's.

Stood in for is what needs a GPU: compiled launchers, in whose place its reference attends, and its channel.
"""

import importlib
import importlib.abc
import importlib.machinery
import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

COMPILERS = ("cuda", "cutlass")  # what the wheel imports and this environment lacks


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in COMPILERS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module: Any) -> None: ...


class Wheel:
    """Its modules, while `loadable()`; what was prepared and run."""

    def __init__(self, monkeypatch: Any) -> None:
        self.dense_mla = importlib.import_module("b12x.attention.dense_mla.api")
        self.pcie = importlib.import_module("b12x.comm.pcie.api")
        self.preparation = importlib.import_module("b12x.preparation")
        self.capturing = False
        self.requests: list[Any] = []
        self.bindings: list[Any] = []
        self.states: dict[int, Any] = {}
        state = importlib.import_module("b12x.attention.dense_mla._preparation")._DenseMlaState
        monkeypatch.setattr(self.preparation, "prepare_default", self.prepare)
        monkeypatch.setattr(self.dense_mla, "_state", lambda plan, device: self.states[id(plan)])
        monkeypatch.setattr(state, "prime", lambda state, binding: self.prime(state, binding))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def prepare(self, request: Any) -> None:
        assert not self.capturing, "prepared inside a capture"
        assert isinstance(request, self.preparation.PreparationRequest)
        plan = request.plan
        if plan.component_id == "attention.mla":
            config = plan.contract.default_config(plan.query, None)
            self.states[id(plan)] = plan._materialize(SimpleNamespace(config=config), None)
        else:
            self.states[id(plan)] = SimpleNamespace(run=lambda **call: call["out"])
        self.requests.append(request)
        call = request.prepare_call(self.states[id(plan)])
        assert isinstance(call, self.preparation.PreparedCall)
        call.invoke()

    def prime(self, state: Any, binding: Any) -> None:
        launchers = {"dense": SimpleNamespace(run=self.attend), "quantizer": None}
        object.__setattr__(state, "launchers", launchers)

    def attend(self, binding: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As the kernel: an empty shard's output stays unwritten, its LSE is -inf."""
        self.bindings.append(binding)
        lse = binding.scratch.final_lse[: len(binding.q)]
        binding.output.fill_(math.nan)
        lse.fill_(-math.inf)
        for i in binding.cache_seqlens.nonzero().flatten().tolist():
            row = slice(i, i + 1)
            binding.output[row], lse[row] = self.dense_mla.reference(
                binding.q[row],
                binding.kv_cache,
                binding.page_table[row],
                binding.cache_seqlens[row],
                torch.tensor([0, 1], dtype=torch.int32),
                kv_scale=binding.kv_scale,
                q_scale=binding.q_scale,
                sm_scale=binding.sm_scale,
            )
        return binding.output, lse


class Pool:
    """Its pool on one rank of several, whose queries and partials are all known here."""

    def __init__(self, wheel: Wheel, rank: int, **arguments: Any) -> None:
        self.wheel, self.rank, self.captures = wheel, rank, 0
        self.real = wheel.pcie.DcpAllToAllPool
        inspect.signature(self.real.from_exchange_group).bind(**arguments)
        assert arguments["single_channel"]  # or a capture has to name its channel
        self.queries, self.partials, self.lses = (torch.empty(0) for _ in range(3))
        total = arguments["total_heads"]
        self.channel = SimpleNamespace(
            **{name: arguments[name] for name in ("device", "max_batch_size", "head_dim", "query_head_dim")},
            **{"total_heads": total, "world_size": 2, "rank": rank, "_slot_bytes": 0, "_signal_ptrs": ()},
            _resolve_launch_config=lambda threads, block_limit: (threads, block_limit),
        )
        self.in_scope = False

    def for_stream(self) -> Any:
        return self.channel

    @contextmanager
    def capture(self) -> Iterator[Any]:
        self.captures += 1
        self.in_scope = True
        yield self.channel
        self.in_scope = False

    def called(self, name: str, *arguments: Any, plan: Any, **more: Any) -> None:
        inspect.signature(getattr(self.real, name)).bind(None, *arguments, plan=plan, **more)
        assert id(plan) in self.wheel.states and plan.query.surface == f"DcpAllToAll.{name}"
        assert self.in_scope == self.wheel.capturing

    def all_gather_heads(self, local: torch.Tensor, out: torch.Tensor, *, plan: Any) -> torch.Tensor:
        self.called("all_gather_heads", local, out, plan=plan)
        heads = local.shape[1]
        queries = self.queries[: len(local)]
        assert local.is_contiguous() and torch.equal(local, queries[:, self.rank * heads :][:, :heads])
        return out.copy_(queries)

    def lse_reduce_scatter(
        self,
        partial: torch.Tensor,
        lse: torch.Tensor,
        out: torch.Tensor,
        *,
        plan: Any,
        is_lse_base_on_e: bool,
    ) -> torch.Tensor:
        self.called("lse_reduce_scatter", partial, lse, out, plan=plan, is_lse_base_on_e=is_lse_base_on_e)
        assert partial.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
        partials, lses = self.partials[:, : len(partial)].clone(), self.lses[:, : len(lse)].clone()
        partials[self.rank], lses[self.rank] = partial, lse
        merged = self.wheel.pcie.lse_reduce_scatter_reference(
            partials, lses, self.rank, is_lse_base_on_e=is_lse_base_on_e
        )
        return out.copy_(merged)


@contextmanager
def loadable() -> Iterator[None]:
    """The wheel, which must be on `sys.path`, can be imported; afterwards nothing of it is."""
    finder = StandIns()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in (*COMPILERS, "b12x")]:
            del sys.modules[name]
