# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory: every rank allocates the same bytes and sees those of all others.

region.py       Region, the one Protocol; typed views of it; an allocation of W ranks in one process
shared.py       processes of one machine, over a memory-mapped file, and the fence they need
torch_symm.py   GPUs, over torch.distributed._symmetric_memory, with or without NVLS multicast
device.py       what Triton kernels need to meet there: signals, waits with a limit
deadline.py     that limit on the host, and who was missed
transport.py    which transports this group can use, and why not; agreed by all ranks
"""

from kimi_k3_serve.symmetric.region import LocalRegion, Region, view
from kimi_k3_serve.symmetric.transport import SymmetricMemoryError, allocate, choose

__all__ = ["LocalRegion", "Region", "SymmetricMemoryError", "allocate", "choose", "view"]
