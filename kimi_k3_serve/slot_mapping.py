# SPDX-License-Identifier: Apache-2.0
"""Which rank keeps a token's KV row under decode context parallelism, and in which slot."""

import torch

PAD_SLOT = -1


def slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    *,
    block_size: int,
    world_size: int = 1,
    rank: int = 0,
    interleave: int = 1,
) -> torch.Tensor:
    """Map every scheduled token to its slot in this rank's paged cache, or to `PAD_SLOT`.

    W ranks share *virtual blocks* of `block_size * W` consecutive positions. Inside one, runs of
    `interleave` positions go to rank 0, 1, ..., W-1, 0, ...: position p belongs to rank
    ((p mod (block_size * W)) // interleave) mod W. Each rank keeps its runs back to back in the
    physical block that the block table names for that virtual block.

    Args:
        query_start_loc: [num_reqs + 1], first token of each request in the batch.
        positions: [num_tokens], position of each token in its own request.
        block_table: [>= num_reqs, max_blocks], physical block of each virtual block.
        block_size: rows of one physical block; a multiple of `interleave`.

    Returns:
        [num_tokens] int64: physical block * block_size + row, or -1 for another rank's token.
    """
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    request = torch.repeat_interleave(torch.arange(len(query_lens)), query_lens.long())
    positions = positions[: len(request)].long()

    virtual_block_size = block_size * world_size
    virtual_block = positions // virtual_block_size
    offset = positions % virtual_block_size
    row = offset // (world_size * interleave) * interleave + offset % interleave
    slots = block_table[request, virtual_block].long() * block_size + row
    owner = offset // interleave % world_size
    return torch.where(owner == rank, slots, PAD_SLOT)
