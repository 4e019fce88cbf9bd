# SPDX-License-Identifier: Apache-2.0
"""The LSE-weighted merge of partial attention over peer memory: one Triton launch, whose blocks meet by flags.

W ranks launch it in the same order with the same token count, so block b does the same rows on every rank:

1. **push**    block b stores its partial outputs and LSEs into the rank that owns those heads, through peer pointers;
2. **signal**  it stores the launch's epoch into flag [b, rank] of every rank: `release`, system scope, after a block
               barrier, so whoever sees the epoch sees the rows of all threads of the block;
3. **wait**    it polls its own region's flags [b, 0..W-1] with `acquire` until each holds at least this epoch;
4. **use**     it merges the others' partials of its rows with its own, read where the attention kernel wrote them.

The last block to signal writes the epoch (64 bits, device memory): by then every block has read it, and the wait hides
what the counting costs. Two slots, by the epoch's parity: epoch e+2 is pushed only after this rank's launch e+1 has
ended, hence after every other rank has begun e+1, hence after it has ended e (stream order), which read the slot.
Every block of a launch must become resident while the others spin: the grid is bounded (`BLOCKS`), one wave of small
blocks.

Each ubatch has its own slots, flags and epochs; no host state advances, so a CUDA graph replays it. A wait may have a
limit (`await_signals`). Every argument is an integer, as in `peer_gather.py`.
"""

import triton
import triton.language as tl

from kimi_k3_serve.symmetric.device import await_signals, pointer, signal
from kimi_k3_serve.triton_launch import integer_kernel

FLAG_BYTES = tl.constexpr(128)  # of a block, on a line of their own: up to 16 ranks


@triton.jit
def rendezvous(
    peers, flags, state, epoch, report, limit_ns,
    RANK: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Signal and wait: after it, this block may read what the same block of every rank has pushed."""
    place = flags + tl.program_id(0) * FLAG_BYTES
    tl.debug_barrier()
    signal(peers, place, epoch, RANK, W, LANES, PTX)
    # What every block read of the state comes before what the last one writes there: `signal` has released it.
    if tl.atomic_add(state + 1, 1, sem="acquire", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, epoch)
    await_signals(
        pointer(tl.load(peers + RANK) + place, tl.int64), epoch, report, limit_ns, place, W, LANES, PTX
    )
    tl.debug_barrier()


@triton.jit
def is_empty(token, valid, seq_lens, query_start_loc, num_seqs, SEQS: tl.constexpr):
    """Whether a token has no row in this shard: padding behind the last request, or a request of length 0 here."""
    order = tl.arange(0, SEQS)
    starts = query_start_loc.to(tl.pointer_type(tl.int32))
    ends = tl.load(starts + 1 + order, mask=order < num_seqs, other=2147483647)
    seq = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
    lengths = seq_lens.to(tl.pointer_type(tl.int32))
    return tl.load(lengths + seq, mask=valid & (seq < num_seqs), other=0) == 0


@triton.jit
def shard_lse(lse, place, valid, empty, LSE: tl.constexpr):
    """This rank's LSE in float32; -inf where its shard is empty, whatever the attention kernel wrote."""
    stated = tl.load(lse.to(tl.pointer_type(LSE)) + place, mask=valid, other=0.0).to(tl.float32)
    return tl.where(empty, -float("inf"), stated)


@integer_kernel
def merge_partials(
    partial: tl.int64,
    partial_stride_token: tl.int64,
    partial_stride_head: tl.int64,
    lse: tl.int64,
    lse_stride_token: tl.int64,
    lse_stride_head: tl.int64,
    seq_lens: tl.int64,
    query_start_loc: tl.int64,
    num_seqs: tl.int32,
    merged: tl.int64,
    peers: tl.int64,
    flags: tl.int64,
    received: tl.int64,
    received_lse: tl.int64,
    state: tl.int64,
    report: tl.int64,
    limit_ns: tl.int64,
    tokens: tl.int32,
    heads: tl.int32,
    capacity: tl.int32,
    ELEMENT: tl.constexpr,
    LSE: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    SEQS: tl.constexpr,
    BASE_E: tl.constexpr,
    RANK: tl.constexpr,
    W: tl.constexpr,
    LANES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Exchange partial outputs [B, W * H, VALUE] with their LSE [B, W * H] and merge into `merged` [B, H, VALUE].

    The arithmetic is `merge.merge_partials`'s. A token beyond `query_start_loc[num_seqs]` (padding of a CUDA graph) or
    of a request with no row here (`seq_lens` [num_seqs] = 0) counts as an empty shard, whatever the attention kernel
    wrote for it.

    Args:
        partial, merged: addresses; strides of `partial` in units of 16 bytes, of `lse` in elements.
        received: [2, W, capacity, H, VALUE] and received_lse: [2, W, capacity, H], byte offsets into a region.
        flags: a byte offset too.
        state: [2] int64 of this rank: epoch, blocks that have signalled.
        The others are those of `gather_query`.
    """
    each: tl.constexpr = 128 // ELEMENT.primitive_bitwidth
    regions = pointer(peers, tl.int64)
    counters = pointer(state, tl.int64)
    epoch = tl.load(counters) + 1
    slot = epoch & 1
    columns = tl.arange(0, VALUE)[None, :]
    outputs = pointer(partial, ELEMENT)
    for tile in range(tl.program_id(0), tl.cdiv(tokens * heads, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        valid = row < tokens * heads
        token = (row // heads).to(tl.int64)
        head = row % heads
        empty = is_empty(token, valid, seq_lens, query_start_loc, num_seqs, SEQS)
        here = ((slot * W + RANK) * capacity + token) * heads + head
        for step in tl.static_range(W - 1):
            peer = (RANK + 1 + step) % W
            region = tl.load(regions + peer)
            its_head = peer * heads + head
            place = (token * partial_stride_token + its_head * partial_stride_head)[:, None] * each
            value = tl.load(outputs + place + columns, mask=valid[:, None])
            weight = shard_lse(lse, token * lse_stride_token + its_head * lse_stride_head, valid, empty, LSE)
            target = pointer(region + received, ELEMENT) + here[:, None] * VALUE
            tl.store(target + columns, value, mask=valid[:, None])
            tl.store(pointer(region + received_lse, tl.float32) + here, weight, mask=valid)
    rendezvous(regions, flags, counters, epoch, report, limit_ns, RANK, W, LANES, PTX)

    own = tl.load(regions + RANK)
    payload = pointer(own + received, ELEMENT)
    weights = pointer(own + received_lse, tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(tokens * heads, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        valid = row < tokens * heads
        token = (row // heads).to(tl.int64)
        head = row % heads
        empty = is_empty(token, valid, seq_lens, query_start_loc, num_seqs, SEQS)
        its_head = RANK * heads + head
        mine = shard_lse(lse, token * lse_stride_token + its_head * lse_stride_head, valid, empty, LSE)
        largest = tl.where(tl.abs(mine) < float("inf"), mine, -float("inf"))
        for step in tl.static_range(W - 1):
            source = (RANK + 1 + step) % W
            here = ((slot * W + source) * capacity + token) * heads + head
            weight = tl.load(weights + here, mask=valid, other=0.0, cache_modifier=".cg")
            largest = tl.maximum(largest, tl.where(tl.abs(weight) < float("inf"), weight, -float("inf")))
        largest = tl.where(largest == -float("inf"), 0.0, largest)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, VALUE], tl.float32)
        for step in tl.static_range(W):
            source = (RANK + step) % W  # step 0 is this rank itself
            here = ((slot * W + source) * capacity + token) * heads + head
            weight = mine
            if step > 0:
                weight = tl.load(weights + here, mask=valid, other=0.0, cache_modifier=".cg")
            shifted = tl.where(tl.abs(weight) < float("inf"), weight - largest, -float("inf"))
            factor = tl.exp(shifted) if BASE_E else tl.exp2(shifted)
            # Weight zero: the payload is not even read, since 0 * NaN would be NaN.
            read = (valid & (factor > 0.0))[:, None]
            if step == 0:
                place = (token * partial_stride_token + its_head * partial_stride_head)[:, None] * each
                value = tl.load(outputs + place + columns, mask=read, other=0.0)
            else:
                place = here[:, None] * VALUE
                value = tl.load(payload + place + columns, mask=read, other=0.0, cache_modifier=".cg")
            sums += factor[:, None] * value.to(tl.float32)
            total += factor
        result = (sums / tl.where(total > 0.0, total, 1.0)[:, None]).to(ELEMENT)
        target = pointer(merged, ELEMENT) + row.to(tl.int64)[:, None] * VALUE
        tl.store(target + columns, result, mask=valid[:, None])
