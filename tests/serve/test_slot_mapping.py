# SPDX-License-Identifier: Apache-2.0
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kimi_k3_serve.cpu import compute_slot_mapping
from kimi_k3_serve.slot_mapping import slot_mapping

WORLD_SIZES = (1, 2, 4, 8)
INTERLEAVES = (1, 4, 16)
BLOCK_SIZE = 16


def batch(seed: int, world_size: int) -> dict[str, object]:
    """A ragged batch: prefills, continuations that start in mid-block, and decodes."""
    rng = random.Random(seed)
    positions: list[int] = []
    starts = [0]
    for _ in range(rng.randint(1, 5)):
        first, count = rng.choice([(0, rng.randint(1, 300)), (rng.randint(1, 400), rng.choice([1, 37, 200]))])
        positions += range(first, first + count)
        starts.append(len(positions))
    blocks = -(-600 // (BLOCK_SIZE * world_size)) + 1
    ids = rng.sample(range(1, 5000), blocks * (len(starts) - 1))
    table = [ids[i * blocks : (i + 1) * blocks] for i in range(len(starts) - 1)]
    return {"query_start_loc": starts, "positions": positions, "block_table": table, "block_size": BLOCK_SIZE}


def brute_force(case: dict[str, object], world_size: int, interleave: int) -> list[list[tuple[int, int]]]:
    """Deal positions out one at a time, as one deals cards: (owner, slot) of each position of each request.

    Every rank fills its physical block from row 0 up; when all ranks have filled theirs, the next block begins.
    """
    dealt = []
    for row in case["block_table"]:
        cards, filled, block, owner, run = [], [0] * world_size, 0, 0, 0
        for _ in range(1000):
            if block == len(row):
                break
            cards.append((owner, row[block] * BLOCK_SIZE + filled[owner]))
            filled[owner] += 1
            run += 1
            if run == interleave:
                owner, run = (owner + 1) % world_size, 0
            if filled == [BLOCK_SIZE] * world_size:
                block, filled = block + 1, [0] * world_size
        dealt.append(cards)
    return dealt


def slots_of(case: dict[str, object], world_size: int, rank: int, interleave: int) -> list[int]:
    return slot_mapping(
        torch.tensor(case["query_start_loc"], dtype=torch.int32),
        torch.tensor(case["positions"]),
        torch.tensor(case["block_table"], dtype=torch.int32),
        block_size=BLOCK_SIZE,
        world_size=world_size,
        rank=rank,
        interleave=interleave,
    ).tolist()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("interleave", INTERLEAVES)
def test_equals_a_brute_force_deal(world_size: int, interleave: int) -> None:
    for seed in range(20):
        case = batch(seed, world_size)
        dealt = brute_force(case, world_size, interleave)
        slots = [slots_of(case, world_size, rank, interleave) for rank in range(world_size)]
        starts = case["query_start_loc"]
        for request in range(len(starts) - 1):
            for token in range(starts[request], starts[request + 1]):
                owner, slot = dealt[request][case["positions"][token]]
                expected = [slot if rank == owner else -1 for rank in range(world_size)]
                assert [slots[rank][token] for rank in range(world_size)] == expected


def test_no_two_tokens_share_a_slot_and_none_is_lost() -> None:
    for seed in range(20):
        case = batch(seed, 4)
        # Requests may overlap in position but never in block.
        kept = [(rank, s) for rank in range(4) for s in slots_of(case, 4, rank, 4) if s >= 0]
        assert len(kept) == len(set(kept)) == len(case["positions"])


def test_equals_vllm_v1_and_v2_kernels() -> None:
    """The V1 runner's and the V2 runner's Triton kernels, from the installed vLLM, in the interpreter."""
    cases = []
    for world_size in WORLD_SIZES:
        for interleave in INTERLEAVES:
            for rank in {0, world_size - 1}:
                case = batch(100 * world_size + interleave, world_size)
                cases.append({**case, "world_size": world_size, "interleave": interleave, "rank": rank})
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("upstream_kernels.py")],
        input="\n".join(map(json.dumps, cases)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert len(answers) == len(cases), done.stderr[-2000:]
    for case, (v1, v2) in zip(cases, answers, strict=True):
        ours = slots_of(case, case["world_size"], case["rank"], case["interleave"])
        assert v1 == v2 == [*ours, -1, -1, -1]


def test_replacement_pads_the_tail_of_the_batch() -> None:
    case = batch(3, 2)
    out = torch.full((len(case["positions"]) + 5,), 777)
    compute_slot_mapping(
        len(case["positions"]),
        len(out),
        torch.tensor(case["query_start_loc"], dtype=torch.int32),
        torch.tensor(case["positions"]),
        torch.tensor(case["block_table"], dtype=torch.int32),
        0,
        out,
        BLOCK_SIZE,
        2,
        1,
        4,
    )
    assert out.tolist() == [*slots_of(case, 2, 1, 4), -1, -1, -1, -1, -1]
