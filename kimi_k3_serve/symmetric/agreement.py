# SPDX-License-Identifier: Apache-2.0
"""What ranks must decide alike, they decide from what all of them said."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


def everyone(group: Any, value: Any) -> list[Any]:
    """Every rank's value, in the order of ranks. Collective over `group`, which moves Python objects."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def first_refusal(group: Any, mine: str | None) -> str | None:
    """The first rank's reason against, or None where no rank has one. Collective."""
    reasons = everyone(group, mine)
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), None)


def require_alike(group: Any, settings: Mapping[str, Any], refusal: type[Exception]) -> None:
    """Settings by name that every rank must have alike. Collective.

    Raises:
        refusal: ranks differ in one.
    """
    for name, *values in zip(settings, *everyone(group, tuple(settings.values())), strict=True):
        if len(set(values)) > 1:
            raise refusal(f"{name} differs between ranks: {values}; set it alike for every worker")
