# SPDX-License-Identifier: Apache-2.0
"""Compile the peer kernels for a GPU that need not be there; print one JSON line a kernel about its PTX."""

import json
import re
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kimi_k3_serve.attention import peer_kernels as kernels

BF16, I64, I32 = "*bf16", "i64", "i32"
GATHER = {
    "nope": BF16, "nope_stride_token": I64, "nope_stride_head": I64,
    "rope": BF16, "rope_stride_token": I64, "rope_stride_head": I64,
    "bases": "*i64", "flags": I64, "query": I64, "state": "*i64", "rank": I32, "tokens": I32, "heads": I32,
}  # fmt: skip
MERGE = {
    "partial": BF16, "partial_stride_token": I64, "partial_stride_head": I64,
    "lse": "*fp32", "lse_stride_token": I64, "lse_stride_head": I64,
    "seq_lens": "*i32", "query_start_loc": "*i32", "num_seqs": I32, "merged": BF16,
    "bases": "*i64", "flags": I64, "received": I64, "received_lse": I64,
    "state": "*i64", "rank": I32, "tokens": I32, "heads": I32, "capacity": I32,
}  # fmt: skip
ALIGNED = {"nope", "nope_stride_token", "nope_stride_head", "rope", "rope_stride_token", "rope_stride_head"} | {
    "partial", "partial_stride_token", "partial_stride_head", "merged"
}  # fmt: skip


def ptx(kernel: object, arguments: dict[str, str], constants: dict[str, object], arch: int) -> dict[str, int]:
    """Counts of what matters in the kernel's PTX. Aligned as a launch with real tensors would specialise it."""
    signature = arguments | dict.fromkeys(constants, "constexpr")
    names = list(signature)
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in ALIGNED}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    compiled = compile(source, target=GPUTarget("cuda", arch, 32))
    text = compiled.asm["ptx"]
    return {
        "wide_stores": len(re.findall(r"st\.global\.v[48]\.b32|st\.global\.v2\.b64", text)),
        "narrow_stores": len(re.findall(r"st\.global\.b16", text)),
        "release_sys": len(re.findall(r"atom\.global\.sys\.release", text)),
        "acquire_sys": len(re.findall(r"(?:ld|atom)\.global\.sys\.acquire", text)),
        "multimem": text.count("multimem"),
        "shared_bytes": compiled.metadata.shared,
        "cubin_bytes": len(compiled.asm["cubin"]),
    }


if __name__ == "__main__":
    arch, world = int(sys.argv[1]), int(sys.argv[2])
    shape = {"W": world, "ROWS": 8, "BLOCKS": 128}
    print(json.dumps(ptx(kernels.gather_query, GATHER, {**shape, "NOPE": 512, "ROPE": 64}, arch)))
    constants = {**shape, "VALUE": 512, "SEQS": 512, "BASE_E": True, "MASK": True}
    print(json.dumps(ptx(kernels.merge_partials, MERGE, constants, arch)))
