# SPDX-License-Identifier: Apache-2.0
"""What of vLLM 0.32.0's own decode path is mended, so that its backends can serve as stock arms.

FLASH_ATTN_MLA hands its LSE over transposed, [H, B] seen as [B, H]. The direct all-to-all of `--dcp-comm-backend a2a`
insists on packed heads and the engine dies at its first decode step ("partial LSE must have packed heads", vllm issue
54305). The other exchanges copy such an LSE themselves, and the peer backend takes it in any strides.
"""

from kimi_k3_serve.patch import Edit, edit_function

EDITS = {
    "vllm.v1.attention.backends.mla.flashattn_mla.FlashAttnMLAImpl.forward_mqa": [
        Edit(
            "        return o, lse.transpose(0, 1)  # [ H, B ] -> [ B, H ]\n",
            "        lse = lse.transpose(0, 1)  # [ H, B ] -> [ B, H ]\n"
            '        return o, lse if getattr(self, "owns_decode_dcp_collectives", False) else lse.contiguous()\n',
        )
    ],
}


def install() -> None:
    """Idempotent. For GPUs: the CPU platform has none of these backends."""
    for name, edits in EDITS.items():
        edit_function(name, edits)
