# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the publication (protocol.md says what they must guarantee and why it is enough).

One source serves `multicast` and `peer`, and on the CPU the Triton interpreter: what differs stands behind the
constexprs MULTICAST and PTX. Rows are copied as 32-bit words, so a dtype is a number of words and every copy is
exact. Symmetric memory is reached through a table of addresses only, never as a tensor argument: the
interpreter writes tensor arguments back when a kernel ends, over what other processes have stored meanwhile.
"""

import triton
import triton.language as tl


@triton.jit
def copy_16_bytes_to_all(source, destination, keep):
    """Load 16 bytes and store them through a multicast address, where `keep` is not 0.

    `multimem.st` is the only store that such an address allows. Both addresses are int64, multiples of 16.
    """
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred keep;
            .reg .b32 word<4>;
            setp.ne.s32 keep, $3, 0;
            @keep ld.global.v4.b32 {word0, word1, word2, word3}, [$1];
            @keep multimem.st.relaxed.sys.global.v4.f32 [$2], {word0, word1, word2, word3};
            mov.u32 $0, 0;
        }
        """,
        "=r,l,l,r",
        [source, destination, keep],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def clock_ns():
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def trap():
    """End the kernel and the CUDA context with an error."""
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def copy_rows(
    source,
    peers_ptr,
    offset,
    multicast_address,
    destination,
    keep,
    WORDS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    MULTICAST: tl.constexpr,
):
    """Copy one tile of rows into a plane of every rank.

    Args:
        source: [ROWS] pointers to the first word of each row in the paged cache.
        offset: bytes from a rank's memory to the plane.
        destination: [ROWS] int64, row of the plane.
        keep: [ROWS], false for padding.
        WORDS: 32-bit words of a row; a power of two.
    """
    if MULTICAST:
        unit = tl.arange(0, WORDS // 4) * 16
        sources = source.to(tl.int64)[:, None] + unit[None, :]
        targets = multicast_address + offset + destination[:, None] * (WORDS * 4) + unit[None, :]
        kept = tl.broadcast_to(keep[:, None], sources.shape).to(tl.int32)
        copy_16_bytes_to_all(sources, targets, kept)
    else:
        word = tl.arange(0, WORDS)
        kept = keep[:, None]
        rows = tl.load(source[:, None] + word[None, :], mask=kept, other=0)
        place = destination[:, None] * WORDS + word[None, :]
        # Each rank begins with itself and goes round, so that no rank is everyone's first target.
        for step in tl.static_range(WORLD_SIZE):
            peer = (RANK + step) % WORLD_SIZE
            plane = (tl.load(peers_ptr + peer) + offset).to(tl.pointer_type(tl.int32))
            tl.store(tl.multiple_of(plane, 16) + place, rows, mask=kept)


# One compiled kernel whatever the batch: only the cache's own strides and alignment are worth knowing.
@triton.jit(
    do_not_specialize=["multicast_address", "slot_offset", "table_stride", "map_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "epoch_ptr", "finished_ptr"],
)
def publish_kernel(
    cache_ptr,
    block_table_ptr,
    rows_ptr,
    num_local_rows_ptr,
    peers_ptr,
    epoch_ptr,
    finished_ptr,
    multicast_address,
    slot_offset,
    kv_c_offset,
    k_pe_offset,
    block_stride,
    row_stride,
    table_stride,
    map_stride,
    BLOCK_SIZE: tl.constexpr,
    LATENT_WORDS: tl.constexpr,
    ROPE_WORDS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    MULTICAST: tl.constexpr,
):
    """Copy this rank's rows of a chunk to every rank, then signal every rank.

    Args:
        cache_ptr: int32 words of the paged cache; strides in words.
        block_table_ptr: [requests, >= blocks] int32.
        rows_ptr: [3, map_stride] int32: destination row (-1: padding), request, position (`context_map`).
        num_local_rows_ptr: [1] int32, padded local rows; on the device, so that a captured graph can change it.
        peers_ptr: [WORLD_SIZE] int64, address of each rank's memory.
        epoch_ptr, finished_ptr: [1] int64 and int32 of this ubatch, this rank's own.
        slot_offset: bytes from a rank's memory to the slot; the plane offsets count from the slot.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    num_local_rows = tl.load(num_local_rows_ptr)
    for first in range(program * ROWS, num_local_rows, programs * ROWS):
        row = first + tl.arange(0, ROWS)
        destination = tl.load(rows_ptr + row, mask=row < num_local_rows, other=-1).to(tl.int64)
        keep = destination >= 0
        request = tl.load(rows_ptr + map_stride + row, mask=keep, other=0).to(tl.int64)
        position = tl.load(rows_ptr + 2 * map_stride + row, mask=keep, other=0)
        block = tl.load(
            block_table_ptr + request * table_stride + position // BLOCK_SIZE, mask=keep, other=0
        ).to(tl.int64)
        source = cache_ptr + block * block_stride + (position % BLOCK_SIZE) * row_stride
        copy_rows(
            source,
            peers_ptr,
            slot_offset + kv_c_offset,
            multicast_address,
            destination,
            keep,
            LATENT_WORDS,
            RANK,
            WORLD_SIZE,
            MULTICAST,
        )
        copy_rows(
            source + LATENT_WORDS,
            peers_ptr,
            slot_offset + k_pe_offset,
            multicast_address,
            destination,
            keep,
            ROPE_WORDS,
            RANK,
            WORLD_SIZE,
            MULTICAST,
        )

    # The stores of all threads of this program, then the counter. System scope: the rows lie in other GPUs' memory.
    tl.debug_barrier()
    finished = tl.atomic_add(finished_ptr, 1, sem="acq_rel", scope="sys")
    if finished == programs - 1:
        tl.store(finished_ptr, 0)
        epoch = tl.load(epoch_ptr) + 1
        tl.store(epoch_ptr, epoch)
        for peer in tl.static_range(WORLD_SIZE):
            signal = (tl.load(peers_ptr + peer) + slot_offset + RANK * 8).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(signal, epoch, sem="release", scope="sys")


@triton.jit(do_not_specialize=["slot_offset"], do_not_specialize_on_alignment=["epoch_ptr"])
def wait_kernel(
    peers_ptr,
    epoch_ptr,
    report_ptr,
    slot_offset,
    limit_ns,
    RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Wait until every rank has signalled this ubatch's epoch in a slot. One program.

    Args:
        report_ptr: [4] int64 in memory that the host can read when the context is lost: after `limit_ns`
            nanoseconds (0: no limit) it gets the missing rank + 1, its last epoch, the epoch waited for, slot_offset.
        LANES: WORLD_SIZE rounded up to a power of two.
    """
    source = tl.arange(0, LANES)
    real = source < WORLD_SIZE
    epoch = tl.load(epoch_ptr)
    signals = (tl.load(peers_ptr + RANK) + slot_offset + source * 8).to(tl.pointer_type(tl.int64))
    begun = tl.full((), 0, tl.int64)
    elapsed = tl.full((), 0, tl.int64)
    if PTX:
        begun = clock_ns()
    # Adding nothing is a load with acquire semantics that every version of Triton has.
    seen = tl.atomic_add(signals, 0, mask=real, sem="acquire", scope="sys")
    behind = tl.sum((real & (seen < epoch)).to(tl.int32), axis=0)
    while (behind > 0) & ((limit_ns == 0) | (elapsed < limit_ns)):
        seen = tl.atomic_add(signals, 0, mask=real, sem="acquire", scope="sys")
        behind = tl.sum((real & (seen < epoch)).to(tl.int32), axis=0)
        if PTX:
            elapsed = clock_ns() - begun
        else:
            elapsed += 100_000  # the interpreter has no clock; about what a poll takes it
    if behind > 0:
        missing = tl.min(tl.where(real & (seen < epoch), source, LANES), axis=0)
        last = tl.sum(tl.where(source == missing, seen, 0), axis=0)
        tl.store(report_ptr + 1, last)
        tl.store(report_ptr + 2, epoch)
        tl.store(report_ptr + 3, slot_offset)
        tl.store(report_ptr, missing.to(tl.int64) + 1)
        if PTX:
            trap()


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["scale_ptr"])
def dequantise_kernel(
    raw_ptr,
    scale_ptr,
    out_ptr,
    size,
    BLOCK: tl.constexpr,
):
    """out = float32(raw) * scale, rounded once to the dtype of `out`: what stock's gather makes of a cached row."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    raw = tl.load(raw_ptr + index, mask=index < size)
    value = raw.to(tl.float32) * tl.load(scale_ptr)
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask=index < size)
