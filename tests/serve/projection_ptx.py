# SPDX-License-Identifier: Apache-2.0
"""Compile the projection gather for a GPU that need not be there; print one JSON line about its PTX."""

import json
import re
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kimi_k3_serve.projection.exchange import UNIT, UNITS
from kimi_k3_serve.projection.kernels import gather_kernel

TENSORS = ("first", "second", "out_first", "out_second")
SIGNATURE = {
    **dict.fromkeys(TENSORS, "*i64"),
    **{f"{name}_stride": "i32" for name in TENSORS},
    "bases": "*i64",
    "epochs": "*i32",
    "slots_offset": "i32",
    "rank": "i32",
}


def ptx(arch: int, world_size: int) -> dict[str, int]:
    constants = {
        "FIRST": 1536 * 2 // world_size // UNIT,
        "SECOND": 576 * 2 // world_size // UNIT,
        "ROWS": 8,
        "WORLD_SIZE": world_size,
        "UNITS": UNITS,
        "PTX": True,
    }
    signature = SIGNATURE | dict.fromkeys(constants, "constexpr")
    source = ASTSource(gather_kernel, signature, constexprs=constants)
    compiled = compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": UNITS // 32})
    text = compiled.asm["ptx"]
    return {
        "pushes": len(re.findall(r"st\.relaxed\.sys\.global\.v2\.b64", text)),
        "polls": len(re.findall(r"ld\.relaxed\.sys\.global\.v2\.b64", text)),
        "atomics": len(re.findall(r"\batom\.", text)),
        "fences": len(re.findall(r"\b(?:fence|membar)\.", text)),
        "multimem": text.count("multimem"),
        "barriers": len(re.findall(r"\bbar(?:rier)?\.", text)),
        "shared_bytes": compiled.metadata.shared,
        "cubin_bytes": len(compiled.asm["cubin"]),
    }


if __name__ == "__main__":
    print(json.dumps(ptx(int(sys.argv[1]), int(sys.argv[2]))))
