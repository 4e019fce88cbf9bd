# SPDX-License-Identifier: Apache-2.0
"""What of vLLM 0.32.0's own decode path is mended, so that its backends can serve as stock arms.

FLASH_ATTN_MLA hands its LSE over transposed, [H, B] seen as [B, H]. The direct all-to-all of `--dcp-comm-backend a2a`
insists on packed heads, a token stride of at least H, and the engine dies at its first decode step ("partial LSE must
have packed heads", vllm issue 54305). A copy is made even of a single token, whose transposed LSE counts as contiguous
though its token stride is 1. The other exchanges copy such an LSE themselves, and the peer backend takes any strides.

`CudaCommunicator.reduce_scatter` calls vLLM's own NCCL wrapper without asking whether it is disabled, as it is where
the NCCL library is missing or too old (vllm_nccl.py). The wrapper then returns at once, the caller gets memory that
nobody has written, and `ag_rs` hands it on as attention output. Its sister `all_gather` falls back to
`torch.distributed`; now both do.

`PyNcclCommunicator` disables itself without a log line; now it says why.
"""

from kimi_k3_serve.patch import Edit, edit_function

EDITS = {
    "vllm.v1.attention.backends.mla.flashattn_mla.FlashAttnMLAImpl.forward_mqa": [
        Edit(
            "        return o, lse.transpose(0, 1)  # [ H, B ] -> [ B, H ]\n",
            "        lse = lse.transpose(0, 1)  # [ H, B ] -> [ B, H ]\n"
            '        if not getattr(self, "owns_decode_dcp_collectives", False):\n'
            "            lse = lse.clone(memory_format=torch.contiguous_format)\n"
            "        return o, lse\n",
        )
    ],
    "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator.reduce_scatter": [
        Edit(
            "    assert pynccl_comm is not None\n",
            "    if pynccl_comm is None or pynccl_comm.disabled:\n"
            "        return super().reduce_scatter(input_, dim)\n",
        )
    ],
    "vllm.distributed.device_communicators.pynccl.PyNcclCommunicator.__init__": [
        Edit(
            "        # disable because of missing NCCL library\n",
            "        # disable because of missing NCCL library\n"
            "        from kimi_k3_serve import vllm_nccl\n\n"
            "        vllm_nccl.warn()\n",
        )
    ],
}


def install() -> None:
    """Idempotent. For GPUs: the CPU platform has none of these backends."""
    for name, edits in EDITS.items():
        edit_function(name, edits)
