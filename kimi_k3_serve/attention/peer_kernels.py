# SPDX-License-Identifier: Apache-2.0
"""Query gather and LSE-weighted merge over peer memory: two Triton kernels, one launch each.

Protocol
--------
W ranks call the same kernels in the same order with the same token count, so block b of a launch does the same
rows on every rank. A launch is a rendezvous, block by block:

1. **push**    block b stores its rows into every rank's region (its own included), through peer pointers;
2. **signal**  it stores the launch's epoch into flag [rank, b] of every rank: `release`, system scope, after a
               block barrier, so whoever sees the epoch sees the rows of all threads of the block;
3. **wait**    it polls its own region's flags [0..W-1, b] with `acquire` until each holds at least this epoch;
4. **use**     what it waited for: the merge reads the W partials of its rows; the gather has nothing to do, its
               consumer is the next kernel on the stream, which starts when every block has waited.

The last block to finish writes the epoch (64 bits, device memory). No host state advances, so a CUDA graph replays it.

Why a buffer is never overwritten while it is read:

- *merge*: two slots, by the epoch's parity. Epoch e+2 is pushed only after this rank's launch e+1 has ended, hence
  after every other rank has begun e+1, hence after it has ended e (stream order), which read the slot.
- *gathered query*: one buffer, for a captured attention kernel reads a fixed address. The next gather is pushed only
  after this rank's merge has ended, hence after every other rank has begun its merge, hence after its attention has
  read the buffer. A gather must therefore be followed by a merge, or by any collective of the same ranks, before the
  next gather. Each (ubatch) has its own buffers, flags and epochs.

Every block of a launch must become resident while the others spin: the grid is bounded (`BLOCKS`), one wave of small
blocks. Nothing here needs multicast.
"""

import triton
import triton.language as tl


@triton.jit
def typed(bases, rank, offset, element: tl.constexpr):
    """A pointer `offset` bytes into a rank's region; regions and offsets are multiples of 128 bytes."""
    return tl.multiple_of((tl.load(bases + rank) + offset).to(tl.pointer_type(element)), 16)


@triton.jit
def rendezvous(bases, flags, rank, block, epoch, W: tl.constexpr, BLOCKS: tl.constexpr):
    """Signal and wait: after it, this block may read what the same block of every rank has pushed."""
    tl.debug_barrier()
    for peer in tl.static_range(W):
        flag = typed(bases, peer, flags, tl.int64) + rank * BLOCKS + block
        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
    own = typed(bases, rank, flags, tl.int64) + block
    for peer in tl.static_range(W):
        while tl.atomic_add(own + peer * BLOCKS, 0, sem="acquire", scope="sys") < epoch:
            pass
    tl.debug_barrier()


@triton.jit
def finish(state, epoch):
    """The last block writes the epoch. `state` is [epoch, blocks done]; every block read it before it came here."""
    tl.debug_barrier()
    if tl.atomic_add(state + 1, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, epoch)


# Numbers and alignments that change from step to step or from rank to rank must not each compile a kernel of their
# own: one rank would compile while the others spin.
@triton.jit(
    do_not_specialize=["flags", "query", "rank", "tokens", "heads"], do_not_specialize_on_alignment=["state"]
)
def gather_query(
    nope,
    nope_stride_token,
    nope_stride_head,
    rope,
    rope_stride_token,
    rope_stride_head,
    bases,
    flags,
    query,
    state,
    rank,
    tokens,
    heads,
    W: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Concatenate [B, H, NOPE] and [B, H, ROPE] into every rank's [B, W * H, NOPE + ROPE], this rank's heads.

    `flags` and `query` are byte offsets into the region; `bases` [W] int64 are the ranks' regions.
    """
    element = nope.dtype.element_ty
    epoch = tl.load(state) + 1
    block = tl.program_id(0)
    columns = tl.arange(0, NOPE)[None, :]
    rope_columns = tl.arange(0, ROPE)[None, :]
    for tile in range(block, tl.cdiv(tokens * heads, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        valid = (row < tokens * heads)[:, None]
        token = (row // heads).to(tl.int64)
        head = row % heads
        source = (token * nope_stride_token + head * nope_stride_head)[:, None]
        latent = tl.load(nope + source + columns, mask=valid)
        source = (token * rope_stride_token + head * rope_stride_head)[:, None]
        rotated = tl.load(rope + source + rope_columns, mask=valid)
        target = ((token * W + rank) * heads + head)[:, None] * (NOPE + ROPE)
        for peer in tl.static_range(W):
            gathered = typed(bases, peer, query, element) + target
            tl.store(gathered + columns, latent, mask=valid)
            tl.store(gathered + NOPE + rope_columns, rotated, mask=valid)
    rendezvous(bases, flags, rank, block, epoch, W, BLOCKS)
    finish(state, epoch)


@triton.jit(
    do_not_specialize=[
        *("lse_stride_token", "lse_stride_head", "num_seqs"),
        *("flags", "received", "received_lse", "rank", "tokens", "heads", "capacity"),
    ],
    do_not_specialize_on_alignment=["lse", "seq_lens", "query_start_loc", "state"],
)
def merge_partials(
    partial,
    partial_stride_token,
    partial_stride_head,
    lse,
    lse_stride_token,
    lse_stride_head,
    seq_lens,
    query_start_loc,
    num_seqs,
    merged,
    bases,
    flags,
    received,
    received_lse,
    state,
    rank,
    tokens,
    heads,
    capacity,
    W: tl.constexpr,
    VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SEQS: tl.constexpr,
    BASE_E: tl.constexpr,
    MASK: tl.constexpr,
):
    """Exchange partial outputs [B, W * H, VALUE] with their LSE [B, W * H] and merge into `merged` [B, H, VALUE].

    The arithmetic is `merge.merge_partials`'s. With MASK, a token beyond `query_start_loc[num_seqs]` (padding of a
    CUDA graph) or of a request with no row here (`seq_lens` [num_seqs] = 0) counts as an empty shard, whatever the
    attention kernel wrote for it. `received` [2, W, capacity, H, VALUE] and `received_lse` [2, W, capacity, H] are
    byte offsets into the region.
    """
    element = merged.dtype.element_ty
    epoch = tl.load(state) + 1
    slot = epoch & 1
    block = tl.program_id(0)
    columns = tl.arange(0, VALUE)[None, :]
    for tile in range(block, tl.cdiv(tokens * heads, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        valid = row < tokens * heads
        token = (row // heads).to(tl.int64)
        head = row % heads
        empty = row < 0
        if MASK:
            order = tl.arange(0, SEQS)
            ends = tl.load(query_start_loc + 1 + order, mask=order < num_seqs, other=2147483647)
            seq = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), axis=1)
            length = tl.load(seq_lens + seq, mask=valid & (seq < num_seqs), other=0)
            empty = length == 0
        here = ((slot * W + rank) * capacity + token) * heads + head
        for peer in tl.static_range(W):
            its_head = peer * heads + head
            values = partial + (token * partial_stride_token + its_head * partial_stride_head)[:, None]
            value = tl.load(values + columns, mask=valid[:, None])
            weight = tl.load(lse + token * lse_stride_token + its_head * lse_stride_head, mask=valid)
            weight = tl.where(empty, -float("inf"), weight.to(tl.float32))
            tl.store(
                typed(bases, peer, received, element) + here[:, None] * VALUE + columns,
                value,
                mask=valid[:, None],
            )
            tl.store(typed(bases, peer, received_lse, tl.float32) + here, weight, mask=valid)
    rendezvous(bases, flags, rank, block, epoch, W, BLOCKS)

    payload = typed(bases, rank, received, element)
    weights = typed(bases, rank, received_lse, tl.float32)
    for tile in range(block, tl.cdiv(tokens * heads, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        valid = row < tokens * heads
        token = (row // heads).to(tl.int64)
        head = row % heads
        largest = tl.full([ROWS], -float("inf"), tl.float32)
        for source in tl.static_range(W):
            here = ((slot * W + source) * capacity + token) * heads + head
            weight = tl.load(weights + here, mask=valid, other=0.0, cache_modifier=".cg")
            largest = tl.maximum(largest, tl.where(tl.abs(weight) < float("inf"), weight, -float("inf")))
        largest = tl.where(largest == -float("inf"), 0.0, largest)
        total = tl.zeros([ROWS], tl.float32)
        sums = tl.zeros([ROWS, VALUE], tl.float32)
        for source in tl.static_range(W):
            here = ((slot * W + source) * capacity + token) * heads + head
            weight = tl.load(weights + here, mask=valid, other=0.0, cache_modifier=".cg")
            finite = tl.abs(weight) < float("inf")
            shifted = tl.where(finite, weight - largest, -float("inf"))
            factor = tl.exp(shifted) if BASE_E else tl.exp2(shifted)
            # Weight zero: the payload is not even read, since 0 * NaN would be NaN.
            read = (valid & (factor > 0.0))[:, None]
            value = tl.load(
                payload + here[:, None] * VALUE + columns, mask=read, other=0.0, cache_modifier=".cg"
            )
            sums += factor[:, None] * value.to(tl.float32)
            total += factor
        result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
        tl.store(
            merged + row.to(tl.int64)[:, None] * VALUE + columns, result.to(element), mask=valid[:, None]
        )
    finish(state, epoch)
