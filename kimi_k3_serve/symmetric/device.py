# SPDX-License-Identifier: Apache-2.0
# mypy: ignore-errors
"""What Triton kernels need to meet other ranks in symmetric memory: a signal, a wait with a limit, an end.

A *signal* is an int64 in the waiting rank's memory, written by one rank only, that never falls. In terms of the PTX
memory model `signal` is a release pattern and `await_signals` an acquire, both for the whole system: what a program
stored before the one is seen by who has returned from the other. Without PTX (the Triton interpreter) both are atomics.
"""

import triton
import triton.language as tl


@triton.jit
def pointer(address, WORD: tl.constexpr):
    """To words at an address that is a multiple of 16."""
    return tl.multiple_of(address.to(tl.pointer_type(WORD)), 16)


@triton.jit
def clock_ns():
    """Nanoseconds, one value for all threads of a program: a loop that only some of them left would not end well."""
    thread = tl.arange(0, 128)
    own = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l,r", [thread], dtype=tl.int64, is_pure=False, pack=1
    )
    return tl.max(own, axis=0)


@triton.jit
def trap():
    """End the kernel and the CUDA context with an error, once what this program has stored is out."""
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()  # one thread has stored, and any thread's trap ends them all
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def signal(
    peers, offset, epoch, RANK: tl.constexpr, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr
):
    """Store `epoch` as this rank's signal on every rank, this one too.

    One fence, then one store of a warp, a thread for each rank: a plain store, since links need not know atomics (PCIe
    peer to peer). Of the program's other threads it releases what a barrier stands behind. The thread that runs scalar
    atomics is among those that fence: its next one releases as much, within the GPU, without a fence of its own.

    Args:
        peers: [WORLD_SIZE] int64, address of each rank's memory; an address.
        offset: bytes from there to the [WORLD_SIZE] signals.
        epoch: int64.
        LANES: WORLD_SIZE, at most 32, rounded up to a power of two.
    """
    if PTX:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred signals;
                .reg .b32 rank;
                .reg .b64 place;
                mov.u32 rank, %tid.x;
                setp.lt.u32 signals, rank, $4;
                @!signals bra done;
                mad.wide.u32 place, rank, 8, $1;
                ld.global.b64 place, [place];
                add.s64 place, place, $2;
                fence.acq_rel.sys; st.relaxed.sys.global.b64 [place], $3;
            done:
                mov.u32 $0, 0;
            }
            """,
            "=r,l,l,l,r",
            [peers.to(tl.int64), offset.to(tl.int64) + RANK * 8, epoch, tl.full((), WORLD_SIZE, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        rank = tl.arange(0, LANES)
        real = rank < WORLD_SIZE
        memory = tl.load(pointer(peers, tl.int64) + rank, mask=real, other=0)
        place = (memory + offset).to(tl.pointer_type(tl.int64)) + RANK
        tl.atomic_xchg(place, epoch + tl.zeros_like(memory), mask=real, sem="release", scope="sys")


@triton.jit
def await_signals(
    signals,
    epoch,
    report,
    limit_ns,
    place,
    WORLD_SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Return when all WORLD_SIZE signals of this rank's memory (pointer to int64) have reached `epoch`.

    After `limit_ns` nanoseconds (0: no limit) it ends the kernel instead, and `report`, the address of [4] int64 in
    memory that the host can read when the context is lost, holds the missing rank + 1, its last epoch, `epoch` and
    `place`, which says to the host where this was.
    """
    source = tl.arange(0, LANES)
    real = source < WORLD_SIZE
    begun = tl.full((), 0, tl.int64)
    elapsed = tl.full((), 0, tl.int64)
    # Adding nothing is a load with acquire semantics that every version of Triton has.
    seen = tl.atomic_add(signals + source, 0, mask=real, sem="acquire", scope="sys")
    behind = tl.sum((real & (seen < epoch)).to(tl.int32), axis=0)
    if PTX:  # noqa: SIM102 (known when compiled; the next is not)
        if behind > 0:
            begun = clock_ns()
    while (behind > 0) & ((limit_ns == 0) | (elapsed < limit_ns)):
        seen = tl.atomic_add(signals + source, 0, mask=real, sem="acquire", scope="sys")
        behind = tl.sum((real & (seen < epoch)).to(tl.int32), axis=0)
        if PTX:
            elapsed = clock_ns() - begun
        else:
            elapsed += 100_000  # the interpreter has no clock; about what a poll takes it
    if behind > 0:
        missing = tl.min(tl.where(real & (seen < epoch), source, LANES), axis=0)
        last = tl.sum(tl.where(source == missing, seen, 0), axis=0)
        words = pointer(report, tl.int64)
        tl.store(words + 1, last)
        tl.store(words + 2, epoch)
        tl.store(words + 3, place)
        tl.store(words, missing.to(tl.int64) + 1)
        if PTX:
            trap()
