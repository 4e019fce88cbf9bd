# SPDX-License-Identifier: Apache-2.0
"""`PeerDecode` inside vLLM's own layers: W ranks over gloo, the peer kernels in the Triton interpreter.

`peer_layers.py WORLD_SIZE`, with TRITON_INTERPRET=1. Prints vLLM's log, and each case that held once a rank.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import ownership_layers as layers
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging

from kimi_k3_serve import proof
from kimi_k3_serve.attention import peer
from kimi_k3_serve.attention.cpu_mla import CPUDCPMLABackend
from kimi_k3_serve.inspection import owned


class PeerCPUImpl(peer.PeerDecode, layers.ManagedImpl):
    """The CPU's attention between peer exchanges over memory that the ranks share."""

    transports = ("shared",)
    can_return_lse_for_decode = True

    @property
    def supports_quant_query_input(self) -> bool:  # type: ignore[override]
        return False

    @supports_quant_query_input.setter
    def supports_quant_query_input(self, value: bool) -> None: ...


class PeerCPUBackend(CPUDCPMLABackend):
    @staticmethod
    def get_impl_cls() -> type[PeerCPUImpl]:
        return PeerCPUImpl


class NoPeersImpl(PeerCPUImpl):
    transports = ("peer",)  # which a CPU does not have


class NoPeersBackend(CPUDCPMLABackend):
    @staticmethod
    def get_impl_cls() -> type[NoPeersImpl]:
        return NoPeersImpl


def run_cases(rank: int, config: Any, folder: Path) -> None:
    configure_logging(LoggingConfig())  # as vLLM's worker does when it starts
    owner = layers.shared_decode(layers.shared_layer("shared.owner", CPUDCPMLABackend), rank)
    layer = layers.shared_layer("shared.peer", PeerCPUBackend)
    assert layers.built == [] and layer.dcp_manager is None
    assert layer.impl.collectives.exchange is not None
    assert owned([layer])["reason"] == "no layer holds an MLADCPManager; decode over shared memory"
    for _ in range(3 if layers.W < 8 else 1):  # epochs go on
        torch.testing.assert_close(layers.shared_decode(layer, rank), owner, rtol=1e-4, atol=1e-4)
    layers.passed("shared-peer")

    kimi_owner = layers.kimi_decode(layers.kimi_layer("kimi.owner", CPUDCPMLABackend), rank, config)
    kimi = layers.kimi_layer("kimi.peer", PeerCPUBackend)
    assert layers.built == [] and kimi.dcp_manager is None
    assert kimi.impl.collectives is layer.impl.collectives  # one exchange for all layers of one geometry
    result = layers.kimi_decode(kimi, rank, config)
    torch.testing.assert_close(result, kimi_owner, rtol=1e-4, atol=1e-4)
    layers.passed("kimi-peer")

    # Above the bound, and without peers: the collective path, with vLLM's merge stood in for (it needs a GPU).
    def reduce(partial: Any, lse: Any, group: Any, **arguments: Any) -> torch.Tensor:
        assert arguments["is_lse_base_on_e"] and arguments["seq_lens"].tolist() == list(layers.LOCAL_LENS)
        received = layer.impl.exchange_partials(partial, lse)
        return layers.merge_partials(*received)[0]

    peer.dcp_a2a_lse_reduce = reduce
    os.environ[peer.MAX_TOKENS] = "1"  # the batch has two tokens
    bounded = layers.shared_layer("shared.bounded", PeerCPUBackend)
    assert bounded.impl.collectives.exchange.geometry.max_tokens == 1
    assert torch.equal(layers.shared_decode(bounded, rank), owner)
    lonely = layers.shared_layer("shared.lonely", NoPeersBackend)
    assert lonely.impl.collectives.exchange is None
    assert "; decode over NCCL (peer: rank 0: cpu has no GPU peers)" in owned([lonely])["reason"]
    assert torch.equal(layers.shared_decode(lonely, rank), owner)
    layers.passed("collective-fallback")


def run_alone(rank: int, config: Any, folder: Path) -> None:
    """Without DCP a peer backend is the kernel that it wraps: no exchange, no memory, no collective."""
    for layer_of, decode, more in [
        (layers.shared_layer, layers.shared_decode, ()),
        (layers.kimi_layer, layers.kimi_decode, (config,)),
    ]:
        owner = decode(layer_of(f"{layer_of.__name__}.owner", CPUDCPMLABackend), rank, *more)
        layer = layer_of(f"{layer_of.__name__}.peer", PeerCPUBackend)
        assert layers.built == [] and layer.dcp_manager is None and layer.impl.collectives is None
        assert torch.equal(decode(layer, rank, *more), owner)
    assert not {name for name in proof._used if name.startswith(("peer", "collective"))}
    layers.passed("peer-alone")


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    layers.run_cases, layers.run_alone = run_cases, run_alone
    torch.set_num_threads(1)
    layers.main(int(sys.argv[1]))
