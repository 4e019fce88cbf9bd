# SPDX-License-Identifier: Apache-2.0
"""Inside vLLM's workers: records one decode step of each MLA layer; and holds its steps against float64.

`worker_extension_cls="decode_probe.DecodeProbe"`, then `collective_rpc("start_probe")`, a request, and
`collective_rpc("end_probe", args=(PREFIX,))`, which writes PREFIX-rank<r>.pt. Only for eager engines: a CUDA graph
replays without Python.
"""

import inspect
import math
import os
from pathlib import Path
from typing import Any

import torch

RECORDED_STEP = 2  # counted from 1: the second decode of the request, whose first one wrote a row of its own


def uncure() -> None:
    """Put upstream's own text back where the plugin has cured it, to see what it does."""
    from kimi_k3_serve.attention import cures
    from kimi_k3_serve.source_lock import resolve

    for name in cures.EDITS:
        owner, attribute = resolve(name)
        found = inspect.getattr_static(owner, attribute)
        if hasattr(found, "edits"):
            setattr(owner, attribute, found.__wrapped__)


if os.environ.get("DECODE_PROBE_UNCURED") == "1":
    uncure()  # vLLM has loaded its plugins before a worker's extension


class DecodeProbe:
    """Mixed into vLLM's worker."""

    vllm_config: Any  # the worker's
    probed: dict[str, dict[str, Any]]

    def start_probe(self) -> None:
        self.probed = {}
        context = self.vllm_config.compilation_config.static_forward_context
        for name, layer in context.items():
            if hasattr(getattr(layer, "impl", None), "forward_mqa"):
                record(layer, self.probed.setdefault(name, {"count": 0}))

    def nccl_state(self) -> dict[str, Any]:
        from kimi_k3_serve import vllm_nccl

        return vllm_nccl.state()

    def end_probe(self, prefix: str) -> int:
        from vllm.distributed.parallel_state import get_dcp_group

        found = {
            name: {key: value for key, value in taken.items() if key != "count"}
            for name, taken in self.probed.items()
            if "combined" in taken
        }
        torch.save(found, f"{prefix}-rank{get_dcp_group().rank_in_group}.pt")
        return len(found)


def record(layer: Any, into: dict[str, Any]) -> None:
    """Wrap what one layer calls in a decode step; the wrappers stay and do nothing once the step is recorded."""
    impl, manager = layer.impl, getattr(layer, "dcp_manager", None)
    collectives = getattr(impl, "collectives", None)
    attend = impl.forward_mqa
    active = [False]

    def forward_mqa(q: Any, cache: Any, metadata: Any, owner: Any) -> Any:
        into["count"] += 1
        active[0] = into["count"] == RECORDED_STEP and metadata.num_decodes == 1
        if not active[0]:
            return attend(q, cache, metadata, owner)
        length = int(metadata.decode.seq_lens[0])
        size = cache.shape[-2]
        blocks = metadata.decode.block_table[0, : math.ceil(length / size)].long()
        into["rows"] = cache[blocks].reshape(-1, cache.shape[-1])[:length].cpu()
        into["scale"], into["base_e"] = float(impl.scale), bool(impl.lse_base_on_e)
        if manager is not None:
            into["gathered"] = (torch.cat(q, -1) if isinstance(q, tuple) else q).cpu().clone()
        result = attend(q, cache, metadata, owner)
        if manager is not None:
            keep(into, *result)
        return result

    impl.forward_mqa = forward_mqa
    if manager is not None:
        gather, combine = manager.query_gather, manager.combine

        def query_gather(query: torch.Tensor) -> Any:
            if into["count"] == RECORDED_STEP - 1:
                into["query"] = query.cpu().clone()
            return gather(query)

        def combining(*args: Any, **kwargs: Any) -> torch.Tensor:
            combined: torch.Tensor = combine(*args, **kwargs)
            if active[0]:
                into["combined"] = combined.cpu().clone()
                active[0] = False
            return combined

        manager.query_gather, manager.combine = query_gather, combining
    elif collectives is not None:
        # One object for all layers: each layer's wrapper records only while its own step is active.
        gather, merge = collectives.gather, collectives.merge

        def gathering(nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
            gathered: torch.Tensor = gather(nope, rope)
            if active[0]:
                into["query"] = torch.cat([nope, rope], -1).cpu().clone()
                into["gathered"] = gathered.cpu().clone()
            return gathered

        def merging(partial: torch.Tensor, lse: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            if active[0]:
                keep(into, partial, lse)
            merged: torch.Tensor = merge(partial, lse, **kwargs)
            if active[0]:
                into["combined"] = merged.cpu().clone()
                active[0] = False
            return merged

        collectives.gather, collectives.merge = gathering, merging


def keep(into: dict[str, Any], partial: torch.Tensor, lse: torch.Tensor) -> None:
    """What the kernel gave, before anything corrects it in place."""
    into["partial"], into["lse"] = partial.cpu().clone(), lse.float().cpu().clone()
    into["lse_dtype"] = str(lse.dtype).removeprefix("torch.")


def steps(prefix: Path, world_size: int) -> list[str]:
    """One line a layer and step: its largest error, relative to the largest value it should have."""
    ranks = [torch.load(f"{prefix}-rank{rank}.pt") for rank in range(world_size)]
    lines = []
    for name in ranks[0]:
        taken = [rank[name] for rank in ranks]
        whole = torch.cat([one["query"] for one in taken], 1)
        gathered = all(torch.equal(one["gathered"][:, : whole.shape[1]], whole) for one in taken)
        lines.append(f"{name}: query gather {'exact' if gathered else 'WRONG'}")
        lines += attention_steps(name, taken, whole)
    return lines


def attention_steps(name: str, taken: list[dict[str, Any]], queries: torch.Tensor) -> list[str]:
    """Partial outputs and LSEs of each rank, then the merge: of what the ranks gave, and of the truth."""
    lines, outputs, lses = [], [], []
    for rank, one in enumerate(taken):
        rows, query = one["rows"].double(), queries[0].double()
        scores = one["scale"] * query @ rows.T
        truth, natural = scores.softmax(-1) @ rows[:, :512], scores.logsumexp(-1)
        stated = natural if one["base_e"] else natural / math.log(2)
        partial, lse = one["partial"][0].double()[: len(truth)], one["lse"][0].double()[: len(truth)]
        lines.append(
            f"{name}: rank {rank}, {len(rows)} rows: partial output off by {relative(partial, truth):.1e}, LSE "
            f"({one['lse_dtype']}, {'base e' if one['base_e'] else 'base 2'}) by {(lse - stated).abs().max():.1e}"
        )
        outputs.append((partial, truth))
        lses.append((lse if one["base_e"] else lse * math.log(2), natural))
    share, heads = len(queries[0]) // len(taken), range(len(taken))
    for kind, choice in (("of what the ranks gave", 0), ("of the truth", 1)):
        weights = torch.stack([pair[choice] for pair in lses]).softmax(0).unsqueeze(-1)
        merged = (weights * torch.stack([pair[choice] for pair in outputs])).sum(0)
        errors = [
            relative(taken[rank]["combined"][0].double(), merged[rank * share : (rank + 1) * share])
            for rank in heads
        ]
        lines.append(f"{name}: merge off by {max(errors):.1e} from the float64 merge {kind}")
    return lines


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest error over the largest magnitude of the truth."""
    return ((found - truth).abs().max() / truth.abs().max()).item()
