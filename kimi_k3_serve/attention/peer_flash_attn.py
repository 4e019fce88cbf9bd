# SPDX-License-Identifier: Apache-2.0
"""FLASH_ATTN_MLA (FlashAttention 3, Hopper) between peer exchanges.

Its LSE comes transposed, [H, B] seen as [B, H]; vLLM's direct all-to-all dies on that ("partial LSE must have
packed heads", vllm issue 54305). The peer merge takes any strides.
"""

from vllm.v1.attention.backends.mla.flashattn_mla import (
    FlashAttnMLABackend,
    FlashAttnMLAImpl,
    FlashAttnMLAMetadataBuilder,
)

from kimi_k3_serve.attention.peer import PeerBackend, PeerDecode


class PeerFlashAttnMLAImpl(PeerDecode, FlashAttnMLAImpl):
    pass


class PeerFlashAttnMLAMetadataBuilder(FlashAttnMLAMetadataBuilder):
    supports_direct_dcp_kv_gather = True


class PeerFlashAttnMLABackend(PeerBackend, FlashAttnMLABackend):
    @staticmethod
    def get_name() -> str:
        return "PEER_FLASH_ATTN_MLA"

    @staticmethod
    def get_impl_cls() -> type[PeerFlashAttnMLAImpl]:
        return PeerFlashAttnMLAImpl

    @staticmethod
    def get_builder_cls() -> type[PeerFlashAttnMLAMetadataBuilder]:
        return PeerFlashAttnMLAMetadataBuilder
