# SPDX-License-Identifier: Apache-2.0
"""What the dense MLA kernel of b12x 1.5.1 takes, as pure functions that give a reason or None."""

HEAD_TILE = 8  # query heads a block of the kernel covers
MAX_LOCAL_TOKENS = 1_048_576  # rows of one request in one rank's cache
MAX_QUERY_ROWS = 65_536
MLA_DIMS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
COLLECTIVE_WORLD_SIZES = (2, 4, 8, 16)


def padded_heads(heads: int) -> int:
    """Heads that the kernel runs for `heads` real ones: the next multiple of its tile."""
    return -(-heads // HEAD_TILE) * HEAD_TILE


def longest_local(tokens: int, dcp: int, interleave: int) -> int:
    """Rows of a context of `tokens` on the rank that holds most: ceil(tokens / (W * I)) * I."""
    return -(-tokens // (dcp * interleave)) * interleave


def geometry_refusal(
    *,
    local_heads: int,
    dcp: int,
    pcp: int,
    interleave: int,
    max_model_len: int,
    max_num_seqs: int,
) -> str | None:
    """Why the kernel cannot serve this layout; None where it can.

    Without DCP the local heads are padded to the tile and the synthetic ones stripped (TP16: 6 of 8). Under DCP the
    gathered heads must fill the tile exactly: 6 heads a rank make 48 at DCP8 and 96 at DCP16, but 12 at DCP2, and
    synthetic heads would have to be exchanged too.
    """
    if pcp > 1:
        return f"prefill context parallelism of {pcp} is not supported; B12X_MLA needs 1"
    gathered = local_heads * dcp
    if dcp > 1 and gathered % HEAD_TILE:
        return f"{local_heads} heads a rank at DCP{dcp} gather to {gathered}, not a multiple of {HEAD_TILE}"
    local = longest_local(max_model_len, dcp, interleave)
    if local > MAX_LOCAL_TOKENS:
        return (
            f"the longest local shard of a {max_model_len}-token context is {local} tokens; "
            f"the kernel holds {MAX_LOCAL_TOKENS}"
        )
    if max_num_seqs > MAX_QUERY_ROWS:
        return f"max_num_seqs {max_num_seqs} is above the kernel's {MAX_QUERY_ROWS} query rows"
    return None
