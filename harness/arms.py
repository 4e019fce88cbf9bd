# SPDX-License-Identifier: Apache-2.0
"""An arm that we start ourselves: its topology, its variant, and what a running engine must prove to bear its name."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.engines.proof import Proof, objections
from harness.errors import UserError

CPU_FEATURES = (
    "cpu_dcp_mla",
    "owned_decode_collectives",
    "dcp_slot_mapping",
    "chunked_prefill",
    "native_ops",
)
CPU_PATHS = ("prefill_context_gather", "decode_merge")
"""Code paths of DCP that must have run, not only be enabled, once the parity prompts were answered."""
GPU_FEATURES = ("mla_layers", "chunked_prefill")
PEER_FEATURES = ("owned_decode_collectives", "prefill_context_gather")
PEER_PATHS = ("prefill_kv_peer", "peer_query_gather", "peer_decode_merge")
DCP_FEATURES = ("prefill_context_gather",)


@dataclass(frozen=True)
class Variant:
    """How an arm on GPUs differs from others of its topology: vLLM's arguments, and the environment.

    `features` must be active in every rank, and the code paths `paths` must have run once the arm has answered
    the parity prompts.
    """

    extra: tuple[str, ...]
    environment: Mapping[str, str]
    features: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


_PEER = ("--attention-backend", "PEER_FLASH_ATTN_MLA")
_TENSOR = Variant(("--attention-backend", "FLASH_ATTN_MLA"), {})


def _stock(backend: str) -> Variant:
    return Variant(
        ("--attention-backend", backend, "--dcp-comm-backend", "a2a"), {"KIMI_K3_PREFILL_KV": "stock"}
    )


_CONTEXT = {
    "": Variant(_PEER, {"KIMI_K3_PREFILL_KV": "peer"}, PEER_FEATURES, PEER_PATHS),
    # The local kernel of the other arms. Without the plugin's cure it dies with a2a in vLLM 0.32.0 (vllm issue 54305).
    "stock": _stock("FLASH_ATTN_MLA"),
    "stock-flashmla": _stock("FLASHMLA"),
    "shard": Variant(
        _PEER,
        {"KIMI_K3_PREFILL_KV": "peer", "VLLM_KIMI_SHARD_QKV_A": "1"},
        (*PEER_FEATURES, "sharded_projections"),
        (*PEER_PATHS, "projection_all_gather"),
    ),
}


@dataclass(frozen=True)
class Arm:
    """`tp` ranks, in groups of `dcp` that keep different parts of each context."""

    name: str
    tp: int
    dcp: int

    @classmethod
    def parse(cls, name: str) -> "Arm":
        """`tp2`: two ranks that all keep the whole context; `dcp2`: two ranks that share it.

        On GPUs `dcp2-stock` is vLLM's own DCP with the local kernel of the others, `dcp2-stock-flashmla` with
        FLASHMLA's, which needs no cure, and `dcp2-shard` is dcp2 with sharded latent projections.
        """
        match = re.fullmatch(r"(tp|dcp)([1-9][0-9]?)(?:-(stock|stock-flashmla|shard))?", name)
        if not match or (match[1] == "tp" and match[3]):
            raise UserError(f"arm {name!r} is not known; use tpN or dcpN, for example tp2 or dcp2")
        kind, ranks = match[1], int(match[2])
        return cls(name, ranks, ranks if kind == "dcp" else 1)

    @property
    def topology(self) -> dict[str, int]:
        return {"tp": self.tp, "dcp": self.dcp, "ep": 1, "nodes": 1}

    @property
    def topology_name(self) -> str:
        """As the launcher knows it: without the variant."""
        return self.name.partition("-")[0]

    @property
    def variant(self) -> Variant:
        """What an engine on GPUs is started with beyond its topology."""
        return _TENSOR if self.dcp == 1 else _CONTEXT[self.name.partition("-")[2]]

    def require_proof(
        self, proofs: Sequence[Proof], *, used: bool = False, gpu: bool = False, variant: bool = True
    ) -> None:
        """Raises UserError unless every rank proves this topology and, but without `variant`, our backend.

        With `used`, the code paths of DCP must have run as well.
        """
        if gpu:
            features = GPU_FEATURES + (self.variant.features if variant else ())
            paths = self.variant.paths if variant else ()
        else:
            sharded = self.dcp > 1
            features = CPU_FEATURES + (DCP_FEATURES if sharded else ())
            paths = CPU_PATHS if sharded else ()
        against = objections(
            proofs, tp=self.tp, dcp=self.dcp, features=features, used=paths if used else ()
        ) or ([] if proofs else ["no rank wrote a proof"])
        if against:
            raise UserError(
                f"arm {self.name} is not what its name says: {'; '.join(against)};"
                " it is not measured, see the engine's log"
            )
