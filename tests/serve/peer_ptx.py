# SPDX-License-Identifier: Apache-2.0
"""Compile the peer kernels for a GPU that need not be there; print one JSON line a kernel about its PTX."""

import json
import re
import sys
from typing import Any

import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kimi_k3_serve.attention import peer_gather, peer_merge
from kimi_k3_serve.attention.peer_exchange import UNITS, warps


def ptx(kernel: Any, constants: dict[str, object], arch: int, warps: int) -> dict[str, int]:
    """Counts of what matters in the kernel's PTX; its arguments are integers of the types it states."""
    signature = {
        parameter.name: "constexpr" if parameter.is_constexpr else parameter.annotation_type
        for parameter in kernel.params
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    text = compiled.asm["ptx"]
    return {
        "wide_stores": len(re.findall(r"st\.global\.v[48]\.b32|st\.global\.v2\.b64", text)),
        "wide_loads": len(re.findall(r"ld\.global(?:\.cg)?\.v[48]\.b32|ld\.global(?:\.cg)?\.v2\.b64", text)),
        "narrow_stores": len(re.findall(r"st\.global\.b16", text)),
        "narrow_loads": len(re.findall(r"ld\.global(?:\.cg)?\.b16", text)),
        "signals": len(re.findall(r"fence\.acq_rel\.sys;\s+st\.relaxed\.sys\.global\.b64", text)),
        "fences": len(re.findall(r"\b(?:fence|membar)\.|\batom\.[a-z.]*\.(?:release|acq_rel)", text)),
        "acquire_sys": len(re.findall(r"(?:ld|atom)\.global\.sys\.acquire", text)),
        "relaxed_stores": text.count("st.relaxed.sys.global.v2.b64"),
        "relaxed_loads": text.count("ld.relaxed.sys.global.v2.b64"),
        "exchanged": len(re.findall(r"\bshfl\.|\b(?:ld|st)\.shared", text)),
        "multimem": text.count("multimem"),
        "shared_bytes": compiled.metadata.shared,
        "cubin_bytes": len(compiled.asm["cubin"]),
    }


if __name__ == "__main__":
    arch, world, rows = map(int, sys.argv[1:])
    group = {"RANK": 1, "W": world, "PTX": True}
    gather = {"NOPE": 64, "ROPE": 8, "UNITS": UNITS} | group
    print(json.dumps(ptx(peer_gather.gather_query, gather, arch, UNITS // 32)))
    merge = {"ELEMENT": tl.bfloat16, "LSE": tl.float32, "VALUE": 512, "ROWS": rows, "LANES": world} | group
    merge |= {"SEQS": 512, "BASE_E": True}
    print(json.dumps(ptx(peer_merge.merge_partials, merge, arch, warps(rows))))
