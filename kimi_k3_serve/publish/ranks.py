# SPDX-License-Identifier: Apache-2.0
"""One rank's side of the protocol: push rows and signal, then wait. In Triton, and in PyTorch for the CPU."""

import math
import time
from typing import Any, NamedTuple, Protocol

import torch

from kimi_k3_serve.publish.chunks import TILE_ROWS, DeviceChunk
from kimi_k3_serve.publish.layout import Layout
from kimi_k3_serve.symmetric.deadline import Deadline, RendezvousTimeout
from kimi_k3_serve.symmetric.region import Region, addresses, view
from kimi_k3_serve.symmetric.shared import fence
from kimi_k3_serve.triton_launch import Launch

TILE_BYTES = 8 << 10
"""Latent bytes of a program's tile: with 128 threads, four 16-byte loads each before the first store. Twice as many
cost 1 us on two H200s at 65,536 rows of bfloat16, and 3 us of e4m3."""
PROGRAMS_PER_SM = 4


def timeout_text(
    rank: int, missing: int, slot: int, ubatch: int, epoch: int, last: int, limit_s: float
) -> str:
    return (
        f"rank {rank}: rank {missing} did not publish epoch {epoch} into slot {slot} of ubatch {ubatch} within "
        f"{limit_s:g} s (its last there was {last}); see that rank's log, or raise KIMI_K3_PUBLISH_TIMEOUT_S"
    )


class Scaled(NamedTuple):
    """e4m3 rows in the model's dtype: float32(raw) * scale, rounded once, bit for bit what stock's gather yields."""

    scale: torch.Tensor
    """float32, one element."""
    kv_c: torch.Tensor
    """[N, L], contiguous, to be filled."""
    k_pe: torch.Tensor
    """[N, P]."""


class Rank(Protocol):
    """What `Publisher` needs of an implementation."""

    @property
    def epochs(self) -> Any:
        """[ubatches] publications so far."""
        ...

    def push(
        self,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        chunk: DeviceChunk,
        slot: int,
        ubatch: int,
        *,
        wait: bool = False,
        scaled: Scaled | None = None,
    ) -> None:
        """Copy this rank's rows of the chunk into every rank's slot, advance the epoch, signal.

        Args:
            cache: [blocks, block_size, L + P] of the planes' dtype, or e4m3 as uint8; see `Publisher.check`.
            block_table: [requests of the chunk, >= blocks] int32.
            wait: then wait, as `wait` does.
            scaled: also fill in this rank's own rows there.
        """
        ...

    def wait(self, slot: int, ubatch: int) -> None:
        """Until every rank has signalled this epoch in the slot. Alone it is for tests, which delay a rank before it.

        Raises:
            RendezvousTimeout: a rank never came (on a GPU: at the next call, and in the log).
        """
        ...

    def scale(self, chunk: DeviceChunk, slot: int, ubatch: int, scaled: Scaled) -> None:
        """Wait, then fill in the rows that `push` has not."""
        ...


class TorchRank:
    """Host memory, plain PyTorch: what the engine on the CPU runs."""

    def __init__(self, region: Region, layout: Layout, timeout_s: float) -> None:
        self.region, self.layout, self.timeout_s = region, layout, timeout_s
        self.epochs = [0] * layout.ubatches

    def push(
        self,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        chunk: DeviceChunk,
        slot: int,
        ubatch: int,
        *,
        wait: bool = False,
        scaled: Scaled | None = None,
    ) -> None:
        layout, words = self.layout, cache.view(torch.int32)
        count = int(chunk.num_local_rows)
        destination, request, position = (row[:count].long() for row in chunk.rows)
        kept = destination >= 0
        destination, request, position = destination[kept], request[kept], position[kept]
        block_size = words.shape[1]
        rows = words[block_table[request, position // block_size].long(), position % block_size]
        latent = layout.latent_bytes // 4
        for peer in self.region.peers:
            kv_c, k_pe = self.planes(peer, slot, ubatch, torch.int32)
            kv_c[destination], k_pe[destination] = rows[:, :latent], rows[:, latent:]
        fence()  # the rows before the signal
        self.epochs[ubatch] += 1
        for peer in self.region.peers:
            self.signals(peer, slot, ubatch)[self.region.rank] = self.epochs[ubatch]
        if wait:
            self.wait(slot, ubatch)

    def wait(self, slot: int, ubatch: int) -> None:
        epoch = self.epochs[ubatch]
        signals = self.signals(self.region.peers[self.region.rank], slot, ubatch).numpy()
        deadline, polls = time.monotonic() + (self.timeout_s or math.inf), 0
        while (signals < epoch).any():
            polls += 1
            # Ranks may share a core: give it away at once, and for longer when the wait is long.
            time.sleep(0 if polls < 100 else 50e-6)
            if time.monotonic() > deadline:
                missing = int((signals < epoch).argmax())
                last = int(signals[missing])
                raise RendezvousTimeout(
                    timeout_text(self.region.rank, missing, slot, ubatch, epoch, last, self.timeout_s)
                )
        fence()  # the signals before the rows

    def scale(self, chunk: DeviceChunk, slot: int, ubatch: int, scaled: Scaled) -> None:
        self.wait(slot, ubatch)
        own = self.region.peers[self.region.rank]
        for raw, out in zip(
            self.planes(own, slot, ubatch, torch.float8_e4m3fn), (scaled.kv_c, scaled.k_pe), strict=True
        ):
            out.copy_(raw[: chunk.num_rows].float() * scaled.scale)

    def planes(
        self, memory: torch.Tensor, slot: int, ubatch: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """kv_c and k_pe of a slot of one rank, [capacity, row bytes / item size] of `dtype`."""
        layout, begin = self.layout, self.layout.slot_offset(ubatch, slot)
        latent, rope = layout.latent_bytes // dtype.itemsize, layout.rope_bytes // dtype.itemsize
        return (
            view(memory, begin + layout.kv_c_offset, (layout.capacity, latent), dtype),
            view(memory, begin + layout.k_pe_offset, (layout.capacity, rope), dtype),
        )

    def signals(self, memory: torch.Tensor, slot: int, ubatch: int) -> torch.Tensor:
        """[world_size] int64."""
        return view(memory, self.layout.slot_offset(ubatch, slot), (self.layout.world_size,), torch.int64)


class TritonRank:
    """The kernels of `kernel.py`: on a GPU, or in the Triton interpreter on host memory.

    Args:
        region: `layout.nbytes` on every rank, zeroed; `device` is its memory's.
        timeout_s: how long a wait may last; 0: for ever.
    """

    def __init__(self, region: Region, layout: Layout, timeout_s: float, device: torch.device) -> None:
        from triton import language

        from kimi_k3_serve.publish import kernel

        self.dtypes = {
            dtype: getattr(language, str(dtype).removeprefix("torch."))
            for dtype in (torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float32)
        }
        self.kernel, self.region, self.layout = kernel, region, layout
        self.on_gpu = device.type == "cuda"
        self.peers = torch.tensor(addresses(region), dtype=torch.int64, device=device)
        # A ubatch's state lies on 16 bytes: its epoch, and how many programs of a launch have finished.
        self.state = torch.zeros((layout.ubatches, 2), dtype=torch.int64, device=device)
        self.deadline = Deadline(timeout_s, self.late, on_gpu=self.on_gpu)
        self.memory = region.peers[region.rank].data_ptr()
        self.states = [self.state[ubatch].data_ptr() for ubatch in range(layout.ubatches)]
        self.slots = [[layout.slot_offset(u, s) for s in range(layout.slots)] for u in range(layout.ubatches)]
        self.launches: dict[tuple[Any, ...], Launch] = {}
        self.programs = 3  # in the interpreter, one after the other
        if self.on_gpu:
            self.programs = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count

    @property
    def epochs(self) -> torch.Tensor:
        return self.state[:, 0]

    def push(
        self,
        cache: torch.Tensor,
        block_table: torch.Tensor,
        chunk: DeviceChunk,
        slot: int,
        ubatch: int,
        *,
        wait: bool = False,
        scaled: Scaled | None = None,
    ) -> None:
        out = scaled.kv_c.dtype if scaled else None
        key = (cache.shape[1], cache.stride(), wait, out)
        launch = self.launches.get(key) or self.launches.setdefault(key, self.publication(cache, wait, out))
        launch(
            max(1, min(self.programs, -(-chunk.capacity // self.tile_rows))),
            cache.data_ptr(),
            block_table.data_ptr(),
            chunk.memory.data_ptr(),
            chunk.capacity,
            self.peers.data_ptr(),
            self.states[ubatch],
            self.region.multicast_address,
            self.slots[ubatch][slot],
            block_table.stride(0),
            *self.deadline.arguments(),
            *((t.data_ptr() for t in scaled) if scaled else (0, 0, 0)),
        )
        if wait and not self.on_gpu:
            self.deadline.check()

    def wait(self, slot: int, ubatch: int) -> None:
        launch = self.launches.get(("wait",)) or self.launches.setdefault(
            ("wait",), Launch(self.kernel.wait_kernel, self.group_constants(), num_warps=1)
        )
        launch(1, *self.awaited(slot, ubatch))
        if not self.on_gpu:
            self.deadline.check()

    def scale(self, chunk: DeviceChunk, slot: int, ubatch: int, scaled: Scaled) -> None:
        key = ("scale", scaled.kv_c.dtype)
        launch = self.launches.get(key) or self.launches.setdefault(key, self.scaling(scaled.kv_c.dtype))
        # At least one, which waits: there may be no row of another rank, and yet its signal is due.
        programs = max(1, min(self.programs, chunk.num_tiles))
        launch(
            programs,
            *self.awaited(slot, ubatch),
            chunk.memory.data_ptr(),
            chunk.capacity,
            scaled.scale.data_ptr(),
            scaled.kv_c.data_ptr(),
            scaled.k_pe.data_ptr(),
        )
        if not self.on_gpu:
            self.deadline.check()

    @property
    def tile_rows(self) -> int:
        return max(1, TILE_BYTES // self.layout.latent_bytes)

    def awaited(self, slot: int, ubatch: int) -> tuple[int, ...]:
        """The arguments with which `wait_kernel` and `scale_kernel` begin."""
        return self.memory, self.states[ubatch], self.slots[ubatch][slot], *self.deadline.arguments()

    def group_constants(self) -> dict[str, Any]:
        lanes = 1 << (self.region.world_size - 1).bit_length()
        return {"WORLD_SIZE": self.region.world_size, "LANES": lanes, "PTX": self.on_gpu}

    def publication(self, cache: torch.Tensor, wait: bool, out: torch.dtype | None) -> Launch:
        """The publishing kernel for a cache of this geometry."""
        layout = self.layout
        # Rows that are also scaled are read as bytes, others in words of 32 bits.
        word = 1 if out else 4
        block_bytes, row_bytes = (stride * cache.element_size() for stride in cache.stride()[:2])
        constants = self.group_constants() | {
            "BLOCK_SIZE": cache.shape[1],
            "BLOCK_STRIDE": block_bytes // word,
            "ROW_STRIDE": row_bytes // word,
            "LATENT": layout.latent_bytes // word,
            "ROPE": layout.rope_bytes // word,
            "KV_C_OFFSET": layout.kv_c_offset,
            "K_PE_OFFSET": layout.k_pe_offset,
            "WORD": self.dtypes[torch.uint8 if out else torch.int32],
            "OUT": self.dtypes[out or torch.float32],
            "ROWS": self.tile_rows,
            "RANK": self.region.rank,
            "MULTICAST": bool(self.region.multicast_address),
            "SCALED": out is not None,
            "WAIT": wait,
        }
        return Launch(self.kernel.publish_kernel, constants, num_warps=4)

    def scaling(self, out: torch.dtype) -> Launch:
        layout = self.layout
        constants = self.group_constants() | {
            "LATENT": layout.latent_bytes,
            "ROPE": layout.rope_bytes,
            "KV_C_OFFSET": layout.kv_c_offset,
            "K_PE_OFFSET": layout.k_pe_offset,
            "OUT": self.dtypes[out],
            "ROWS": TILE_ROWS,
        }
        return Launch(self.kernel.scale_kernel, constants, num_warps=4)

    def late(self, missing: int, last: int, epoch: int, place: int) -> str:
        ubatch, slot = divmod(place // self.layout.slot_bytes, self.layout.slots)
        return timeout_text(self.region.rank, missing, slot, ubatch, epoch, last, self.deadline.limit_s)
