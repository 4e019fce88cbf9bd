# SPDX-License-Identifier: Apache-2.0
"""What the kernels become for compute capability 9.0, without a GPU: the two variants, inspected as PTX."""

import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kimi_k3_serve.publish import kernel
from kimi_k3_serve.publish.ranks import TILE_BYTES

INT32 = {"cache_ptr", "block_table_ptr", "rows_ptr", "num_local_rows_ptr", "finished_ptr"}


def ptx(function: Any, constants: dict[str, Any], types: dict[str, str] | None = None) -> str:
    signature = {}
    for name in function.arg_names:
        pointer = "*i32" if name in INT32 else "*i64"
        default = pointer if name.endswith("_ptr") else "i64" if name.endswith(("address", "_ns")) else "i32"
        signature[name] = "constexpr" if name in constants else (types or {}).get(name, default)
    # What a launch finds out by itself: addresses, strides and offsets are multiples of 16.
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, name in enumerate(function.arg_names) if name not in constants
    }
    source = ASTSource(function, signature, constants, aligned)
    text: str = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return text


def publish(*, multicast: bool, world_size: int = 2, words: tuple[int, int] = (256, 32)) -> str:
    return ptx(
        kernel.publish_kernel,
        {
            "BLOCK_SIZE": 64,
            "LATENT_WORDS": words[0],
            "ROPE_WORDS": words[1],
            "RANK": 0,
            "WORLD_SIZE": world_size,
            "ROWS": TILE_BYTES // (4 * words[0]),
            "MULTICAST": multicast,
        },
    )


@pytest.mark.parametrize("words", [(256, 32), (128, 16)], ids=["bf16", "fp8"])
def test_multicast_stores_rows_by_multimem_alone(words: tuple[int, int]) -> None:
    text = publish(multicast=True, words=words)
    assert "multimem.st.relaxed.sys.global.v4.f32" in text
    assert not re.search(r"st\.global\.v", text)  # what is stored plainly are counter and epoch
    assert len(re.findall(r"\bst\.global", text)) == 2


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("words", [(256, 32), (128, 16)], ids=["bf16", "fp8"])
def test_peer_stores_16_bytes_at_a_time_to_every_rank(words: tuple[int, int], world_size: int) -> None:
    text = publish(multicast=False, words=words, world_size=world_size)
    assert "multimem" not in text
    loads = len(re.findall(r"ld\.global\.v4\.b32", text))
    stores = len(re.findall(r"st\.global\.v4\.b32", text))
    assert loads > 0 and stores == world_size * loads
    assert len(re.findall(r"\bst\.global", text)) == stores + 2


@pytest.mark.parametrize("multicast", [True, False])
def test_signals_are_released_after_all_programs_were_acquired(multicast: bool) -> None:
    text = publish(multicast=multicast, world_size=4)
    counter = text.index("atom.global.sys.acq_rel.add")
    signals = [m.start() for m in re.finditer(r"atom\.global\.sys\.release\.exch\.b64", text)]
    assert len(signals) == 4 and counter < min(signals)
    last_row = max(m.start() for m in re.finditer(r"multimem\.st|st\.global\.v4", text))
    assert last_row < text.rindex("bar.sync", 0, counter) < counter


def test_wait_acquires_reads_the_clock_and_can_end_the_kernel() -> None:
    text = ptx(kernel.wait_kernel, {"RANK": 1, "WORLD_SIZE": 8, "LANES": 8, "PTX": True})
    assert "atom.global.sys.acquire.add" in text
    assert "%globaltimer" in text and "trap;" in text


def test_dequantise_compiles_for_e4m3() -> None:
    types = {"raw_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "out_ptr": "*bf16"}
    text = ptx(kernel.dequantise_kernel, {"BLOCK": 4096}, types)
    assert "cvt.rn.f16x2.e4m3x2" in text
    assert "cvt.rn.bf16x2.f32" in text  # to nearest
