# SPDX-License-Identifier: Apache-2.0
"""Ways to reach the other ranks, in order of preference, and the one that all ranks connect by.

multicast   one `multimem.st` reaches every rank's memory (NVLS)
peer        a store to each rank's memory through its pointer (NVLink, or PCIe peer to peer)
shared      memory that processes of one machine map (CPU)

What a machine says it can do and what it then does are two things: a fabric manager may be down, memory short. So every
step that can fail is tried on all ranks and its outcome told to all, before the next one that has to be taken together.
"""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kimi_k3_serve.errors import UserError
from kimi_k3_serve.symmetric.agreement import everyone, first_refusal
from kimi_k3_serve.symmetric.region import Region
from kimi_k3_serve.symmetric.shared import join_shared, open_shared
from kimi_k3_serve.symmetric.torch_symm import (
    gpu_name,
    join_torch,
    multicast_objection,
    open_torch,
    peer_objection,
)

PREFERENCE = ("multicast", "peer", "shared")


class SymmetricMemoryError(UserError):
    """Symmetric memory was asked for in a way that cannot work."""


@dataclass(frozen=True)
class Transport:
    """One way, in the three steps that can fail."""

    objection: Callable[[torch.device, Sequence[str]], str | None]
    """(this rank's device, names of all ranks' GPUs) -> why not, as far as it is known beforehand."""
    open: Callable[[int, torch.device], Any]
    """(bytes, device) -> this rank's zeroed memory. Raises RuntimeError or OSError."""
    join: Callable[[Any, Any, Any], Region]
    """(that memory, the ranks' group, the same over a backend that moves objects) -> all ranks'. Collective."""
    machines: bool = False
    """Whether it may reach over several machines."""


def shared_objection(device: torch.device, members: Sequence[str]) -> str | None:
    if device.type != "cpu":
        return f"{device.type} tensors do not live in shared host memory"
    return None if hasattr(os, "memfd_create") else "no anonymous memory files here (Linux has them)"


TRANSPORTS: Mapping[str, Transport] = {
    "multicast": Transport(
        multicast_objection,
        open_torch,
        lambda memory, group, host_group: join_torch(memory, group, multicast=True),
        machines=True,
    ),
    "peer": Transport(
        peer_objection,
        open_torch,
        lambda memory, group, host_group: join_torch(memory, group, multicast=False),
    ),
    "shared": Transport(
        shared_objection, open_shared, lambda memory, group, host_group: join_shared(memory, host_group)
    ),
}


@dataclass(frozen=True)
class Connection:
    """What `connect` found, the same on every rank."""

    transport: str | None
    region: Region | None
    """None, as the transport is, where there is no way."""
    reasons: Mapping[str, str]
    """For each transport passed over the first reason against it."""

    @property
    def passed_over(self) -> str:
        """The reasons as one text; empty without any."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())

    def get(self) -> Region:
        """The region. Raises SymmetricMemoryError where there is none."""
        if self.region is None:
            raise SymmetricMemoryError(f"no symmetric memory ({self.passed_over}); use other transports")
        return self.region


def connect(
    nbytes: int,
    group: Any,
    device: torch.device,
    among: Sequence[str] = PREFERENCE,
    *,
    host_group: Any = None,
    against: str | None = None,
) -> Connection:
    """Allocate `nbytes` zeroed bytes on every rank by the first transport that works on all. Collective.

    Args:
        group: the ranks; over NCCL for `multicast` and `peer`.
        host_group: the same ranks over a backend that moves Python objects (vLLM's `cpu_group`); left out: `group`.
        against: why this rank wants none of them.

    Raises:
        SymmetricMemoryError: the ranks ask for different sizes or transports.
    """
    host_group = host_group or group
    facts = everyone(host_group, ((tuple(among), nbytes), machine(), gpu_name(device)))
    asked, machines, members = zip(*facts, strict=True)
    if len(set(asked)) > 1:
        raise SymmetricMemoryError(
            f"ranks ask for different symmetric memory: {list(asked)}; give every rank one configuration"
        )
    reasons: dict[str, str] = {}
    for name in among:
        transport, memory = TRANSPORTS[name], None  # what an earlier one had opened is given back
        known, failure = outcome(functools.partial(transport.objection, device, members))
        objection = against or failure or known
        if len(set(machines)) > 1 and not transport.machines:
            objection = objection or "the ranks are on different machines"
        region, reason = None, first_refusal(host_group, objection)
        if reason is None:
            memory, reason = attempt(host_group, functools.partial(transport.open, nbytes, device))
        if reason is None:
            region, reason = attempt(host_group, functools.partial(transport.join, memory, group, host_group))
        if reason is None:
            return Connection(name, region, reasons)
        reasons[name] = reason
    return Connection(None, None, reasons)


def attempt(group: Any, step: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a step yields, or None and the first rank's error where it failed on any. Collective."""
    made, failure = outcome(step)
    reason = first_refusal(group, failure)
    return (made, None) if reason is None else (None, reason)


def outcome(step: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a step yields, or None and its error in one line."""
    try:
        return step(), None
    except (RuntimeError, OSError) as error:
        return None, " ".join(str(error).split()) or type(error).__name__


def machine() -> str:
    """What tells this machine from others, in all of its containers: the identity of its boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
