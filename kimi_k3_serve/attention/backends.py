# SPDX-License-Identifier: Apache-2.0
"""The names under which `--attention-backend` finds this project's backends."""

import copyreg
from typing import Any

BACKENDS = {
    "B12X_MLA": "kimi_k3_serve.attention.b12x.B12xMLABackend",
    "PEER_FLASH_ATTN_MLA": "kimi_k3_serve.attention.peer_flash_attn.PeerFlashAttnMLABackend",
    "PEER_FLASHMLA": "kimi_k3_serve.attention.peer_flashmla.PeerFlashMLABackend",
    "PEER_TRITON_MLA": "kimi_k3_serve.attention.peer_triton.PeerTritonMLABackend",
}


def install() -> None:
    """Register every name; vLLM imports a backend only when it is chosen. Idempotent."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in BACKENDS.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)
    copyreg.pickle(AttentionBackendEnum, by_name)


def by_name(member: Any) -> tuple[Any, tuple[str]]:
    """Pickle a backend by name: a spawned process reads vLLM's configuration before it has loaded any plugin."""
    return named, (member.name,)


def named(name: str) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    install()
    return AttentionBackendEnum[name]
