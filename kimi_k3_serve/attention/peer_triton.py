# SPDX-License-Identifier: Apache-2.0
"""TRITON_MLA between peer exchanges, with its LSE in float32.

vLLM 0.32.0 allocates that LSE in the queries' dtype. In BF16 an LSE between 8 and 16 is rounded to a multiple of
1/16, so a shard's weight is off by up to 3%: nothing notices without context parallelism, where no one reads it.
"""

from vllm.v1.attention.backends.mla.triton_mla import (
    TritonMLABackend,
    TritonMLAImpl,
    TritonMLAMetadataBuilder,
)

from kimi_k3_serve.attention.peer import PeerBackend, PeerDecode
from kimi_k3_serve.patch import Edit, edited

FLOAT32_LSE = [
    Edit(
        "lse = torch.zeros(B, q_num_heads, dtype=q.dtype, device=q.device)",
        "lse = torch.zeros(B, q_num_heads, dtype=torch.float32, device=q.device)",
    )
]


class Float32LSETritonMLAImpl(TritonMLAImpl):
    forward_mqa = edited("vllm.v1.attention.backends.mla.triton_mla.TritonMLAImpl.forward_mqa", FLOAT32_LSE)


class PeerTritonMLAImpl(PeerDecode, Float32LSETritonMLAImpl):
    pass


class PeerTritonMLAMetadataBuilder(TritonMLAMetadataBuilder):
    supports_direct_dcp_kv_gather = True


class PeerTritonMLABackend(PeerBackend, TritonMLABackend):
    @staticmethod
    def get_name() -> str:
        return "PEER_TRITON_MLA"

    @staticmethod
    def get_impl_cls() -> type[PeerTritonMLAImpl]:
        return PeerTritonMLAImpl

    @staticmethod
    def get_builder_cls() -> type[PeerTritonMLAMetadataBuilder]:
        return PeerTritonMLAMetadataBuilder
