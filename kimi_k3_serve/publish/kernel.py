# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of the publication (protocol.md says what they must guarantee and why it is enough).

One source serves `multicast` and `peer`, and on the CPU the Triton interpreter: what differs stands behind the
constexprs MULTICAST and PTX. Rows are copied as words of 32 or 8 bits, so every copy is exact.

Every argument is an integer: memory is passed by address. The host then has nothing to find out at a launch (one
compiled kernel serves every batch, `triton_launch.py`), and in the interpreter nothing is written back when a kernel
ends, over what other processes have stored meanwhile. Addresses are bytes and multiples of 16, unless said otherwise.
"""

import triton
import triton.language as tl

from kimi_k3_serve.symmetric.device import await_signals, pointer, signal
from kimi_k3_serve.triton_launch import integer_kernel


@triton.jit
def copy_16_bytes_to_all(source, destination, keep, PTX: tl.constexpr):
    """Load 16 bytes and store them through a multicast address, where `keep` is not 0; addresses [ROWS, UNITS].

    `multimem.st` is the only store that such an address allows. Without PTX the address is a stand-in.
    """
    if PTX:
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
    else:
        word = tl.arange(0, 4)[None, None, :]
        kept = (keep != 0)[:, :, None]
        words = tl.load(source.to(tl.pointer_type(tl.int32))[:, :, None] + word, mask=kept, other=0)
        tl.store(destination.to(tl.pointer_type(tl.int32))[:, :, None] + word, words, mask=kept)


@triton.jit
def scaled(raw, scale, OUT: tl.constexpr):
    """e4m3 bytes (uint8) -> float32(raw) * scale, rounded once to OUT: what stock's gather makes of a cached row."""
    return (raw.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale).to(OUT)


@triton.jit
def copy_rows(
    source,
    peers,
    offset,
    multicast,
    destination,
    keep,
    scale,
    out,
    WIDTH: tl.constexpr,
    WORD: tl.constexpr,
    OUT: tl.constexpr,
    RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    MULTICAST: tl.constexpr,
    SCALED: tl.constexpr,
    PTX: tl.constexpr,
):
    """Copy one tile of rows into a plane of every rank; with SCALED also, scaled, into `out` on this rank.

    Args:
        source: [ROWS] pointers to the first word of each row in the paged cache.
        peers: pointer to [WORLD_SIZE] int64, address of each rank's memory.
        offset: bytes from a rank's memory to the plane.
        destination: [ROWS] int64, row of the plane and of `out`.
        keep: [ROWS], false for padding.
        WIDTH: words of a row; a power of two.
    """
    column = tl.arange(0, WIDTH)
    kept = keep[:, None]
    place = destination[:, None] * WIDTH + column[None, :]
    rows = tl.load(source[:, None] + column[None, :], mask=kept, other=0)
    if MULTICAST:
        row_bytes: tl.constexpr = WIDTH * WORD.primitive_bitwidth // 8
        byte = tl.arange(0, row_bytes // 16) * 16
        sources = source.to(tl.int64)[:, None] + byte[None, :]
        targets = multicast + offset + destination[:, None] * row_bytes + byte[None, :]
        copy_16_bytes_to_all(sources, targets, tl.broadcast_to(kept, sources.shape).to(tl.int32), PTX)
    else:
        # The links are the bottleneck: other ranks first, each beginning with the next one, and this rank last.
        for step in tl.static_range(WORLD_SIZE):
            peer = (RANK + 1 + step) % WORLD_SIZE
            tl.store(pointer(tl.load(peers + peer) + offset, WORD) + place, rows, mask=kept)
    if SCALED:
        tl.store(pointer(out, OUT) + place, scaled(rows, scale, OUT), mask=kept)


@integer_kernel
def publish_kernel(
    cache: tl.int64,
    table: tl.int64,
    chunk: tl.int64,
    map_stride: tl.int64,
    peers: tl.int64,
    state: tl.int64,
    multicast: tl.int64,
    slot_offset: tl.int64,
    table_stride: tl.int64,
    report: tl.int64,
    limit_ns: tl.int64,
    scale: tl.int64,
    kv_c_out: tl.int64,
    k_pe_out: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    KV_C_OFFSET: tl.constexpr,
    K_PE_OFFSET: tl.constexpr,
    WORD: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    MULTICAST: tl.constexpr,
    SCALED: tl.constexpr,
    WAIT: tl.constexpr,
    PTX: tl.constexpr,
):
    """Copy this rank's rows of a chunk to every rank, then signal every rank; with WAIT, until all have signalled.

    The program that finishes last signals and waits. By then it has no other of its own grid to wait for.

    Args:
        cache: the paged cache; BLOCK_STRIDE and ROW_STRIDE in words of type WORD, multiples of 16 bytes.
        table: [requests, >= blocks] int32, rows `table_stride` apart; aligned to 4 bytes only.
        chunk: the chunk's maps of `map_stride` entries each, as `chunks.upload` lays them out.
        peers: [WORLD_SIZE] int64, address of each rank's memory.
        state: [2] int64 of this ubatch, this rank's own: epoch, and programs that have finished.
        multicast: address that reaches every rank's memory; with MULTICAST only.
        slot_offset: bytes from a rank's memory to the slot; KV_C_OFFSET and K_PE_OFFSET count from the slot.
        report, limit_ns: see `await_signals`; with WAIT only.
        scale, kv_c_out, k_pe_out: float32 [1] and where this rank's own rows go, scaled; with SCALED only.
        LATENT, ROPE: words of a row of either plane.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    header = pointer(chunk, tl.int32)
    # Read here, so that a captured graph can be replayed with another number; nothing waits for it before `keep`.
    num_local_rows = tl.load(header)
    destinations = header + 16
    stride = tl.multiple_of(map_stride.to(tl.int32), 16)
    words = pointer(cache, WORD)
    blocks = table.to(tl.pointer_type(tl.int32))
    memories = pointer(peers, tl.int64)
    # For the last steps, which nothing then delays. Only the last program of this launch changes the epoch.
    counters = pointer(state, tl.int64)
    epoch = tl.load(counters) + 1
    own = tl.load(memories + RANK) + slot_offset
    factor = 0.0
    if SCALED:
        factor = tl.load(scale.to(tl.pointer_type(tl.float32)))
    for first in range(program * ROWS, stride, programs * ROWS):
        row = first + tl.arange(0, ROWS)
        mapped = row < stride
        destination = tl.load(destinations + row, mask=mapped, other=-1).to(tl.int64)
        request = tl.load(destinations + stride + row, mask=mapped, other=0).to(tl.int64)
        position = tl.load(destinations + 2 * stride + row, mask=mapped, other=0)
        keep = (destination >= 0) & (row < num_local_rows)
        block = tl.load(blocks + request * table_stride + position // BLOCK_SIZE, mask=keep, other=0)
        source = words + block.to(tl.int64) * BLOCK_STRIDE + (position % BLOCK_SIZE) * ROW_STRIDE
        copy_rows(
            source, memories, slot_offset + KV_C_OFFSET, multicast, destination, keep, factor, kv_c_out,
            LATENT, WORD, OUT, RANK, WORLD_SIZE, MULTICAST, SCALED, PTX,
        )  # fmt: skip
        copy_rows(
            source + LATENT, memories, slot_offset + K_PE_OFFSET, multicast, destination, keep, factor, k_pe_out,
            ROPE, WORD, OUT, RANK, WORLD_SIZE, MULTICAST, SCALED, PTX,
        )  # fmt: skip

    # The stores of all threads of this program, then the counter. System scope: the rows lie in other GPUs' memory.
    tl.debug_barrier()
    finished = tl.atomic_add(counters + 1, 1, sem="acq_rel", scope="sys")
    if finished == programs - 1:
        tl.store(counters + 1, 0)
        tl.store(counters, epoch)
        signal(peers, slot_offset, epoch, RANK, WORLD_SIZE, LANES, PTX)
        if WAIT:
            await_signals(
                pointer(own, tl.int64), epoch, report, limit_ns, slot_offset, WORLD_SIZE, LANES, PTX
            )


@integer_kernel
def wait_kernel(
    memory: tl.int64,
    state: tl.int64,
    slot_offset: tl.int64,
    report: tl.int64,
    limit_ns: tl.int64,
    WORLD_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PTX: tl.constexpr,
):
    """The wait alone, one program: for a publication that was launched without it. `memory`: this rank's."""
    epoch = tl.load(pointer(state, tl.int64))
    signals = pointer(memory + slot_offset, tl.int64)
    await_signals(signals, epoch, report, limit_ns, slot_offset, WORLD_SIZE, LANES, PTX)


@triton.jit
def scale_run(plane, out, begin, rows, scale, WIDTH: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr):
    """Scale `rows` rows (at most ROWS) of a plane from row `begin` on: they lie one after the other."""
    first = begin.to(tl.int64) * WIDTH
    element = tl.arange(0, ROWS * WIDTH)
    kept = element < rows * WIDTH
    raw = tl.load(plane + first + element, mask=kept, other=0)
    tl.store(pointer(out, OUT) + first + element, scaled(raw, scale, OUT), mask=kept)


@integer_kernel
def scale_kernel(
    memory: tl.int64,
    state: tl.int64,
    slot_offset: tl.int64,
    report: tl.int64,
    limit_ns: tl.int64,
    chunk: tl.int64,
    map_stride: tl.int64,
    scale: tl.int64,
    kv_c_out: tl.int64,
    k_pe_out: tl.int64,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    KV_C_OFFSET: tl.constexpr,
    K_PE_OFFSET: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Wait (every program, for other ranks only), then scale the rows that other ranks have published.

    `publish_kernel` has scaled this rank's own. The others' are the chunk's tiles: runs of at most ROWS rows.

    Args:
        memory: this rank's; its planes hold e4m3 bytes, LATENT and ROPE of them a row.
        scale: float32 [1].
        kv_c_out, k_pe_out: [N, LATENT] and [N, ROPE] of type OUT.
    """
    epoch = tl.load(pointer(state, tl.int64))
    signals = pointer(memory + slot_offset, tl.int64)
    await_signals(signals, epoch, report, limit_ns, slot_offset, WORLD_SIZE, LANES, PTX)
    header = pointer(chunk, tl.int32)
    num_tiles = tl.load(header + 2)
    tiles = header + 16 + 3 * map_stride
    factor = tl.load(scale.to(tl.pointer_type(tl.float32)))
    slot = pointer(memory + slot_offset, tl.uint8)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        begin = tl.load(tiles + 2 * tile)
        rows = tl.load(tiles + 2 * tile + 1) - begin
        scale_run(slot + KV_C_OFFSET, kv_c_out, begin, rows, factor, LATENT, ROWS, OUT)
        scale_run(slot + K_PE_OFFSET, k_pe_out, begin, rows, factor, ROPE, ROWS, OUT)
