# SPDX-License-Identifier: Apache-2.0
"""Symmetric memory: every rank allocates the same bytes and sees those of all others.

region.py       Region: an address for each rank; typed views of it
shared.py       processes of one machine, over a memory-mapped file, and the fence they need
torch_symm.py   GPUs, over torch.distributed._symmetric_memory, with or without NVLS multicast
device.py       what Triton kernels need to meet there: signals, waits with a limit
deadline.py     that limit on the host, and who was missed
transport.py    connect: by the first transport that works on all ranks, and why not by others
agreement.py    what every rank said
"""

from kimi_k3_serve.symmetric.region import Region, view
from kimi_k3_serve.symmetric.transport import Connection, SymmetricMemoryError, connect

__all__ = ["Connection", "Region", "SymmetricMemoryError", "connect", "view"]
