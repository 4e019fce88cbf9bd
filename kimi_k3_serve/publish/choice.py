# SPDX-License-Identifier: Apache-2.0
"""Which way prefill KV takes in this engine: KIMI_K3_PREFILL_KV, what is possible, and why.

auto        the first of multicast, peer, shared that every rank can use; else collective
multicast, peer, shared   that one, or no start
collective  all-gather of the cached bytes, between two launches that take rows out of the cache and put them in order
stock       vLLM's own text, untouched
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kimi_k3_serve.errors import UserError
from kimi_k3_serve.publish import verify
from kimi_k3_serve.publish.collective import Collective
from kimi_k3_serve.publish.layout import Layout
from kimi_k3_serve.publish.publisher import PrefillKV, Publisher, objection
from kimi_k3_serve.symmetric.agreement import require_alike
from kimi_k3_serve.symmetric.deadline import limit_s
from kimi_k3_serve.symmetric.transport import PREFERENCE, Connection, connect

SWITCH = "KIMI_K3_PREFILL_KV"
TIMEOUT = "KIMI_K3_PUBLISH_TIMEOUT_S"
CHOICES = ("auto", *PREFERENCE, "collective", "stock")
CACHE_DTYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class PrefillKVError(UserError):
    """KIMI_K3_PREFILL_KV asks for what cannot work here."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, the same on every rank; `source` is None where vLLM's own text runs."""

    transport: str
    reason: str
    source: PrefillKV | None
    scaled: bool
    """The cache holds e4m3 that the consumer must scale."""
    verified: bool
    """Every chunk is compared with vLLM's own path."""


def asked(device_type: str) -> str:
    """The switch's value, checked as far as it can be without other ranks.

    Raises:
        PrefillKVError: an unknown value, or one that this kind of device can never do.
    """
    value = os.environ.get(SWITCH, "auto")
    if value not in CHOICES:
        raise PrefillKVError(f"{SWITCH}={value!r} is not known; use one of {', '.join(CHOICES)}")
    impossible = {"cpu": ("multicast", "peer"), "cuda": ("shared",)}.get(device_type, ())
    if value in impossible:
        raise PrefillKVError(f"{SWITCH}={value} cannot work on {device_type}; use {SWITCH}=auto")
    return value


def timeout_s() -> float:
    """How long a wait may last, seconds; 0: for ever. Raises UserError where it is no such number."""
    return limit_s(TIMEOUT, 300.0)


def select(
    *,
    device_group: Any,
    host_group: Any,
    device: torch.device,
    capacity: int,
    latent: int,
    rope: int,
    cache_dtype: str,
    model_dtype: torch.dtype,
    ubatches: int,
) -> Choice:
    """Choose and build. Collective: every rank of the group calls it and gets the same choice.

    Args:
        capacity: rows of the largest chunk, N.
        latent, rope: L and P, elements of a row.
        cache_dtype: vLLM's name for the cache of the layers that this is for; "auto" is the model's.

    Raises:
        PrefillKVError: the forced transport cannot work, or ranks were configured differently.
    """
    value, verified = asked(device.type), verify.asked()
    require_alike(host_group, {SWITCH: value, verify.SWITCH: verified}, PrefillKVError)

    dtype = model_dtype if cache_dtype == "auto" else CACHE_DTYPES.get(cache_dtype)
    scaled = dtype == torch.float8_e4m3fn

    def choice(transport: str, reason: str, source: PrefillKV | None) -> Choice:
        return Choice(transport, reason, source, scaled, verified)

    if value == "stock":
        return choice("stock", f"{SWITCH}=stock", None)
    if dtype is None:
        if value != "auto":
            raise PrefillKVError(
                f"{SWITCH}={value} cannot carry a KV cache of {cache_dtype}; use {SWITCH}=auto (vLLM's own all-gather)"
            )
        return choice("stock", f"a KV cache of {cache_dtype} is left to vLLM's own all-gather", None)

    widths = (latent * dtype.itemsize, rope * dtype.itemsize)
    layout = Layout(dist.get_world_size(host_group), capacity, *widths, ubatches)
    found = Connection(None, None, {})
    if value != "collective":
        found = connect(
            layout.nbytes,
            device_group,
            device,
            PREFERENCE if value == "auto" else (value,),
            host_group=host_group,
            against=objection(dtype, *widths),
        )
    if found.region is None and value in PREFERENCE:
        raise PrefillKVError(f"{SWITCH}={value} cannot work here: {found.reasons[value]}; use {SWITCH}=auto")

    implementation = "torch" if device.type == "cpu" else "triton"
    if found.transport is None or found.region is None:
        source: PrefillKV = Collective(
            device_group, dtype, latent, rope, model_dtype, implementation=implementation
        )
        return choice("collective", found.passed_over or f"{SWITCH}=collective", source)
    source = Publisher(
        found.region,
        layout,
        dtype,
        transport=found.transport,
        implementation=implementation,
        timeout_s=timeout_s(),
        model_dtype=model_dtype,
    )
    return choice(found.transport, found.passed_over or f"{SWITCH}={value}", source)
