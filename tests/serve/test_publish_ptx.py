# SPDX-License-Identifier: Apache-2.0
"""What the kernels become for compute capability 9.0, without a GPU: the two variants, inspected as PTX."""

import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kimi_k3_serve.publish import collective_kernel, kernel
from kimi_k3_serve.publish.chunks import TILE_ROWS
from kimi_k3_serve.publish.collective import tile_rows
from kimi_k3_serve.publish.ranks import TILE_BYTES

tl = kernel.tl
SIGNAL = re.compile(r"fence\.acq_rel\.sys;\s+st\.relaxed\.sys\.global\.b64")


def ptx(function: Any, constants: dict[str, Any], types: dict[str, str] | None = None, **options: Any) -> str:
    """Compiled as a launch does: every argument is an integer of 64 bits that nothing is known of."""
    signature = (
        dict.fromkeys(function.arg_names, "i64") | (types or {}) | dict.fromkeys(constants, "constexpr")
    )
    source = ASTSource(function, signature, constants, {})
    text: str = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options or None).asm["ptx"]
    return text


def group(world_size: int) -> dict[str, Any]:
    return {"WORLD_SIZE": world_size, "LANES": world_size, "PTX": True}


def publish(
    *, multicast: bool, world_size: int = 2, item: int = 2, scaled: bool = False, wait: bool = True
) -> str:
    """The publishing kernel of rows of 512 + 64 elements of `item` bytes, of which 65,536 fit a plane."""
    latent, rope, word = 512 * item, 64 * item, 1 if scaled else 4
    constants = group(world_size) | {
        "BLOCK_SIZE": 64,
        "BLOCK_STRIDE": 64 * (latent + rope) // word,
        "ROW_STRIDE": (latent + rope) // word,
        "LATENT": latent // word,
        "ROPE": rope // word,
        "KV_C_OFFSET": 128,
        "K_PE_OFFSET": 128 + 65536 * latent,
        "WORD": tl.uint8 if scaled else tl.int32,
        "OUT": tl.bfloat16,
        "ROWS": TILE_BYTES // latent,
        "RANK": 0,
        "MULTICAST": multicast,
        "SCALED": scaled,
        "WAIT": wait,
    }
    return ptx(kernel.publish_kernel, constants)


def words(text: str, kind: str) -> int:
    """32-bit words that a thread loads ("ld") or stores ("st") in rows: 16 bytes at a time, `k_pe` perhaps 8."""
    four = len(re.findall(rf"{kind}\.global\.v4\.b32 (?:\[|\{{ %r)", text))  # not in `copy_16_bytes_to_all`
    two = len(re.findall(rf"{kind}\.global\.v2\.b32", text))
    assert two <= 2 * four / 8  # of 9 parts of a row, 8 are `kv_c`
    return 4 * four + 2 * two


def stored(text: str) -> int:
    """Words of rows; every other store is of 8 bytes: counter and epoch of a push, four words of a wait's report."""
    others = len(re.findall(r"\bst\.global", text)) - len(re.findall(r"\bst\.global\.v[24]\.b32", text))
    bookkeeping = 2 * bool(SIGNAL.search(text)) + 4 * ("%globaltimer" in text)
    assert others == len(re.findall(r"st\.global\.b64", text)) == bookkeeping
    return words(text, "st")


@pytest.mark.parametrize("item", [2, 1], ids=["bf16", "fp8"])
def test_multicast_stores_rows_by_multimem_alone(item: int) -> None:
    text = publish(multicast=True, item=item)
    assert "multimem.st.relaxed.sys.global.v4.f32" in text
    assert stored(text) == 0


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("item", [2, 1], ids=["bf16", "fp8"])
def test_peer_stores_wide_words_to_every_rank(item: int, world_size: int) -> None:
    text = publish(multicast=False, item=item, world_size=world_size)
    assert "multimem" not in text
    assert stored(text) == world_size * words(text, "ld") > 0


@pytest.mark.parametrize("multicast", [True, False])
def test_rows_scaled_on_the_way_cost_no_second_load(multicast: bool) -> None:
    """Bytes to every rank, and twice as many, rounded to nearest, to this rank's own output."""
    text = publish(multicast=multicast, item=1, scaled=True, wait=False)
    assert stored(text) == (2 + 2 * (not multicast)) * words(text, "ld") > 0
    assert "cvt.rn.f16x2.e4m3x2" in text and "cvt.rn.bf16x2.f32" in text


@pytest.mark.parametrize("multicast", [True, False])
def test_signals_are_released_after_all_programs_were_acquired(multicast: bool) -> None:
    text = publish(multicast=multicast, world_size=4)
    counter = text.index("atom.global.sys.acq_rel.add")
    [signals] = [m.start() for m in SIGNAL.finditer(text)]
    assert counter < signals  # to all ranks at once, a thread each
    last_row = max(m.start() for m in re.finditer(r"multimem\.st|st\.global\.v4", text))
    assert last_row < text.rindex("bar.sync", 0, counter) < counter
    wait = text.index("atom.global.sys.acquire.add")
    assert signals < wait  # no program waits before this rank's own signal is out


def test_wait_acquires_reads_the_clock_and_can_end_the_kernel() -> None:
    text = ptx(kernel.wait_kernel, group(8), num_warps=1)
    assert "atom.global.sys.acquire.add" in text
    assert "%globaltimer" in text
    # The report is out before any thread ends the kernel.
    fence, trap = text.index("fence.acq_rel.sys"), text.index("trap;")
    assert text.rindex("st.global", 0, trap) < fence < text.rindex("bar.sync", 0, trap) < trap
    # And all of a program's threads leave the loop together: the time they compare is one that they have exchanged.
    waited = publish(multicast=False)
    polled = waited[waited.rindex("%globaltimer") :]
    assert "ld.shared.b64" in polled[: polled.index("bra")]
    unwaited = publish(multicast=False, wait=False)
    assert "atom.global.sys.acquire.add" not in unwaited and "trap;" not in unwaited


def test_scaling_waits_before_it_reads_a_row() -> None:
    constants = group(2) | {
        "LATENT": 512,
        "ROPE": 64,
        "KV_C_OFFSET": 128,
        "K_PE_OFFSET": 128 + 65536 * 512,
        "OUT": tl.bfloat16,
        "ROWS": TILE_ROWS,
    }
    text = ptx(kernel.scale_kernel, constants)
    loads = [m.start() for m in re.finditer(r"ld\.global\.v4\.b32", text)]
    assert text.rindex("atom.global.sys.acquire.add") < min(loads)
    assert "ld.global.b8" not in text and stored(text) == 2 * words(text, "ld")


@pytest.mark.parametrize("item", [2, 1], ids=["bf16", "fp8, scaled"])
def test_the_fallback_reads_and_writes_wide_words(item: int) -> None:
    latent, rope = 512 * item, 64 * item
    whole = (latent + rope) // 8
    packing = {
        "BLOCK_SIZE": 64,
        "BLOCK_STRIDE": 64 * whole,
        "ROW_STRIDE": whole,
        "WIDTH": whole,
        "PADDED": triton.next_power_of_2(whole),
        "WORD": tl.int64,
        "ROWS": tile_rows(8 * whole),
    }
    assert "ld.global.b64" in ptx(collective_kernel.pack_kernel, packing)
    unpacking = {
        "LATENT": 512,
        "ROPE": 64,
        "LATENT_PADDED": 512,
        "ROPE_PADDED": 64,
        "WORD": tl.int16 if item == 2 else tl.uint8,
        "OUT": tl.int16 if item == 2 else tl.bfloat16,
        "SCALED": item == 1,
        "ROWS": tile_rows(8 * whole),
    }
    text = ptx(collective_kernel.unpack_kernel, unpacking)
    assert stored(text) == (1 if item == 2 else 2) * words(text, "ld") > 0
    assert item == 2 or ("cvt.rn.f16x2.e4m3x2" in text and "cvt.rn.bf16x2.f32" in text)
