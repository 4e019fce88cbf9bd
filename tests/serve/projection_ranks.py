# SPDX-License-Identifier: Apache-2.0
"""W processes run the projection gather itself, in the Triton interpreter, over memory they share.

Run as a script with TRITON_INTERPRET=1: `projection_ranks.py CASE WORLD_SIZE`. Prints "ok" where every rank holds what
a replicated projection would have given it, else what differed; a case that starts with "mutation" breaks the protocol
on purpose and must not print "ok".
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from kimi_k3_serve.projection import kernels
from kimi_k3_serve.projection.exchange import MAX_ROWS, Geometry, PeerGather, PeerProjection
from kimi_k3_serve.projection.shard import KV_A, Q_A, local_widths
from kimi_k3_serve.symmetric import connect
from kimi_k3_serve.symmetric.deadline import RendezvousTimeout

DELAY_S = 0.02
LONG_DELAY_S = 0.5  # in a mutation: long enough for the others to run ahead as far as they can
BITS = {2: torch.int16, 4: torch.int32}


class Wrong(Exception):
    """What a rank holds is not what it should hold."""


def rows_of(seed: int, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, width] of arbitrary bits: NaNs with payloads, infinities and subnormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (rows, width), generator=generator)
    return bits.to(BITS[dtype.itemsize]).view(dtype)


def compare(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    bits = BITS[expected.dtype.itemsize]
    if found.shape != expected.shape or not torch.equal(found.view(bits), expected.view(bits)):
        raise Wrong(what)


def shard(logical: torch.Tensor, widths: tuple[int, ...], rank: int, world_size: int) -> torch.Tensor:
    """The columns that `rank` computes of each part, side by side."""
    parts = logical.split(list(widths), dim=1)
    return torch.cat([part.chunk(world_size, dim=1)[rank] for part in parts], dim=1)


def gather(rank: int, world_size: int, first: int, second: int, ubatches: int = 1) -> PeerGather:
    """Of `first` and `second` bytes a row and rank."""
    geometry = Geometry(first, second, ubatches=ubatches)
    region = connect(geometry.nbytes(world_size), dist.group.WORLD, torch.device("cpu")).get()
    return PeerGather(region, geometry)


def merged(rank: int, world_size: int) -> None:
    """One to eight rows of Kimi-K3's widths in both dtypes, the gate's columns beside them, one rank late each time."""
    widths = (Q_A, KV_A)
    own = sum(local_widths(widths, world_size))
    source = gather(rank, world_size, *(2 * width for width in local_widths(widths, world_size)))
    steps = {2: (1, 8, 2, 1), 4: (1, 5, 2)}.get(world_size, (1, 2, 1))
    for step, rows in enumerate(steps):
        dtype = (torch.bfloat16, torch.float16)[step % 2]
        logical = rows_of(step, rows, sum(widths), dtype)
        beside = torch.zeros(rows, own + 24, dtype=dtype)
        local = beside[:, :own].copy_(shard(logical, widths, rank, world_size))
        if rank == step % world_size:
            time.sleep(DELAY_S)
        assert source.takes(local)
        compare(source.merged(local), logical, f"step {step}, {rows} rows")


def pair(rank: int, world_size: int) -> None:
    """A BF16 and an FP32 projection behind one rendezvous, bit by bit; two ubatches in turn; epochs that wrap."""
    widths = (16 * world_size, 8 * world_size)
    source = gather(rank, world_size, 2 * 16, 4 * 8, ubatches=2)
    source.epochs[1].fill_(2**31 - 3)  # becomes -2**31 on the way
    source.epochs[0].fill_(-3)  # becomes 0: what an unwritten slot carries
    dist.barrier()
    for step, rows in enumerate((1, 8, 1, 3, 8, 1)):
        first, second = (
            rows_of(10 * step + i, rows, width, dtype)
            for i, (width, dtype) in enumerate(zip(widths, (torch.bfloat16, torch.float32), strict=True))
        )
        if rank == (step + 1) % world_size:
            time.sleep(DELAY_S)
        own = [part.chunk(world_size, dim=1)[rank] for part in (first, second)]  # strided, as a slice is
        found = source.pair(*own, ubatch=step // 2 % 2)
        for part, expected in zip(found, (first, second), strict=True):
            compare(part, expected, f"step {step}")


def projected(rank: int, world_size: int) -> None:
    """The product and its gather in one launch: exact on whole numbers, in both dtypes, one rank late each time."""
    widths, inputs = (12 * world_size, 4 * world_size), 96
    geometry = Geometry(2 * 12, 2 * 4, ubatches=2)
    region = connect(geometry.nbytes(world_size), dist.group.WORLD, torch.device("cpu")).get()
    source = PeerProjection(region, geometry, inputs)
    source.epochs[1].fill_(-3)  # wraps on the way
    dist.barrier()
    for step, rows in enumerate((1, 8, 3, 1, 2, 1)):
        dtype = (torch.bfloat16, torch.float16)[step % 2]
        generator = torch.Generator().manual_seed(step)
        # Sums of at most 192, which BF16 holds: the interpreter truncates where a GPU rounds.
        hidden = torch.randint(-1, 2, (rows, inputs), generator=generator).to(dtype)
        weight = torch.randint(-2, 3, (sum(widths), inputs), generator=generator).to(dtype)
        own = shard(weight.T, widths, rank, world_size).T.contiguous()
        if rank == step % world_size:
            time.sleep(DELAY_S)
        assert source.takes(hidden, own)
        expected = (hidden.float() @ weight.float().T).to(dtype)
        compare(source.project(hidden, own, ubatch=step // 3), expected, f"step {step}, {rows} rows")


def steps(rank: int, world_size: int, before: Callable[[PeerGather, int], None]) -> None:
    """Six launches of one row, `before` each of them called with the gather and the step."""
    source = gather(rank, world_size, 2 * 16, 2 * 8)
    for step in range(6):
        logical = rows_of(step, 1, 24 * world_size, torch.bfloat16)
        before(source, step)
        local = shard(logical, (16 * world_size, 8 * world_size), rank, world_size)
        compare(source.merged(local), logical, f"step {step}")


def late_inside(rank: int, world_size: int, *, delay: float = DELAY_S) -> None:
    """The last rank is late between its push and its receive: the others run ahead by one launch, not by two."""
    received: Any = kernels.receive

    def receive(address: Any, epoch: Any, valid: Any, *others: Any) -> Any:
        time.sleep(delay)
        words = local_words(address)
        if any(stamp - epoch.handle.data[0] == 1 for stamp in words):
            raise Wrong("a slot was overwritten before it was read")
        return received(address, epoch, valid, *others)

    if rank == world_size - 1:
        kernels.receive = receive
    steps(rank, world_size, lambda source, step: None)


def missing(rank: int, world_size: int) -> None:
    """Only rank 0 comes: it stops waiting, and its next call says whom it missed. Gather and product."""
    geometry = Geometry(2 * 16, 2 * 8)
    regions = [
        connect(geometry.nbytes(world_size), dist.group.WORLD, torch.device("cpu")).get() for _ in range(2)
    ]
    gather = PeerGather(regions[0], geometry, timeout_s=0.01)
    product = PeerProjection(regions[1], geometry, 32, timeout_s=0.01)
    local = torch.zeros(2, 24, dtype=torch.bfloat16)
    hidden, weight = (torch.zeros(rows, 32, dtype=torch.bfloat16) for rows in (2, 24))
    for call in (lambda: gather.merged(local), lambda: product.project(hidden, weight)) if rank == 0 else ():
        call()
        try:
            call()
        except RendezvousTimeout as late:
            if "rank 0: rank 1 did not come to gather 1 of a projection's row within 0.01 s" not in str(late):
                raise Wrong(str(late)) from late
        else:
            raise Wrong("nobody was missed")
    dist.barrier()


def local_words(address: Any) -> list[int]:
    """The epochs that the words at these addresses carry."""
    import ctypes

    return [ctypes.c_int32.from_address(int(place) + 4).value for place in address.handle.data[:4]]


def one_slot(rank: int, world_size: int) -> None:
    kernels.slot_of = lambda epoch: epoch & 0  # type: ignore[assignment]
    late_inside(rank, world_size, delay=LONG_DELAY_S)


def no_wait(rank: int, world_size: int) -> None:
    """Receives whatever is there while another rank is late."""
    received: Any = kernels.receive

    def receive(address: Any, epoch: Any, valid: Any, *others: Any) -> Any:
        payload = received(address, epoch, valid & (epoch < 0), *others)
        return payload

    kernels.receive = receive
    steps(rank, world_size, lambda source, step: time.sleep(DELAY_S * (rank == 1)))


def frozen_epoch(rank: int, world_size: int) -> None:
    """As if a graph's replay carried the epoch of its capture: the words of the launch before pass for new ones."""

    def before(source: PeerGather, step: int) -> None:
        source.epochs.zero_()
        time.sleep(DELAY_S * (rank == 1))

    steps(rank, world_size, before)


CASES: dict[str, Callable[[int, int], None]] = {
    "merged": merged,
    "pair": pair,
    "projected": projected,
    "late inside": late_inside,
    "missing": missing,
    "mutation: one slot": one_slot,
    "mutation: no wait": no_wait,
    "mutation: frozen epoch": frozen_epoch,
}


def rank_main(rank: int, case: str, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    assert MAX_ROWS == 8
    CASES[case](rank, world_size)


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    case, world_size = sys.argv[1], int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(rank_main, (case, world_size, folder), world_size, start_method="fork")
        except mp.ProcessRaisedException as error:
            print(str(error).strip().splitlines()[-1])
        else:
            print("ok")
