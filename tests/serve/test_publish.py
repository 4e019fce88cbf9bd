# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_k3_serve.publish.chunks import upload
from kimi_k3_serve.publish.collective import widest_words
from kimi_k3_serve.publish.layout import SLOTS, Layout
from kimi_k3_serve.publish.publisher import Publisher, PublishError, objection
from kimi_k3_serve.symmetric import Region

HERE = Path(__file__).parent
LATENT, ROPE = 512, 64


def interpreted(script: str, *arguments: str) -> Any:
    """Run a script of this folder where Triton interprets its kernels; the JSON of its last line."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def verdicts() -> dict[str, dict[str, str]]:
    answer: dict[str, dict[str, str]] = interpreted("publish_ranks.py", "2", "4", "8")
    return answer


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_publish_what_stock_yields(verdicts: dict[str, dict[str, str]], world_size: int) -> None:
    """W processes: the Triton kernel interpreted, the PyTorch implementation and the collective, byte for byte, also
    where ranks keep runs of four tokens; lifetimes hold with one rank late."""
    sound = {k: v for k, v in verdicts[str(world_size)].items() if not k.startswith("mutation")}
    assert set(sound.values()) == {"ok"}, sound
    assert "torch: bytes bf16, interleave 4" in sound and len(sound) >= 10


@pytest.mark.parametrize("mutation", ["one slot", "no wait", "frozen epoch", "no output collective"])
def test_a_broken_protocol_shows(verdicts: dict[str, dict[str, str]], mutation: str) -> None:
    for world_size, kind in (("2", "triton"), ("2", "torch"), ("4", "torch"), ("8", "torch")):
        assert verdicts[world_size][f"mutation: {kind}, {mutation}"].startswith("differs: ")


def test_a_scaled_row_is_one_rounding_of_the_float32_product() -> None:
    """Every finite e4m3 byte, several scales: the kernel's bits = PyTorch's."""
    assert interpreted("publish_scaled.py") == {"compared": 254 * 4 * 2, "different": 0}


def layout(**changes: Any) -> Layout:
    return Layout(**{"world_size": 2, "capacity": 8, "latent_bytes": 1024, "rope_bytes": 128, **changes})


def test_slots_and_planes_do_not_overlap() -> None:
    place = layout(world_size=16, capacity=7, ubatches=2)
    spans = []
    for ubatch in range(2):
        for slot in range(SLOTS):
            begin = place.slot_offset(ubatch, slot)
            spans += [
                (begin, begin + 8 * 16),
                (begin + place.kv_c_offset, begin + place.kv_c_offset + 7 * 1024),
                (begin + place.k_pe_offset, begin + place.k_pe_offset + 7 * 128),
            ]
    spans.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    assert spans[-1][1] <= place.nbytes
    assert all(begin % 16 == 0 for begin, _ in spans)
    with pytest.raises(ValueError, match="ubatch 2, slot 0: there are 2 ubatches of 2 slots"):
        place.slot_offset(2, 0)


def one_rank(place: Layout, dtype: torch.dtype = torch.bfloat16) -> Publisher:
    region = Region.group(1, place.nbytes)[0]
    return Publisher(region, place, dtype, transport="shared", implementation="torch", timeout_s=1.0)


def test_a_chunk_larger_than_a_plane_is_refused_before_a_row_moves() -> None:
    source = one_rank(layout(world_size=1, capacity=8))
    [chunk] = upload([([9], [[9]], [0])], rank=0, world_size=1, device=torch.device("cpu"))
    cache = torch.ones(3, 4, LATENT + ROPE, dtype=torch.bfloat16)
    with pytest.raises(PublishError, match="9 rows does not fit a plane of 8"):
        source.gather(cache, torch.zeros(1, 3, dtype=torch.int32), chunk, slot=0)
    assert not source.planes[0][0][0].any()


@pytest.mark.parametrize(
    ("place", "found"),
    [(layout(world_size=2), "on 1 ranks"), (layout(world_size=1, capacity=9), "take 20992 bytes on each")],
)
def test_memory_of_another_group_or_size_is_refused(place: Layout, found: str) -> None:
    region = Region.group(1, layout(world_size=1).nbytes)[0]
    with pytest.raises(PublishError, match=found):
        Publisher(region, place, torch.bfloat16, transport="shared", implementation="torch")


def test_nothing_is_made_on_the_default_device() -> None:
    """vLLM builds layers under another default device, where host memory cannot be pinned."""
    place = layout(world_size=1)
    region = Region.group(1, place.nbytes)[0]
    with torch.device("meta"):
        source = Publisher(region, place, torch.bfloat16, transport="peer", implementation="triton")
        [chunk] = upload([([3], [[3]], [0])], rank=0, world_size=1, device=torch.device("cpu"), tiles=True)
    rank = source.rank
    made = (chunk.memory, rank.deadline.report, rank.state, rank.peers)  # type: ignore[attr-defined]
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_rows_are_not_scaled_without_the_runs_of_other_ranks() -> None:
    place = layout(world_size=1, latent_bytes=512, rope_bytes=64)
    source = one_rank(place, torch.float8_e4m3fn)
    cache, table = torch.ones(3, 4, LATENT + ROPE, dtype=torch.uint8), torch.zeros(1, 3, dtype=torch.int32)
    chunk = ([3], [[3]], [0])
    [untiled] = upload([chunk], rank=0, world_size=1, device=torch.device("cpu"))
    with pytest.raises(AssertionError, match="tiles=True"):
        source.gather(cache, table, untiled, slot=0, scale=torch.ones(1))
    [tiled] = upload([chunk], rank=0, world_size=1, device=torch.device("cpu"), tiles=True)
    kv_c, k_pe = source.gather(cache, table, tiled, slot=0, scale=torch.full((1,), 512.0))
    assert kv_c.shape == (3, LATENT) and k_pe.shape == (3, ROPE)
    assert (kv_c == 1.0).all() and kv_c.dtype == torch.bfloat16  # byte 1 is 2 ** -9


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (torch.ones(3, 4, 576), "rows of 576 torch.float32, where 576 torch.bfloat16 were announced"),
        (torch.ones(3, 4, 576, dtype=torch.float16), "rows of 576 torch.float16"),
        (torch.ones(3, 4, 580, dtype=torch.bfloat16)[..., :576], "not on 16 bytes"),
        (torch.ones(3, 4, 512, dtype=torch.bfloat16), "rows of 512 torch.bfloat16"),
    ],
)
def test_a_cache_that_does_not_fit_the_planes_is_refused(cache: torch.Tensor, message: str) -> None:
    with pytest.raises(PublishError, match=message):
        one_rank(layout(world_size=1)).check(cache)


def test_what_cannot_be_published_has_a_reason() -> None:
    assert objection(torch.bfloat16, 1024, 128) is None
    assert objection(torch.float8_e4m3fn, 512, 64) is None
    assert objection(torch.float8_e5m2, 512, 64) == "a KV cache of torch.float8_e5m2 cannot be published"
    assert "each part must be a power of two" in (objection(torch.bfloat16, 1024, 8) or "")


@pytest.mark.parametrize(
    ("cache", "word"),
    [
        (torch.zeros(3, 4, 576, dtype=torch.bfloat16), torch.int64),
        (torch.zeros(3, 4, 576, dtype=torch.uint8), torch.int64),
        (torch.zeros(3, 4, 578, dtype=torch.bfloat16)[..., :576], torch.int32),
        (torch.zeros(3, 4, 577, dtype=torch.uint8)[..., :576], torch.uint8),
        (torch.zeros(3, 4, 577, dtype=torch.bfloat16)[..., :576], torch.bfloat16),
    ],
)
def test_the_fallback_moves_the_widest_words_that_fit(cache: torch.Tensor, word: torch.dtype) -> None:
    words = widest_words(cache, 512 * cache.element_size())
    assert words.dtype == word and words.data_ptr() == cache.data_ptr()
    assert words.shape[-1] * word.itemsize == 576 * cache.element_size()
