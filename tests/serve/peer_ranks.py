# SPDX-License-Identifier: Apache-2.0
"""W processes run the peer kernels themselves, in the Triton interpreter, over memory they share.

Run as a script with TRITON_INTERPRET=1: `peer_ranks.py WORLD_SIZE ...`. Every rank really spins on its flags until
the others have signalled. Prints each world size on which every rank agreed with the oracle.
"""

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent))
import peer_oracle

from kimi_k3_serve.attention.peer_exchange import Geometry, PeerExchange
from kimi_k3_serve.symmetric import connect
from kimi_k3_serve.symmetric.deadline import RendezvousTimeout

HEADS, LATENT, ROPE, BLOCKS = 3, 32, 8, 2
CPU = torch.device("cpu")


def rank_main(rank: int, world_size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        for dtype, ubatches in [(torch.float32, 2), (torch.bfloat16, 1)]:
            geometry = Geometry(HEADS, LATENT, ROPE, dtype, dtype, max_tokens=6, ubatches=ubatches)
            region = connect(geometry.nbytes(world_size), dist.group.WORLD, torch.device("cpu")).get()
            exchange = PeerExchange(region, geometry, blocks=BLOCKS, timeout_s=60)
            if world_size == 2:
                exchange.load(base_e=True)
                rows = {exchange.grid(tokens)[1] for tokens in range(1, 7)}
                assert {key[0] for key in exchange.mergers} == rows and len(exchange.mergers) == len(rows)
            check(exchange, dtype)
            if world_size < 8 or dtype == torch.float32:  # eight processes on two cores are slow
                check_gathers_alone(exchange, dtype)
        if world_size > 1:
            check_that_a_missing_rank_is_named(exchange)
    except BaseException:
        traceback.print_exc()
        raise


def check(exchange: PeerExchange, dtype: torch.dtype) -> None:
    rank, world = exchange.rank, exchange.world_size
    own = slice(rank * HEADS, (rank + 1) * HEADS)
    # Token counts that change the grid, and the same ubatch twice in a row: epochs, slots and flags must follow.
    for step, tokens in enumerate((1, 6, 2, 5, 1) if world < 8 else (1, 3, 2)):  # fewer with eight, as above
        ubatch = step % exchange.geometry.ubatches
        base_e = step % 2 == 0
        generator = torch.Generator().manual_seed(step)
        queries = torch.randn(tokens, world * HEADS, LATENT + ROPE, generator=generator).to(dtype)
        nope, rope = queries[:, own].split(
            [LATENT, ROPE], dim=-1
        )  # strided views, as the layer hands them over
        if rank == step % world:
            time.sleep(0.02)  # one rank late
        gathered = exchange.gather(nope, rope, ubatch)
        assert torch.equal(gathered, queries), "gathered queries differ"

        outputs, lses = peer_oracle.partials(world, tokens, world * HEADS, LATENT, seed=step, base_e=base_e)
        outputs = outputs.to(dtype)
        expected = peer_oracle.merged(outputs, lses, base_e=base_e)[:, own]
        transposed = lses[rank].T.contiguous().T  # [B, H] with the strides of FLASH_ATTN_MLA
        assert tokens == 1 or not transposed.is_contiguous()
        if rank == (step + 1) % world:
            time.sleep(0.02)
        lens, starts = torch.ones(tokens, dtype=torch.int32), torch.arange(tokens + 1, dtype=torch.int32)
        merged = exchange.merge(outputs[rank], transposed, lens, starts, base_e=base_e, ubatch=ubatch)
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(merged.double(), expected, rtol=tolerance, atol=tolerance)

    # Empty shards by metadata: an LSE that looks alive does not count, neither in a request without rows here nor
    # in the padding that follows the last request. Two tokens a request; the sixth row belongs to none.
    lens = torch.tensor([[4, 0 if r % 2 else 3, 1] for r in range(world)])
    starts = torch.tensor([0, 2, 4, 5])
    outputs, lses = peer_oracle.partials(world, 6, world * HEADS, LATENT, seed=99)
    outputs = outputs.to(dtype)
    seen = lses.clone()
    for r in range(world):
        for token, request in enumerate([0, 0, 1, 1, 2, 2]):
            if token == 5 or lens[r, request] == 0:
                lses[r, token] = -torch.inf
    exchange.gather(*torch.zeros(6, HEADS, LATENT + ROPE, dtype=dtype).split([LATENT, ROPE], dim=-1))
    merged = exchange.merge(outputs[rank], seen[rank], lens[rank].int(), starts.int())
    expected = peer_oracle.merged(outputs, lses)[:, own]
    torch.testing.assert_close(merged.double(), expected, rtol=1e-2, atol=1e-2)
    assert torch.equal(merged[5], torch.zeros(HEADS, LATENT, dtype=dtype))


def check_gathers_alone(exchange: PeerExchange, dtype: torch.dtype) -> None:
    """In a row, without a merge between: ever other blocks, one rank late; and a word that would read as absent."""
    rank, world = exchange.rank, exchange.world_size
    own = slice(rank * HEADS, (rank + 1) * HEADS)
    late = torch.Generator().manual_seed(5)
    for step, tokens in enumerate((6, 1, 6, 6, 3, 1, 1, 6) if world < 8 else (3, 1, 3)):
        generator = torch.Generator().manual_seed(100 + step)
        queries = torch.randn(tokens, world * HEADS, LATENT + ROPE, generator=generator).to(dtype)
        words = queries.view(torch.int64)
        words[0, ::2, 1] = -1
        if int(torch.randint(world, (), generator=late)) == rank:
            time.sleep(0.02)
        gathered = exchange.gather(*queries[:, own].split([LATENT, ROPE], dim=-1))
        lost = words == -1
        assert torch.equal(gathered.view(torch.int64)[~lost], words[~lost])
        assert gathered.view(torch.int64)[lost].view(dtype).isnan().all()
    dist.barrier()
    offset, size = exchange.parts["slots"]
    assert not exchange.region.peers[rank][offset : offset + size].any()
    dist.barrier()


def check_that_a_missing_rank_is_named(exchange: PeerExchange) -> None:
    """Only rank 0 comes: it stops waiting, and its next call says whom it missed (here, without a trap, last)."""
    exchange.deadline.limit_s = 0.01
    query = torch.zeros(1, HEADS, LATENT + ROPE, dtype=exchange.geometry.query_dtype).split(
        [LATENT, ROPE], -1
    )
    if exchange.rank == 0:
        epoch = int(exchange.epochs[0, 0]) + 1
        exchange.gather(*query)
        try:
            exchange.gather(*query)
        except RendezvousTimeout as late:
            last = exchange.world_size - 1
            assert f"rank 0: rank {last} did not come to query gather {epoch} of ubatch 0" in str(late), late
        else:
            raise AssertionError("nobody was missed")
    dist.barrier()


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    torch.set_num_threads(1)
    for world_size in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(rank_main, (world_size, folder), world_size, start_method="fork")
        print(world_size, flush=True)
