# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""The gather of a few projection rows over peer memory: one Triton launch, no barrier, no second kernel.

Protocol
--------
W ranks launch the same number of rows in the same order. A row of one rank is cut into *units* of 8 bytes. Every rank
has two *slots*; a slot holds, for each row, the units of all W ranks, 16 bytes each: two words of 8 bytes, in each of
which 4 bytes of payload travel with the 4 bytes of the *epoch*.

1. **push**     each unit is stored into every rank's slot, two words at once;
2. **receive**  each unit of one's own slot is read until both its words carry this launch's epoch;
3. **place**    its payload is written where the logical order wants it. Nothing remains to be rearranged.

A word is stored and read whole (8 bytes, relaxed, system scope): who reads the epoch has read the payload. So there is
no fence, no flag beside the data, and the latency is one way over the link. (NCCL's LL protocol rests on the same.)

Epochs. A row's epoch counts the launches that had this row; it lives on the device, and a CUDA graph replays. Each
block keeps its own copy, and writes it last. Launches of epoch e use slot e mod 2. A slot's words carry epoch e - 2 (or
0, never written) until those of e arrive: equality tells them apart, also when 32 bits wrap.

Why a slot is never overwritten while it is read. Rank A pushes epoch e + 2 of a row after its launch of e + 1 has ended
(stream order). That launch received every rank B's units of e + 1, which B pushed after its launch of e had ended
(stream order), in which it read its slot for the last time. With one slot that argument has nothing to stand on.

Blocks need not be resident together. A block pushes before it receives, and what it waits for is pushed by a block of
the other rank whose predecessors wait only for smaller (row, lesser rank, greater rank, unit): blocks that run one
after another, in the order of their numbers, come to an end. Different ubatches have slots and epochs of their own.
"""

import triton
import triton.language as tl

from kimi_k3_serve.symmetric.device import pointer


@triton.jit
def slot_of(epoch):
    return epoch & 1


@triton.jit
def push(address, payload, epoch, valid, PTX: tl.constexpr):
    """Store 8 bytes of payload as two words, each half a payload and the epoch, at an address of 16 bytes."""
    if PTX:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred valid;
                .reg .b32 low, high;
                .reg .b64 word<2>;
                setp.ne.s32 valid, $4, 0;
                mov.b64 {low, high}, $2;
                mov.b64 word0, {low, $3};
                mov.b64 word1, {high, $3};
                @valid st.relaxed.sys.global.v2.b64 [$1], {word0, word1};
                mov.u32 $0, 0;
            }
            """,
            "=r,l,l,r,r",
            [address, payload, epoch, valid.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        word = address.to(tl.pointer_type(tl.int64))
        stamp = epoch.to(tl.int64) << 32
        low = stamp | (payload & 0xFFFFFFFF)
        high = stamp | ((payload >> 32) & 0xFFFFFFFF)
        tl.atomic_xchg(word, low, mask=valid, sem="relaxed", scope="sys")
        tl.atomic_xchg(word + 1, high, mask=valid, sem="relaxed", scope="sys")


@triton.jit
def receive(address, epoch, valid, source, report, limit_ns, PTX: tl.constexpr):
    """Read two words until both carry the epoch; the 8 bytes of payload, or 0 where not `valid`.

    After `limit_ns` nanoseconds (0: no limit) it ends the kernel instead, and `report`, the address of [4] int64 in
    memory that the host can read when the context is lost, holds `source`, the missing rank, + 1 and in its third word
    the epoch. The clock is asked at every 1024th poll only, and no thread asks another: waiting costs what it did.
    """
    if PTX:
        payload = tl.inline_asm_elementwise(
            """
            {
                .reg .pred again, valid;
                .reg .b32 low, high, first, second, polls, rest;
                .reg .b64 word<2>, begun, now;
                setp.ne.s32 valid, $3, 0;
                mov.b32 low, 0;
                mov.b32 high, 0;
                mov.b32 polls, 0;
                mov.b64 begun, 0;
            poll:
                @valid ld.relaxed.sys.global.v2.b64 {word0, word1}, [$1];
                @valid mov.b64 {low, first}, word0;
                @valid mov.b64 {high, second}, word1;
                setp.ne.and.s32 again, first, $2, valid;
                @again bra stale;
                setp.ne.and.s32 again, second, $2, valid;
                @!again bra done;
            stale:
                add.u32 polls, polls, 1;
                and.b32 rest, polls, 1023;
                setp.ne.u32 again, rest, 0;
                @again bra poll;
                setp.eq.s64 again, $6, 0;
                @again bra poll;
                mov.u64 now, %globaltimer;
                setp.eq.u64 again, begun, 0;
                @again mov.b64 begun, now;
                sub.u64 now, now, begun;
                setp.lt.u64 again, now, $6;
                @again bra poll;
                cvt.s64.s32 now, $2;
                st.global.b64 [$5+16], now;
                add.s32 rest, $4, 1;
                cvt.s64.s32 now, rest;
                st.global.b64 [$5], now;
                fence.acq_rel.sys;
                trap;
            done:
                mov.b64 $0, {low, high};
            }
            """,
            "=l,l,r,r,r,l,l",
            [address, epoch, valid.to(tl.int32), source, report, limit_ns],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        word = address.to(tl.pointer_type(tl.int64))
        low = tl.atomic_add(word, 0, mask=valid, sem="relaxed", scope="sys")
        high = tl.atomic_add(word + 1, 0, mask=valid, sem="relaxed", scope="sys")
        stale = valid & (((low >> 32).to(tl.int32) != epoch) | ((high >> 32).to(tl.int32) != epoch))
        elapsed = tl.full((), 0, tl.int64)
        while (tl.sum(stale.to(tl.int32)) > 0) & ((limit_ns == 0) | (elapsed < limit_ns)):
            low = tl.atomic_add(word, 0, mask=valid, sem="relaxed", scope="sys")
            high = tl.atomic_add(word + 1, 0, mask=valid, sem="relaxed", scope="sys")
            stale = valid & (((low >> 32).to(tl.int32) != epoch) | ((high >> 32).to(tl.int32) != epoch))
            elapsed += 100_000  # the interpreter has no clock; about what a poll takes it
        if tl.sum(stale.to(tl.int32)) > 0:
            words = pointer(report, tl.int64)
            tl.store(words + 2, tl.max(tl.where(stale, epoch, -2147483648)).to(tl.int64))
            tl.store(words, tl.min(tl.where(stale, source, 2147483647)).to(tl.int64) + 1)
        payload = (high << 32) | (low & 0xFFFFFFFF)
    return payload


# One compiled kernel for all ranks, rows and layouts of a geometry: a rank that compiles keeps the others spinning.
@triton.jit(
    do_not_specialize=[
        *("first_stride", "second_stride", "out_first_stride", "out_second_stride"),
        *("slots_offset", "rank", "report", "limit_ns"),
    ],
    do_not_specialize_on_alignment=["first", "second", "out_first", "out_second", "epochs"],
)
def gather_kernel(
    first,
    second,
    out_first,
    out_second,
    first_stride,
    second_stride,
    out_first_stride,
    out_second_stride,
    bases,
    epochs,
    slots_offset,
    rank,
    report: tl.int64,
    limit_ns: tl.int64,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ROWS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    UNITS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Gather two parts of each row from all ranks. Grid: rows * BLOCKS, BLOCKS = ceil(units of a gathered row / UNITS).

    Args:
        first, second: int64, [rows, FIRST] and [rows, SECOND] units of this rank; strides in units.
        out_first, out_second: int64, [rows, WORLD_SIZE * FIRST] and [rows, WORLD_SIZE * SECOND], rank-major each.
        bases: [WORLD_SIZE] int64, where each rank's symmetric memory begins.
        epochs: [ROWS, BLOCKS] int32 of this rank and ubatch.
        slots_offset: bytes from there to the ubatch's slots, [2, ROWS, WORLD_SIZE * (FIRST + SECOND), 16] bytes.
        report, limit_ns: see `receive`.
    """
    OWN: tl.constexpr = FIRST + SECOND
    GATHERED: tl.constexpr = WORLD_SIZE * OWN
    BLOCKS: tl.constexpr = (GATHERED + UNITS - 1) // UNITS
    row = tl.program_id(0) // BLOCKS
    counter = epochs + tl.program_id(0)
    epoch = tl.load(counter) + 1

    # Item i is this rank's unit i mod OWN on its way to rank i div OWN, and the same unit of that rank on its way here.
    item = tl.program_id(0) % BLOCKS * UNITS + tl.arange(0, UNITS)
    valid = item < GATHERED
    other = item // OWN
    unit = item % OWN
    in_first = unit < FIRST
    in_second = unit - FIRST
    payload = tl.load(first + row * first_stride + unit, mask=valid & in_first, other=0) | tl.load(
        second + row * second_stride + in_second, mask=valid & (in_second >= 0), other=0
    )
    place = slots_offset + ((slot_of(epoch) * ROWS + row) * GATHERED).to(tl.int64) * 16
    theirs = tl.load(bases + other, mask=valid, other=0) + place + (rank * OWN + unit) * 16
    stamp = tl.zeros([UNITS], tl.int32) + epoch
    push(theirs, payload, stamp, valid, PTX)

    ours = tl.load(bases + rank) + place + item * 16
    arrived = receive(ours, stamp, valid, other, report, limit_ns, PTX)
    tl.store(
        out_first + row * out_first_stride + other * FIRST + unit,
        arrived,
        mask=valid & in_first,
    )
    tl.store(
        out_second + row * out_second_stride + other * SECOND + in_second,
        arrived,
        mask=valid & (in_second >= 0),
    )
    tl.debug_barrier()  # every thread has read the counter
    tl.store(counter, epoch)


@triton.jit(
    do_not_specialize=["rows", "slots_offset", "rank", "report", "limit_ns"],
    do_not_specialize_on_alignment=["out", "epochs"],
)
def project_kernel(
    x,
    weight,
    out,
    x_stride,
    rows,
    bases,
    epochs,
    slots_offset,
    rank,
    report: tl.int64,
    limit_ns: tl.int64,
    K: tl.constexpr,
    STEP: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    WORLD_PADDED: tl.constexpr,
    PTX: tl.constexpr,
):
    """Multiply a few rows by this rank's columns and gather the products from all ranks. Grid: FIRST + SECOND.

    Block u computes unit u, four columns of half precision summed in float32, pushes it as soon as it has it, and
    receives unit u of every rank. Blocks of equal number wait for one another.

    Args:
        x: [rows, K]; weight: [4 * (FIRST + SECOND), K] contiguous, of the same half-precision dtype.
        out: int64, [rows, WORLD_SIZE * (FIRST + SECOND)] contiguous: all ranks' first parts, then their second parts.
        bases, slots_offset, report, limit_ns: as for `gather_kernel`, in slots of this kernel's own.
        epochs: [ROWS, FIRST + SECOND] int32 of this rank and ubatch.
        M, WORLD_PADDED: `rows` and WORLD_SIZE, or more, as powers of two.
    """
    OWN: tl.constexpr = FIRST + SECOND
    GATHERED: tl.constexpr = WORLD_SIZE * OWN
    unit = tl.program_id(0)
    row = tl.arange(0, M)
    other = tl.arange(0, WORLD_PADDED)[None, :]
    counters = epochs + row * OWN + unit
    # Volatile, so that they are not put off until the product is there and their latency shows.
    epoch = tl.load(counters, mask=row < rows, other=0, volatile=True) + 1
    base = tl.load(bases + other, mask=other < WORLD_SIZE, other=0, volatile=True)
    own_base = tl.load(bases + rank, volatile=True)

    lane = tl.arange(0, 4 * M)
    inputs = x + (lane // 4)[:, None] * x_stride
    columns = weight + (unit * 4 + lane % 4)[:, None] * K
    k = tl.arange(0, STEP)[None, :]
    products = tl.zeros([4 * M, STEP], tl.float32)
    for start in tl.static_range(0, K, STEP):
        w = tl.load(columns + start + k)
        a = tl.load(inputs + start + k, mask=(lane // 4 < rows)[:, None], other=0.0)
        products += w.to(tl.float32) * a.to(tl.float32)
    sums = tl.sum(products, axis=1).to(weight.dtype.element_ty)
    halves = sums.to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    payload = tl.sum(tl.reshape(halves, [M, 4]) << (tl.arange(0, 4) * 16)[None, :].to(tl.int64), axis=1)

    shape: tl.constexpr = [M, WORLD_PADDED]
    valid = tl.broadcast_to((row < rows)[:, None] & (other < WORLD_SIZE), shape)
    stamp = tl.broadcast_to(epoch[:, None], shape)
    place = slots_offset + (((slot_of(epoch) * ROWS + row) * GATHERED + unit) * 16).to(tl.int64)[:, None]
    push(base + place + rank * OWN * 16, tl.broadcast_to(payload[:, None], shape), stamp, valid, PTX)
    ours = own_base + place + other * OWN * 16
    arrived = receive(ours, stamp, valid, other, report, limit_ns, PTX)
    logical = tl.where(unit < FIRST, other * FIRST + unit, WORLD_SIZE * FIRST + other * SECOND + unit - FIRST)
    tl.store(out + row[:, None] * GATHERED + logical, arrived, mask=valid)
    tl.debug_barrier()  # every thread has read the counters
    tl.store(counters, epoch, mask=row < rows)
