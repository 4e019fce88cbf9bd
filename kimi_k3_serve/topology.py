# SPDX-License-Identifier: Apache-2.0
"""How a model is spread over ranks, and its name: `tp8`, `dcp8` (= TP8 with DCP8), `tp16-dcp8`."""

import re
from dataclasses import dataclass

from kimi_k3_serve.errors import UserError


@dataclass(frozen=True)
class Topology:
    """W = `dcp` ranks of each tensor-parallel group of `tp` ranks keep different KV rows."""

    tp: int
    dcp: int = 1

    @classmethod
    def parse(cls, name: str) -> "Topology":
        """Read a topology's name.

        Raises:
            UserError: the name is not one, or DCP does not divide TP.
        """
        match = re.fullmatch(r"(?:tp([1-9]\d*))?(?:-?dcp([1-9]\d*))?", name)
        if not name or match is None or (match[1] and match[2] and "-" not in name):
            raise UserError(
                f"topology {name!r} is not known; use tpN, dcpN or tpN-dcpM, for example tp8, dcp8"
            )
        dcp = int(match[2] or 1)
        tp = int(match[1] or dcp)
        if tp % dcp:
            raise UserError(f"topology {name!r}: DCP {dcp} does not divide TP {tp}; use a divisor of {tp}")
        return cls(tp, dcp)

    def flags(self) -> list[str]:
        """vLLM's arguments for this topology."""
        flags = ["--tensor-parallel-size", str(self.tp)]
        if self.dcp > 1:
            flags += ["--decode-context-parallel-size", str(self.dcp), "--cp-kv-cache-interleave-size", "1"]
        return flags
