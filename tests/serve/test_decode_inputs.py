# SPDX-License-Identifier: Apache-2.0
"""What tests/gpu/decode_two_gpus.py holds kernels against: its inputs and references, without a GPU."""

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_k3_serve.attention.merge import merge_partials

CPU = torch.device("cpu")
LONGEST = 600


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "gpu")
    inputs = importlib.import_module("decode_inputs")
    monkeypatch.setattr(inputs, "LONGEST", LONGEST)
    return importlib.import_module("decode_two_gpus")


def partial_of(checks: Any, buffers: Any, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All heads over the rows of a rank's paged cache, rounded as a kernel does: outputs and natural LSEs."""
    outputs = torch.full((*query.shape[:2], checks.LATENT), math.nan, dtype=torch.bfloat16)
    lses = torch.full(query.shape[:2], -math.inf)
    for i, length in enumerate(buffers.lens.tolist()):
        if length:
            rows = buffers.cache[buffers.table[i].long()].flatten(0, 1)[:length].double()
            scores = checks.SCALE * query[i].double() @ rows.T
            lses[i] = torch.logsumexp(scores, -1)
            outputs[i] = torch.softmax(scores, -1) @ rows[:, : checks.LATENT]
    return outputs, lses


@pytest.mark.parametrize("world", [2, 4])
def test_shards_merge_to_the_reference_and_faults_show(checks: Any, world: int) -> None:
    batch = checks.CONTROL_BATCH
    errors: dict[str, float] = {"right": 0.0, "base": 0.0, "dropped": 0.0}
    for seed in range(checks.SETS):
        pool = [checks.Inputs.make(batch, seed, rank, world, CPU) for rank in range(world)]
        assert {1, LONGEST} <= set(pool[0].lengths) if seed == 0 else 1 in pool[0].lengths
        query = torch.cat([inputs.query for inputs in pool], 1)
        held = torch.zeros(batch, dtype=torch.int32)
        parts = {"right": [], "dropped": []}
        for rank, inputs in enumerate(pool):
            buffers = checks.Buffers([inputs], rank, world)
            for name, drop in (("right", False), ("dropped", rank == world - 1)):
                buffers.load(inputs, drop=drop)
                held += 0 if name == "dropped" else buffers.lens
                parts[name].append(partial_of(checks, buffers, query))
        assert held.tolist() == pool[0].lengths
        for name, base_e in (("right", True), ("base", False), ("dropped", True)):
            outputs, lses = map(torch.stack, zip(*parts.get(name, parts["right"]), strict=True))
            merged = merge_partials(outputs, lses, base_e=base_e)[0].chunk(world, 1)
            found = max(checks.error_of(own, inputs) for own, inputs in zip(merged, pool, strict=True))
            errors[name] = max(errors[name], found)
    assert 0 < errors["right"] <= checks.TOLERANCE
    assert min(errors["base"], errors["dropped"]) > 20 * checks.TOLERANCE, errors


def test_an_output_that_is_not_a_number_is_infinitely_wrong(checks: Any) -> None:
    inputs = checks.Inputs.make(1, 1, 0, 2, CPU)  # one request of one token
    output = inputs.truth.clone()
    assert inputs.lengths == [1] and checks.error_of(output, inputs) == 0.0
    output[0, 0, 0] = math.nan
    assert checks.error_of(output, inputs) == math.inf
