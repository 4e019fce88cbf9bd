# SPDX-License-Identifier: Apache-2.0
"""Which way a projection's rows take: KIMI_K3_PROJECTION_GATHER, what is possible, and why.

auto        b12x where VLLM_USE_B12X_DCP_A2A=1 and it can be; else peer where it can be; else collective
b12x        one row over b12x's copy collective (SM120, SM121), or no start
peer        one to eight rows over peer memory (SM90, SM100), or no start
collective  the standard all-gather

All ranks agree once, when the model is built. More rows than a way takes (prefill, larger batches) and other dtypes
than BF16 and FP16 go through the standard all-gather: a choice that depends on what is alike on all ranks.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from kimi_k3_serve.errors import UserError
from kimi_k3_serve.projection import b12x_row
from kimi_k3_serve.projection.exchange import MAX_ROWS, TIMEOUT, Geometry, PeerGather, PeerProjection
from kimi_k3_serve.projection.shard import local_widths, restore
from kimi_k3_serve.proof import mark_used
from kimi_k3_serve.symmetric import connect
from kimi_k3_serve.symmetric.agreement import first_refusal, require_alike
from kimi_k3_serve.symmetric.deadline import limit_s

logger = logging.getLogger("vllm.kimi_k3_serve.projection")

SWITCH = "KIMI_K3_PROJECTION_GATHER"
USE_B12X = "VLLM_USE_B12X_DCP_A2A"
CHOICES = ("auto", "b12x", "peer", "collective")
HALF = (torch.bfloat16, torch.float16)
PRODUCT_ROWS = "KIMI_K3_PROJECTION_PRODUCT_ROWS"  # up to which product and gather are one launch; 0: never
PEER_CAPABILITIES = (9, 10)  # compute capability, major
DEFAULT_TIMEOUT_S = 600.0  # as NCCL's: a rank may compile kernels while the others wait


class ProjectionGatherError(UserError):
    """KIMI_K3_PROJECTION_GATHER asks for what cannot work here."""


class Way(Protocol):
    """A fast way for a few rows."""

    @property
    def rows(self) -> int: ...

    def takes(self, local: torch.Tensor) -> bool: ...

    def merged(self, local: torch.Tensor) -> torch.Tensor: ...


class PeerRows:
    """`PeerGather` for the ubatch that runs, and the product in one launch with it for fewer rows still."""

    def __init__(
        self, peer: PeerGather, ubatch: Callable[[], int], product: PeerProjection | None = None
    ) -> None:
        self.peer, self.ubatch, self.product = peer, ubatch, product
        self.rows, self.takes = peer.geometry.rows, peer.takes

    def merged(self, local: torch.Tensor) -> torch.Tensor:
        return self.peer.merged(local, self.ubatch())

    def project(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
        if self.product is None or not self.product.takes(hidden, weight):
            return None
        return self.product.project(hidden, weight, self.ubatch())


@dataclass(frozen=True)
class Choice:
    """What was chosen, the same on every rank, and why not what comes before it."""

    name: str
    reason: str
    way: Way | None


class LatentGather:
    """Local rows of a column-sharded merged projection -> its logical rows. Shared by all layers of one geometry."""

    def __init__(self, group: Any, widths: Sequence[int], choice: Choice) -> None:
        """Args:
        group: vLLM's coordinator of the ranks that hold the shards.
        widths: columns of each part over all ranks.
        """
        self.group, self.choice, self.way = group, choice, choice.way
        self.local = local_widths(widths, group.world_size)
        self.local_width = sum(self.local)
        self.used = f"projection_{choice.name}"

    def __call__(self, local: torch.Tensor) -> torch.Tensor:
        """[rows, columns of this rank] -> [rows, all columns], first part first. One rank: the tensor itself."""
        if self.group.world_size == 1:
            return local
        if self.way is not None and local.dtype in HALF and self.way.takes(local):
            mark_used(self.used)
            return self.way.merged(local)
        mark_used("projection_all_gather")
        gathered = self.group.all_gather(local.contiguous(), dim=0)
        return restore(gathered.view(self.group.world_size, *local.shape), self.local)

    def project(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """[rows, K] times this rank's unquantised weight [columns, K] -> [rows, all columns], as `self(gemm(...))`.

        Over peers a few rows take one launch for both (`PeerProjection`).
        """
        if isinstance(self.way, PeerRows) and (found := self.way.project(hidden, weight)) is not None:
            mark_used("projection_peer_product")
            return found
        return self(gemm(hidden, weight))


def inspect(layers: Sequence[Any]) -> dict[str, Any]:
    """Whether these MLA layers hold column shards, and how they gather: {"active", "reason"}, for a worker's proof."""
    projections = [
        getattr(layer, "fused_qkv_a_g_proj", None) or getattr(layer, "fused_qkv_a_proj", None)
        for layer in layers
    ]
    gathers = [gather for one in projections if (gather := getattr(one, "latents", None)) is not None]
    sharded = [gather for gather in gathers if gather.group.world_size > 1]
    if not sharded:
        return {"active": False, "reason": "every rank holds the whole latent projections"}
    choice, world_size = sharded[0].choice, sharded[0].group.world_size
    how = f"over {choice.name} ({choice.reason})"
    reason = f"{len(sharded)} of {len(layers)} MLA layers over {world_size} ranks, gathered {how}"
    return {"active": len(sharded) == len(layers), "reason": reason}


class PairedGather:
    """Local rows of two projections -> their whole rows behind one rendezvous, bit by bit.

    For instance the routed experts' BF16 down projection and the router's FP32 scores. Without peers, and for more than
    eight rows, two standard all-gathers give the same bits.
    """

    def __init__(
        self, group: Any, peer: PeerGather | None, reason: str = "", ubatch: Callable[[], int] = lambda: 0
    ) -> None:
        self.group, self.peer, self.reason, self.ubatch = group, peer, reason, ubatch

    def __call__(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, A] and [rows, B], any dtypes -> [rows, W * A] and [rows, W * B], rank-major columns."""
        if self.group.world_size == 1:
            return first, second
        if self.peer is not None and self.peer.takes(first, second):
            mark_used("projection_peer_pair")
            return self.peer.pair(first, second, self.ubatch())
        mark_used("projection_all_gather_pair")
        return self.alone(first), self.alone(second)

    def alone(self, part: torch.Tensor) -> torch.Tensor:
        gathered = self.group.all_gather(part.contiguous(), dim=0)
        return restore(gathered.view(self.group.world_size, *part.shape), part.shape[1:])


def coordinator(tensor_parallel: Any, context_parallel: Any) -> Any:
    """Whose ranks gather: the tensor-parallel coordinator, or the DCP one where it has the same ranks in that order."""
    if context_parallel is not None and list(context_parallel.ranks) == list(tensor_parallel.ranks):
        return context_parallel
    return tensor_parallel


def asked() -> str:
    """The switch's value.

    Raises:
        ProjectionGatherError: an unknown value.
    """
    value = os.environ.get(SWITCH, "auto")
    if value not in CHOICES:
        raise ProjectionGatherError(f"{SWITCH}={value!r} is not known; use one of {', '.join(CHOICES)}")
    return value


def product_rows() -> int:
    """Rows up to which product and gather are one launch, 0 to 8; 2 unless the environment says otherwise.

    Raises:
        ProjectionGatherError: another value.
    """
    text = os.environ.get(PRODUCT_ROWS, "2")
    if not text.isdecimal() or int(text) > MAX_ROWS:
        raise ProjectionGatherError(
            f"{PRODUCT_ROWS}={text!r} is not a whole number of rows from 0 to {MAX_ROWS}"
        )
    return int(text)


def select(
    group: Any,
    widths: Sequence[int],
    device: torch.device,
    *,
    inputs: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ubatches: int = 1,
    ubatch: Callable[[], int] = lambda: 0,
    transports: Sequence[str] = ("peer",),
) -> Choice:
    """Choose and build for a merged projection of two parts in BF16 or FP16. Collective over `group`.

    Args:
        inputs: columns of the hidden state, where the product may be taken together with the gather; of `dtype`.

    Raises:
        ProjectionGatherError: the way asked for cannot work, or ranks were configured differently.
        ShardError: a width does not divide by the number of ranks.
    """
    local = local_widths(widths, group.world_size)
    value = agreed_value(group)
    reasons: dict[str, str] = {}
    if group.world_size == 1:
        return Choice("identity", "one rank holds every column", None)
    if value in ("auto", "b12x"):
        mine = b12x_refusal(device, group.world_size, forced=value == "b12x")
        refusal = first_refusal(group.cpu_group, mine)
        if refusal is None:
            row = b12x_row.B12xRow(group, local, device)
            row.warm_up()
            return Choice("b12x", because(reasons, value), row)
        reasons["b12x"] = refusal
    if value in ("auto", "peer"):
        first, second = local
        geometry = Geometry(2 * first, 2 * second, ubatches=ubatches)
        peer, reason = build_peer(group, geometry, device, transports)
        if peer is not None:
            product = None
            rows = product_rows()
            if rows and inputs is not None and inputs % 16 == 0 and dtype in HALF:
                product = build_product(group, peer, rows, inputs, dtype, device)
            return Choice("peer", because(reasons, value), PeerRows(peer, ubatch, product))
        reasons["peer"] = reason
    if value in reasons:
        raise ProjectionGatherError(f"{SWITCH}={value} cannot work here: {reasons[value]}; use {SWITCH}=auto")
    return Choice("collective", because(reasons, value), None)


def select_pair(
    group: Any,
    first_bytes: int,
    second_bytes: int,
    device: torch.device,
    *,
    ubatches: int = 1,
    ubatch: Callable[[], int] = lambda: 0,
    transports: Sequence[str] = ("peer",),
) -> PairedGather:
    """The paired gather of rows of `first_bytes` and `second_bytes` a rank. Collective over `group`.

    Raises:
        ProjectionGatherError: as for `select`.
    """
    value = agreed_value(group)
    if group.world_size == 1 or value in ("collective", "b12x"):
        return PairedGather(group, None, f"{SWITCH}={value}")
    peer, reason = build_peer(
        group, Geometry(first_bytes, second_bytes, ubatches=ubatches), device, transports
    )
    if peer is None and value == "peer":
        raise ProjectionGatherError(f"{SWITCH}=peer cannot work here: {reason}; use {SWITCH}=auto")
    if peer is None:
        logger.warning("Paired projection rows go over two all-gathers, not over peers: %s", reason)
    return PairedGather(group, peer, reason, ubatch)


def because(reasons: dict[str, str], value: str) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or f"{SWITCH}={value}"


def agreed_value(group: Any) -> str:
    """The switch's value, which must be the same on all ranks, as the rows of a product must be. Collective."""
    value = asked()
    require_alike(group.cpu_group, {SWITCH: value, PRODUCT_ROWS: product_rows()}, ProjectionGatherError)
    return value


def b12x_refusal(device: torch.device, world_size: int, *, forced: bool) -> str | None:
    if not forced and os.environ.get(USE_B12X) != "1":
        return f"{USE_B12X} is not 1"
    return b12x_row.objection(device, world_size)


def peer_refusal(device: torch.device, geometry: Geometry) -> str | None:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in PEER_CAPABILITIES:
        major, minor = torch.cuda.get_device_capability(device)
        return f"the peer gather is for SM90 and SM100, this GPU is SM{major}{minor}"
    return geometry.objection()


def build_peer(
    group: Any, geometry: Geometry, device: torch.device, transports: Sequence[str]
) -> tuple[PeerGather | None, str]:
    """The gather over peer memory, or None and the reason. Collective."""
    timeout_s = limit_s(TIMEOUT, DEFAULT_TIMEOUT_S)  # before others wait for what a bad value would stop
    found = connect(
        geometry.nbytes(group.world_size),
        group.device_group,
        device,
        transports,
        host_group=group.cpu_group,
        against=peer_refusal(device, geometry),
    )
    if found.transport is None or found.region is None:
        return None, next(iter(found.reasons.values()))
    peer = PeerGather(found.region, geometry, found.transport, timeout_s=timeout_s)
    peer.warm_up()
    return peer, ""


def build_product(
    group: Any, peer: PeerGather, rows: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> PeerProjection | None:
    """The product together with its gather, in memory of its own beside `peer`'s; None without it. Collective."""
    geometry = replace(peer.geometry, rows=rows)
    found = connect(
        geometry.nbytes(group.world_size),
        group.device_group,
        device,
        (peer.transport,),
        host_group=group.cpu_group,
    )
    if found.region is None:
        logger.warning("Projections' products are not gathered in their own launch: %s", found.passed_over)
        return None
    product = PeerProjection(found.region, geometry, inputs, timeout_s=peer.deadline.limit_s)
    product.warm_up(dtype)
    return product
