# SPDX-License-Identifier: Apache-2.0
"""One rank's side of the protocol: push rows and signal, then wait. In Triton, and in PyTorch for the CPU.

Vocabulary: a *word* is 32 bits; `words` is the paged cache [blocks, block_size, words a row] as int32.
"""

import logging
import threading
import time
from typing import Protocol

import torch

from kimi_k3_serve.publish.chunks import DeviceChunk
from kimi_k3_serve.publish.layout import SLOTS, Layout
from kimi_k3_serve.symmetric.region import Region, addresses, view
from kimi_k3_serve.symmetric.shared import fence

logger = logging.getLogger("vllm.kimi_k3_serve.publish")

TILE_BYTES = 16 << 10
"""Latent bytes of a program's tile: with 128 threads, eight 16-byte loads each before the first store."""
PROGRAMS_PER_SM = 4


class RendezvousTimeout(RuntimeError):
    """A rank did not publish in time. The engine cannot go on: its peers' rows are missing."""


def timeout_text(
    rank: int, missing: int, slot: int, ubatch: int, epoch: int, last: int, limit_s: float
) -> str:
    return (
        f"rank {rank}: rank {missing} did not publish epoch {epoch} into slot {slot} of ubatch {ubatch} within "
        f"{limit_s:g} s (its last there was {last}); see that rank's log, or raise KIMI_K3_PUBLISH_TIMEOUT_S"
    )


class Rank(Protocol):
    """What `Publisher` needs of an implementation."""

    def push(
        self, words: torch.Tensor, block_table: torch.Tensor, chunk: DeviceChunk, slot: int, ubatch: int
    ) -> None:
        """Copy this rank's rows of the chunk into every rank's slot, advance the epoch, signal."""
        ...

    def wait(self, slot: int, ubatch: int) -> None:
        """Until every rank has signalled this epoch in the slot.

        Raises:
            RendezvousTimeout: a rank never came (on a GPU: at the next call, and in the log).
        """
        ...


class TorchRank:
    """Host memory, plain PyTorch: what the engine on the CPU runs."""

    def __init__(self, region: Region, layout: Layout, timeout_s: float) -> None:
        self.region, self.layout, self.timeout_s = region, layout, timeout_s
        self.epochs = [0] * layout.ubatches

    def push(
        self, words: torch.Tensor, block_table: torch.Tensor, chunk: DeviceChunk, slot: int, ubatch: int
    ) -> None:
        layout, begin = self.layout, self.layout.slot_offset(ubatch, slot)
        count = int(chunk.num_local_rows)
        destination, request, position = (row[:count].long() for row in chunk.rows)
        kept = destination >= 0
        destination, request, position = destination[kept], request[kept], position[kept]
        block_size = words.shape[1]
        rows = words[block_table[request, position // block_size].long(), position % block_size]
        latent, rope = layout.latent_bytes // 4, layout.rope_bytes // 4
        for peer in self.region.peers:
            view(peer, begin + layout.kv_c_offset, (layout.capacity, latent), torch.int32)[destination] = (
                rows[:, :latent]
            )
            view(peer, begin + layout.k_pe_offset, (layout.capacity, rope), torch.int32)[destination] = rows[
                :, latent:
            ]
        fence()  # the rows before the signal
        self.epochs[ubatch] += 1
        for peer in self.region.peers:
            view(peer, begin, (layout.world_size,), torch.int64)[self.region.rank] = self.epochs[ubatch]

    def wait(self, slot: int, ubatch: int) -> None:
        begin, epoch = self.layout.slot_offset(ubatch, slot), self.epochs[ubatch]
        own = self.region.peers[self.region.rank]
        signals = view(own, begin, (self.layout.world_size,), torch.int64).numpy()
        deadline, polls = time.monotonic() + self.timeout_s, 0
        while (signals < epoch).any():
            polls += 1
            # Ranks may share a core: give it away at once, and for longer when the wait is long.
            time.sleep(0 if polls < 100 else 50e-6)
            if time.monotonic() > deadline:
                missing = int((signals < epoch).argmax())
                raise RendezvousTimeout(
                    timeout_text(
                        self.region.rank,
                        missing,
                        slot,
                        ubatch,
                        epoch,
                        int(signals[missing]),
                        self.timeout_s,
                    )
                )
        fence()  # the signals before the rows


class TritonRank:
    """The kernels of `kernel.py`: on a GPU, or in the Triton interpreter on host memory."""

    def __init__(self, region: Region, layout: Layout, timeout_s: float, device: torch.device) -> None:
        from kimi_k3_serve.publish import kernel

        self.kernel, self.region, self.layout, self.timeout_s = kernel, region, layout, timeout_s
        self.on_gpu = device.type == "cuda"
        self.peers = torch.tensor(addresses(region), dtype=torch.int64, device=device)
        self.epochs = torch.zeros(layout.ubatches, dtype=torch.int64, device=device)
        self.finished = torch.zeros(layout.ubatches, dtype=torch.int32, device=device)
        # Pinned, so that it can still be read when a lost rendezvous has cost the CUDA context.
        self.report = torch.zeros(4, dtype=torch.int64, pin_memory=self.on_gpu)
        self.programs = 3  # in the interpreter, one after the other
        if self.on_gpu:
            self.programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
            threading.Thread(target=self.watch, name="publish-watch", daemon=True).start()

    def push(
        self, words: torch.Tensor, block_table: torch.Tensor, chunk: DeviceChunk, slot: int, ubatch: int
    ) -> None:
        self.raise_if_late()
        layout, capacity = self.layout, chunk.rows.shape[1]
        rows = max(1, TILE_BYTES // layout.latent_bytes)
        programs = min(self.programs, -(-capacity // rows))
        self.kernel.publish_kernel[(programs,)](
            words,
            block_table,
            chunk.rows,
            chunk.num_local_rows,
            self.peers,
            self.epochs[ubatch:],
            self.finished[ubatch:],
            self.region.multicast_address,
            layout.slot_offset(ubatch, slot),
            layout.kv_c_offset,
            layout.k_pe_offset,
            words.stride(0),
            words.stride(1),
            block_table.stride(0),
            capacity,
            BLOCK_SIZE=words.shape[1],
            LATENT_WORDS=layout.latent_bytes // 4,
            ROPE_WORDS=layout.rope_bytes // 4,
            RANK=self.region.rank,
            WORLD_SIZE=self.region.world_size,
            ROWS=rows,
            MULTICAST=bool(self.region.multicast_address),
        )

    def wait(self, slot: int, ubatch: int) -> None:
        # A captured wait may replay long after its peers' last step: it is not bounded.
        unbounded = self.on_gpu and torch.cuda.is_current_stream_capturing()
        self.kernel.wait_kernel[(1,)](
            self.peers,
            self.epochs[ubatch:],
            self.report,
            self.layout.slot_offset(ubatch, slot),
            0 if unbounded else int(self.timeout_s * 1e9),
            RANK=self.region.rank,
            WORLD_SIZE=self.region.world_size,
            LANES=1 << (self.region.world_size - 1).bit_length(),
            PTX=self.on_gpu,
            num_warps=1,
        )
        if not self.on_gpu:
            self.raise_if_late()

    def raise_if_late(self) -> None:
        if (missing := int(self.report[0])) > 0:
            last, epoch, offset = self.report[1:].tolist()
            ubatch, slot = divmod(offset // self.layout.slot_bytes, SLOTS)
            raise RendezvousTimeout(
                timeout_text(self.region.rank, missing - 1, slot, ubatch, epoch, last, self.timeout_s)
            )

    def watch(self) -> None:
        """Name the missing rank in the log: the CUDA error that follows cannot."""
        while not int(self.report[0]):
            time.sleep(1.0)
        try:
            self.raise_if_late()
        except RendezvousTimeout as error:
            logger.critical("%s", error)
