# SPDX-License-Identifier: Apache-2.0
"""Where planes and signals lie in a rank's symmetric memory. Pure arithmetic; the same on every rank."""

from dataclasses import dataclass

SLOTS = 2
"""Ping-pong: what protocol.md shows to be enough where a chunk is consumed before the next one is published."""
ALIGNMENT = 128
"""Bytes. Planes begin on their own cache line and, with rows of a multiple of 16, allow 16-byte accesses."""


@dataclass(frozen=True)
class Layout:
    """Slots for each ubatch; a slot holds signals [W] int64, kv_c [capacity, L] and k_pe [capacity, P]."""

    world_size: int
    capacity: int
    """Rows of a plane: the most compact rows that a chunk can have."""
    latent_bytes: int
    """Bytes of one row of kv_c."""
    rope_bytes: int
    """Bytes of one row of k_pe."""
    ubatches: int = 1
    slots: int = SLOTS

    @property
    def kv_c_offset(self) -> int:
        """Bytes from the beginning of a slot."""
        return align(8 * self.world_size)

    @property
    def k_pe_offset(self) -> int:
        return align(self.kv_c_offset + self.capacity * self.latent_bytes)

    @property
    def slot_bytes(self) -> int:
        return align(self.k_pe_offset + self.capacity * self.rope_bytes)

    @property
    def nbytes(self) -> int:
        return self.ubatches * self.slots * self.slot_bytes

    def slot_offset(self, ubatch: int, slot: int) -> int:
        """Where a slot begins in a rank's memory.

        Raises:
            ValueError: no such ubatch or slot.
        """
        if not (0 <= ubatch < self.ubatches and 0 <= slot < self.slots):
            raise ValueError(
                f"ubatch {ubatch}, slot {slot}: there are {self.ubatches} ubatches of {self.slots} slots"
            )
        return (ubatch * self.slots + slot) * self.slot_bytes


def align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
