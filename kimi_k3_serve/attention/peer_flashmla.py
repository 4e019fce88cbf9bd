# SPDX-License-Identifier: Apache-2.0
"""FLASHMLA between peer exchanges."""

from vllm.v1.attention.backends.mla.flashmla import (
    FlashMLABackend,
    FlashMLAImpl,
    FlashMLAMetadataBuilder,
)

from kimi_k3_serve.attention.peer import PeerBackend, PeerDecode


class PeerFlashMLAImpl(PeerDecode, FlashMLAImpl):
    pass


class PeerFlashMLAMetadataBuilder(FlashMLAMetadataBuilder):
    supports_direct_dcp_kv_gather = True


class PeerFlashMLABackend(PeerBackend, FlashMLABackend):
    @staticmethod
    def get_name() -> str:
        return "PEER_FLASHMLA"

    @staticmethod
    def get_impl_cls() -> type[PeerFlashMLAImpl]:
        return PeerFlashMLAImpl

    @staticmethod
    def get_builder_cls() -> type[PeerFlashMLAMetadataBuilder]:
        return PeerFlashMLAMetadataBuilder
