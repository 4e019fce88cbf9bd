# SPDX-License-Identifier: Apache-2.0
"""A hardware profile: one machine of the table in docs/serving.md, as data (profiles/*.toml)."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from kimi_k3_serve.errors import UserError

GRADES = ("qualified", "implemented", "research")


@dataclass(frozen=True)
class Machine:
    """`gpu_memory_gb` in 10^9 bytes; `sm` is the compute capability, "10.3"."""

    gpus_per_node: int
    nodes: int
    gpu_memory_gb: float
    sm: str

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes


@dataclass(frozen=True)
class Profile:
    """`description` is of the machine; `machine` is None without GPUs.

    `layers`: a slice of the model with that many layers and dummy weights. `weights_gb`: 10^9 bytes of the model's
    weights, where they are known and not those of the released checkpoint's layers.
    """

    name: str
    description: str
    grade: str
    flags: Mapping[str, Any]
    environment: Mapping[str, str]
    dcp_flags: Mapping[str, Any] = field(default_factory=dict)
    dcp_environment: Mapping[str, str] = field(default_factory=dict)
    machine: Machine | None = None
    topologies: tuple[str, ...] = ()
    pipeline_parallel: int = 1
    data_parallel: int = 1
    layers: int | None = None
    weights_gb: float | None = None
    one_core_a_rank: bool = False
    kv_cache_memory_bytes: int | None = None

    def __str__(self) -> str:
        what = f"{self.layers} layers on {self.description}" if self.layers else self.description
        return f"{self.name}: {what}; grade: {self.grade}"


def names() -> list[str]:
    """Of the profiles that come with the package."""
    folder = files("kimi_k3_serve").joinpath("profiles")
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def load(name: str) -> Profile:
    """Read a profile.

    Raises:
        UserError: no such profile.
    """
    if name not in names():
        raise UserError(f"profile {name!r} is not known; choose one of {', '.join(names())}")
    text = files("kimi_k3_serve").joinpath("profiles", f"{name}.toml").read_text()
    return parse(name, tomllib.loads(text))


def parse(name: str, data: dict[str, Any]) -> Profile:
    """A profile from its TOML; a key that is not known is an error.

    Raises:
        UserError: an unknown key or grade, or a missing one.
    """
    dcp = data.pop("dcp", {})
    machine = data.pop("machine", None)
    try:
        profile = Profile(
            name=name,
            machine=Machine(**machine) if machine else None,
            topologies=tuple(data.pop("topologies", ())),
            dcp_flags=dcp.pop("flags", {}),
            dcp_environment=dcp.pop("environment", {}),
            **data,
        )
    except TypeError as error:
        raise UserError(f"profile {name}: {error}; compare it with another profile") from None
    if dcp or profile.grade not in GRADES:
        wrong = f"dcp.{next(iter(dcp))}" if dcp else f"grade {profile.grade!r}"
        raise UserError(f"profile {name}: {wrong} is not known; compare it with another profile")
    return profile
