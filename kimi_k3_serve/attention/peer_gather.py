# SPDX-License-Identifier: Apache-2.0
"""The query gather over peer memory: one Triton launch. The data are their own flags.

W ranks launch it in the same order with the same token count, so block b does the same rows on every rank. What
counts is latency, one way over the link. Every rank has two slots, in each a place for every other rank's heads.

1. **push**     a block stores its units of 16 bytes into the other ranks' slots, inverted, each word of 8 bytes whole;
2. **receive**  it takes the same units from its own slot: reads them until no word is zero, zeroes them, and puts them,
                inverted back, where the attention kernel reads them.

Zero means "not there yet". Only a word of all ones would become zero: four NaNs in half precision, eight in FP8, which
travel as other NaNs. A word is stored and read whole (relaxed, system scope), so there is no fence and no flag.

Tile b of the units belongs to block b in every launch that has so many tokens; each block counts its own launches, and
this *epoch*, mod 2, picks the slot. Rank A pushes epoch e + 2 after its launch of e + 1 has ended (stream order). That
launch received every rank B's units of e + 1, which B pushed after its launch of e had ended, in which it zeroed the
slot: A never stores over what B has yet to read or to zero. A block pushes before it receives, and waits for the block
of its own number only: blocks that run in the order of their numbers come to an end, resident together or not.

Each ubatch has its own slots and epochs, in device memory: no host state advances, so a CUDA graph replays it. A wait
may have a limit (`receive`).

Every argument is an integer, memory is passed by address, strides in units of 16 bytes: the host has nothing to find
out at a launch (`triton_launch.py`), and no number of a batch compiles a kernel while other ranks spin.
"""

import triton
import triton.language as tl

from kimi_k3_serve.symmetric.device import pointer
from kimi_k3_serve.triton_launch import integer_kernel


@triton.jit
def load_unit(address, valid):
    """Two words of 8 bytes at each address, a multiple of 16."""
    pair = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)[:, None] + tl.arange(0, 2)[None, :]
    return tl.split(tl.load(pair, mask=valid[:, None], other=0))


@triton.jit
def store_unit(address, low, high, valid):
    """To this rank's own memory."""
    pair = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)[:, None] + tl.arange(0, 2)[None, :]
    tl.store(pair, tl.join(low, high), mask=valid[:, None])


@triton.jit
def inverted(word):
    """Never zero: see the head of this file."""
    return ~tl.where(word == -1, 0x7FFF7FFF7FFF7FFF, word)


@triton.jit
def push(address, low, high, valid, PTX: tl.constexpr):
    """Store two words of 8 bytes, each whole, at an address of 16 bytes in some rank's memory."""
    if PTX:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred valid;
                setp.ne.s32 valid, $4, 0;
                @valid st.relaxed.sys.global.v2.b64 [$1], {$2, $3};
                mov.u32 $0, 0;
            }
            """,
            "=r,l,l,l,r",
            [address, low, high, valid.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        word = address.to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(word, low, mask=valid, sem="relaxed", scope="sys")
        tl.atomic_xchg(word + 1, high, mask=valid, sem="relaxed", scope="sys")


@triton.jit
def receive(address, valid, source, epoch, place, report, limit_ns, PTX: tl.constexpr):
    """Take two words: read them until neither is zero, leave zeroes. After `limit_ns` (0: never) report rank `source`
    and end the kernel.

    One thread does both: a word that another thread zeroed too early would keep this one waiting for ever. The source's
    last epoch is the one before: without it this rank would not be here.
    """
    if PTX:
        low, high = tl.inline_asm_elementwise(
            """
            {
                .reg .pred again, limited, valid;
                .reg .b64 low, high, begun, now;
                setp.ne.s32 valid, $3, 0;
                setp.ne.s64 limited, $8, 0;
                mov.b64 low, -1;
                mov.b64 high, -1;
                mov.b64 begun, 0;
                @!valid bra done;
            poll:
                ld.relaxed.sys.global.v2.b64 {low, high}, [$2];
                setp.eq.s64 again, low, 0;
                setp.eq.or.s64 again, high, 0, again;
                @!again bra taken;
                @!limited bra poll;
                mov.u64 now, %globaltimer;
                setp.eq.s64 again, begun, 0;
                @again mov.b64 begun, now;
                sub.u64 now, now, begun;
                setp.lt.u64 again, now, $8;
                @again bra poll;
                sub.s64 now, $5, 1;
                st.global.b64 [$7 + 8], now;
                st.global.b64 [$7 + 16], $5;
                st.global.b64 [$7 + 24], $6;
                add.s64 now, $4, 1;
                fence.acq_rel.sys;
                st.global.b64 [$7], now;
                fence.acq_rel.sys;
                trap;
            taken:
                mov.b64 now, 0;
                st.relaxed.sys.global.v2.b64 [$2], {now, now};
            done:
                mov.b64 $0, low;
                mov.b64 $1, high;
            }
            """,
            "=l,=l,l,r,l,l,l,l,l",
            [address, valid.to(tl.int32), source, epoch, place, report, limit_ns],
            dtype=(tl.int64, tl.int64),
            is_pure=False,
            pack=1,
        )
    else:
        word = address.to(tl.pointer_type(tl.int64))
        low = tl.atomic_add(word, 0, mask=valid, sem="relaxed", scope="sys")
        high = tl.atomic_add(word + 1, 0, mask=valid, sem="relaxed", scope="sys")
        elapsed = tl.full((), 0, tl.int64)
        absent = tl.sum((valid & ((low == 0) | (high == 0))).to(tl.int32), axis=0)
        while (absent > 0) & ((limit_ns == 0) | (elapsed < limit_ns)):
            low = tl.atomic_add(word, 0, mask=valid, sem="relaxed", scope="sys")
            high = tl.atomic_add(word + 1, 0, mask=valid, sem="relaxed", scope="sys")
            absent = tl.sum((valid & ((low == 0) | (high == 0))).to(tl.int32), axis=0)
            elapsed += 100_000  # the interpreter has no clock; about what a poll takes it
        if absent > 0:
            words = pointer(report, tl.int64)
            tl.store(words + 1, epoch - 1)
            tl.store(words + 2, epoch)
            tl.store(words + 3, place)
            tl.store(words, source + 1)
        else:
            tl.store(word, tl.zeros_like(low), mask=valid)
            tl.store(word + 1, tl.zeros_like(high), mask=valid)
    return low, high


@integer_kernel
def gather_query(
    nope: tl.int64,
    nope_stride_token: tl.int64,
    nope_stride_head: tl.int64,
    rope: tl.int64,
    rope_stride_token: tl.int64,
    rope_stride_head: tl.int64,
    query: tl.int64,
    peers: tl.int64,
    slots: tl.int64,
    epochs: tl.int64,
    report: tl.int64,
    limit_ns: tl.int64,
    tokens: tl.int32,
    heads: tl.int32,
    capacity: tl.int32,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    UNITS: tl.constexpr,
    RANK: tl.constexpr,
    W: tl.constexpr,
    PTX: tl.constexpr,
):
    """Gather every rank's heads, their two parts concatenated. Grid: tokens * heads * (NOPE + ROPE) / UNITS.

    Args:
        nope: [B, H, NOPE] and rope: [B, H, ROPE] units of 16 bytes; addresses, strides in units.
        query: [B, W * H, NOPE + ROPE] units of this rank; an address.
        peers: [W] int64, where each rank's region begins.
        slots: [2, W - 1, capacity, H, NOPE + ROPE] units, a byte offset into a region; rank r's place in the slots
            of rank q is the one of number (r - q - 1) mod W.
        epochs: [blocks] int64 of this rank.
    """
    HEAD: tl.constexpr = NOPE + ROPE
    regions = pointer(peers, tl.int64)
    counter = epochs.to(tl.pointer_type(tl.int64)) + tl.program_id(0)
    epoch = tl.load(counter) + 1
    unit = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    valid = unit < tokens * heads * HEAD
    row = unit // HEAD
    token = (row // heads).to(tl.int64)
    head = row % heads
    column = unit % HEAD
    latent = nope + (token * nope_stride_token + head * nope_stride_head + column) * 16
    rotated = rope + (token * rope_stride_token + head * rope_stride_head + column - NOPE) * 16
    low, high = load_unit(tl.where(column < NOPE, latent, rotated), valid)
    inverted_low, inverted_high = inverted(low), inverted(high)

    share = capacity.to(tl.int64) * heads * (HEAD * 16)
    slot = slots + (epoch & 1) * (W - 1) * share + unit.to(tl.int64) * 16
    for step in tl.static_range(W - 1):
        target = tl.load(regions + (RANK + 1 + step) % W) + slot + (W - 2 - step) * share
        push(target, inverted_low, inverted_high, valid, PTX)
    gathered = query + ((token * W * heads + head) * HEAD + column) * 16
    width = heads * (HEAD * 16)  # bytes of one rank's heads of a token
    store_unit(gathered + RANK * width, low, high, valid)

    own = tl.load(regions + RANK) + slot
    for step in tl.static_range(W - 1):
        source = (RANK + 1 + step) % W
        arrived = own + step * share
        low, high = receive(
            arrived, valid, tl.full((), source, tl.int64), epoch, slots, report, limit_ns, PTX
        )
        store_unit(gathered + source * width, ~low, ~high, valid)
    tl.debug_barrier()  # every thread has read the counter
    tl.store(counter, epoch)
