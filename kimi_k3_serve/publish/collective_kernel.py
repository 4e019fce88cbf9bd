# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""Triton kernels of the collective fallback: rows out of the paged cache before the all-gather, into planes after it.

As in `kernel.py` every argument is an integer, so that a compiled kernel is launched at little host cost.
"""

import triton
import triton.language as tl

from kimi_k3_serve.publish.kernel import scaled
from kimi_k3_serve.symmetric.device import pointer
from kimi_k3_serve.triton_launch import integer_kernel


@integer_kernel
def pack_kernel(
    cache: tl.int64,
    table: tl.int64,
    chunk: tl.int64,
    map_stride: tl.int64,
    table_stride: tl.int64,
    packed: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Copy this rank's rows of a chunk to `packed` [padded local rows, WIDTH]; rows that are padding stay as they are.

    Args:
        cache: the paged cache, aligned to a word only; BLOCK_STRIDE and ROW_STRIDE in words of type WORD.
        table, chunk, map_stride, table_stride: as for `publish_kernel`.
        WIDTH: words of a row; PADDED: the next power of two.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    header = pointer(chunk, tl.int32)
    places, stride = header + 16 + row, map_stride.to(tl.int32)
    keep = row < tl.load(header)
    keep = keep & (tl.load(places, mask=keep, other=-1) >= 0)
    request = tl.load(places + stride, mask=keep, other=0).to(tl.int64)
    position = tl.load(places + 2 * stride, mask=keep, other=0)
    blocks = table.to(tl.pointer_type(tl.int32)) + request * table_stride
    block = tl.load(blocks + position // BLOCK_SIZE, mask=keep, other=0).to(tl.int64)
    source = cache.to(tl.pointer_type(WORD)) + block * BLOCK_STRIDE + (position % BLOCK_SIZE) * ROW_STRIDE
    column = tl.arange(0, PADDED)[None, :]
    kept = keep[:, None] & (column < WIDTH)
    words = tl.load(source[:, None] + column, mask=kept, other=0)
    tl.store(pointer(packed, WORD) + row.to(tl.int64)[:, None] * WIDTH + column, words, mask=kept)


@triton.jit
def unpack_part(
    source,
    plane,
    row,
    keep,
    factor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SCALED: tl.constexpr,
    OUT: tl.constexpr,
):
    """One part of some rows, [ROWS, WIDTH] words, to their places in a plane of OUT."""
    column = tl.arange(0, PADDED)[None, :]
    kept = keep[:, None] & (column < WIDTH)
    words = tl.load(source[:, None] + column, mask=kept, other=0)
    if SCALED:
        words = scaled(words, factor, OUT)
    tl.store(pointer(plane, OUT) + row.to(tl.int64)[:, None] * WIDTH + column, words, mask=kept)


@integer_kernel
def unpack_kernel(
    gathered: tl.int64,
    order: tl.int64,
    num_rows: tl.int64,
    scale: tl.int64,
    kv_c: tl.int64,
    k_pe: tl.int64,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    LATENT_PADDED: tl.constexpr,
    ROPE_PADDED: tl.constexpr,
    WORD: tl.constexpr,
    OUT: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Split the rows of `gathered` [W * padded local rows, LATENT + ROPE] into the two planes, in compact order.

    Args:
        order: [num_rows] int32, where each compact row stands in `gathered`.
        scale: float32 [1], with SCALED only: rows are then e4m3 bytes (WORD uint8), else OUT is WORD.
        LATENT, ROPE: words of a row of either plane; *_PADDED: the next power of two.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keep = row < num_rows
    place = tl.load(pointer(order, tl.int32) + row, mask=keep, other=0).to(tl.int64)
    source = pointer(gathered, WORD) + place * (LATENT + ROPE)
    factor = 0.0
    if SCALED:
        factor = tl.load(scale.to(tl.pointer_type(tl.float32)))
    unpack_part(source, kv_c, row, keep, factor, LATENT, LATENT_PADDED, SCALED, OUT)
    unpack_part(source + LATENT, k_pe, row, keep, factor, ROPE, ROPE_PADDED, SCALED, OUT)
