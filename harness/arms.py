# SPDX-License-Identifier: Apache-2.0
"""An arm that we start ourselves: its topology, and what a running engine must prove to bear its name."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.engines.proof import Proof, objections
from harness.errors import UserError

FEATURES = ("cpu_dcp_mla", "owned_decode_collectives", "dcp_slot_mapping", "chunked_prefill", "native_ops")
DCP_FEATURES = ("prefill_context_gather",)
DCP_PATHS = ("prefill_context_gather", "decode_merge")
"""Code paths of DCP that must have run, not only be enabled, once the parity prompts were answered."""


@dataclass(frozen=True)
class Arm:
    """`tp` ranks, in groups of `dcp` that keep different parts of each context."""

    name: str
    tp: int
    dcp: int

    @classmethod
    def parse(cls, name: str) -> "Arm":
        """`tp2`: two ranks that all keep the whole context; `dcp2`: two ranks that share it."""
        match = re.fullmatch(r"(tp|dcp)([1-9][0-9]?)", name)
        if not match:
            raise UserError(f"arm {name!r} is not known; use tpN or dcpN, for example tp2 or dcp2")
        kind, ranks = match[1], int(match[2])
        return cls(name, ranks, ranks if kind == "dcp" else 1)

    @property
    def topology(self) -> dict[str, int]:
        return {"tp": self.tp, "dcp": self.dcp, "ep": 1, "nodes": 1}

    def require_proof(self, proofs: Sequence[Proof], *, used: bool = False) -> None:
        """Raises UserError unless every rank proves this topology and our backend.

        With `used`, the code paths of DCP must have run as well.
        """
        sharded = self.dcp > 1
        against = objections(
            proofs,
            tp=self.tp,
            dcp=self.dcp,
            features=FEATURES + (DCP_FEATURES if sharded else ()),
            used=DCP_PATHS if used and sharded else (),
        )
        if against:
            raise UserError(
                f"arm {self.name} is not what its name says: {'; '.join(against)};"
                " it is not measured, see the engine's log"
            )
