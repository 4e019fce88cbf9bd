# SPDX-License-Identifier: Apache-2.0
"""Compile the projection kernels for a GPU that need not be there; print what matters of their PTX as JSON."""

import json
import re
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kimi_k3_serve.projection.exchange import STEP, UNIT, UNITS
from kimi_k3_serve.projection.kernels import gather_kernel, project_kernel

TENSORS = ("first", "second", "out_first", "out_second")
SIGNATURE = {
    **dict.fromkeys(TENSORS, "*i64"),
    **{f"{name}_stride": "i32" for name in TENSORS},
    "bases": "*i64",
    "epochs": "*i32",
    "slots_offset": "i32",
    "rank": "i32",
    "report": "i64",
    "limit_ns": "i64",
}


PRODUCT = {
    "x": "*bf16",
    "weight": "*bf16",
    "out": "*i64",
    "x_stride": "i32",
    "rows": "i32",
    "bases": "*i64",
    "epochs": "*i32",
    "slots_offset": "i32",
    "rank": "i32",
    "report": "i64",
    "limit_ns": "i64",
}
ALIGNED = ("x", "weight", "x_stride", "bases")  # as a launch with real tensors specialises them


def shapes(world_size: int) -> dict[str, object]:
    return {
        "FIRST": 1536 * 2 // world_size // UNIT,
        "SECOND": 576 * 2 // world_size // UNIT,
        "ROWS": 8,
        "WORLD_SIZE": world_size,
        "PTX": True,
    }


def gather(arch: int, world_size: int) -> dict[str, int]:
    return ptx(gather_kernel, SIGNATURE, {**shapes(world_size), "UNITS": UNITS}, (), arch, UNITS // 32)


def product(arch: int, world_size: int) -> dict[str, int]:
    constants = {"K": 7168, "STEP": STEP, "M": 1, "WORLD_PADDED": world_size}
    return ptx(project_kernel, PRODUCT, shapes(world_size) | constants, ALIGNED, arch, 8)


def ptx(
    kernel: object,
    arguments: dict[str, str],
    constants: dict[str, object],
    aligned: tuple[str, ...],
    arch: int,
    num_warps: int,
) -> dict[str, int]:
    """Counts of what matters in a kernel's PTX."""
    signature = arguments | dict.fromkeys(constants, "constexpr")
    names = list(signature)
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})
    text = compiled.asm["ptx"]
    return {
        "pushes": len(re.findall(r"st\.relaxed\.sys\.global\.v2\.b64", text)),
        "polls": len(re.findall(r"ld\.relaxed\.sys\.global\.v2\.b64", text)),
        "wide_loads": len(re.findall(r"ld\.global\.v4\.b32", text)),
        "narrow_loads": len(re.findall(r"ld\.global\.b16", text)),
        "atomics": len(re.findall(r"\batom\.", text)),
        "ends": len(re.findall(r"fence\.acq_rel\.sys;\s+(?:\.loc.*\s+)?trap;", text)),
        "fences": len(re.findall(r"\b(?:fence|membar)\.", text)),
        "multimem": text.count("multimem"),
        "shared_bytes": compiled.metadata.shared,
        "cubin_bytes": len(compiled.asm["cubin"]),
    }


if __name__ == "__main__":
    print(
        json.dumps([gather(int(sys.argv[1]), int(sys.argv[2])), product(int(sys.argv[1]), int(sys.argv[2]))])
    )
