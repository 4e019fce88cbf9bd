# SPDX-License-Identifier: Apache-2.0
"""A decode backend for Hopper and Blackwell data-centre GPUs: vLLM's own MLA kernel between two peer exchanges.

`PeerDecode` in front of one of vLLM's implementations makes it an owner (`ownership.py`): it gathers the rank-local
queries, lets the wrapped kernel attend over this rank's shard, and merges the partial outputs, over peer symmetric
memory and without multicast (`peer_gather.py`, `peer_merge.py`). The wrapped kernel's LSE is taken in whatever
strides it comes. The exchange holds a bounded number of tokens; a larger batch, and a machine whose GPUs cannot
reach each other, take vLLM's collectives over NCCL, and the log says why.

`peer_flash_attn.py`, `peer_flashmla.py` and `peer_triton.py` name the wrapped backends.
"""

import functools
import os
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group
from vllm.logger import init_logger
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.ops.dcp import dcp_a2a_lse_reduce, get_dcp_workspace_max_num_tokens
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from kimi_k3_serve.attention.peer_exchange import DEFAULT_TIMEOUT_S, TIMEOUT, Geometry, PeerExchange
from kimi_k3_serve.errors import UserError
from kimi_k3_serve.proof import mark_used
from kimi_k3_serve.symmetric import connect
from kimi_k3_serve.symmetric.deadline import limit_s

logger = init_logger(f"vllm.{__name__}")  # vLLM shows what its own logger's children say

MAX_TOKENS = "KIMI_K3_PEER_DECODE_MAX_TOKENS"  # tokens of a decode batch that the buffers hold


class PeerBackend:
    """In front of a vLLM backend: the GPUs this is for, and no prefill context parallelism."""

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major in (9, 10) and super().supports_compute_capability(capability)  # type: ignore[misc]


class PeerDecode:
    """In front of a vLLM MLA implementation: its decode collectives are its own."""

    owns_decode_dcp_collectives = True
    supports_pcp = False
    transports: tuple[str, ...] = ("peer",)

    dcp_world_size: int
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    kv_cache_dtype: str
    lse_base_on_e: bool
    supports_quant_query_input: bool

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.collectives = None
        if self.dcp_world_size > 1:
            config = get_current_vllm_config()
            fp8 = is_quantized_kv_cache(self.kv_cache_dtype) and self.supports_quant_query_input
            dtype = config.model_config.dtype
            geometry = Geometry(
                heads=self.num_heads,
                latent=self.kv_lora_rank,
                rope=self.qk_rope_head_dim,
                query_dtype=torch.float8_e4m3fn if fp8 else dtype,
                output_dtype=dtype,
                max_tokens=max_tokens(config),
                ubatches=max(config.parallel_config.num_ubatches, 1),
            )
            self.collectives = decode_collectives(
                get_dcp_group(), geometry, self.transports, self.lse_base_on_e
            )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        cache: torch.Tensor,
        metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Decode: rank-local queries [B, H, L + P] (or their two parts) in, combined output [B, H, L] out."""
        attend = super().forward_mqa  # type: ignore[misc]
        if self.collectives is None:
            return attend(q, cache, metadata, layer)[0], None
        latent = self.kv_lora_rank
        nope, rope = q if isinstance(q, tuple) else (q[..., :latent], q[..., latent:])
        partial, lse = attend(self.collectives.gather(nope, rope), cache, metadata, layer)
        output = self.collectives.merge(
            partial,
            lse,
            seq_lens=metadata.decode.seq_lens,
            query_start_loc=metadata.query_start_loc[: metadata.num_decodes + 1],
            base_e=self.lse_base_on_e,
        )
        return output, None


class DecodeCollectives:
    """Query gather and merge of one group of layers: over peers where the batch fits, else over NCCL.

    The choice depends on the token count only, which all ranks share; gather and merge of a step agree.
    """

    def __init__(self, group: Any, exchange: PeerExchange | None, way: str) -> None:
        """`way`: how decode travels and why, for the proof."""
        self.group, self.exchange, self.way = group, exchange, way

    def exchange_of(self, tokens: int) -> PeerExchange | None:
        """What a batch of so many tokens goes over; None: NCCL."""
        if self.exchange is None or tokens <= self.exchange.geometry.max_tokens:
            return self.exchange
        logger.info_once(
            "Decode batch of more than %d tokens: gathered and merged over NCCL, not over peers (%s).",
            self.exchange.geometry.max_tokens,
            MAX_TOKENS,
        )
        return None

    def gather(self, nope: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        """[B, H, L] and [B, H, P] -> [B, W * H, L + P]."""
        if exchange := self.exchange_of(nope.shape[0]):
            mark_used("peer_query_gather")
            return exchange.gather(nope, rope, dbo_current_ubatch_id())
        mark_used("collective_query_gather")
        gathered: torch.Tensor = self.group.all_gather(torch.cat([nope, rope], dim=-1), dim=1)
        return gathered

    def merge(
        self,
        partial: torch.Tensor,
        lse: torch.Tensor,
        *,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        base_e: bool,
    ) -> torch.Tensor:
        """[B, W * H, L] and [B, W * H] -> [B, H, L]."""
        if exchange := self.exchange_of(partial.shape[0]):
            mark_used("peer_decode_merge")
            ubatch = dbo_current_ubatch_id()
            return exchange.merge(partial, lse, seq_lens, query_start_loc, base_e=base_e, ubatch=ubatch)
        mark_used("collective_decode_merge")
        merged: torch.Tensor = dcp_a2a_lse_reduce(
            partial,
            lse,
            self.group,
            is_lse_base_on_e=base_e,
            seq_lens=seq_lens,
            query_start_loc=query_start_loc,
        )
        return merged


def max_tokens(config: Any) -> int:
    """Tokens that the exchange holds: as asked for, else vLLM's largest decode batch up to 512.

    Raises:
        UserError: the environment asks for something else than a positive whole number.
    """
    return asked_tokens(MAX_TOKENS) or min(512, int(get_dcp_workspace_max_num_tokens(config)))


def asked_tokens(name: str) -> int | None:
    """The positive whole number that the environment variable `name` states; None where it is unset.

    Raises:
        UserError: it is no such number.
    """
    asked = os.environ.get(name)
    if asked is None:
        return None
    if not asked.isdecimal() or int(asked) == 0:
        raise UserError(f"{name}={asked!r} is not a number of tokens; give a positive whole one")
    return int(asked)


@functools.cache
def decode_collectives(
    group: Any, geometry: Geometry, transports: tuple[str, ...], base_e: bool
) -> DecodeCollectives:
    """The collectives that all layers of one geometry share. Collective: every rank builds its layers in one order."""
    timeout_s = limit_s(TIMEOUT, DEFAULT_TIMEOUT_S)  # before others wait for what a bad value would stop
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    nbytes = geometry.nbytes(group.world_size)
    found = connect(nbytes, group.device_group, device, transports, host_group=group.cpu_group)
    if found.region is None:
        logger.warning_once("Decode queries and outputs go over NCCL, not over peers: %s", found.passed_over)
        return DecodeCollectives(group, None, f"decode over NCCL ({found.passed_over})")
    logger.info_once(
        "Using peer memory (%s) for MLA decode: up to %d tokens, %.0f MiB a rank.",
        found.transport,
        geometry.max_tokens,
        nbytes / 2**20,
    )
    exchange = PeerExchange(found.region, geometry, timeout_s=timeout_s)
    if exchange.on_gpu:
        exchange.load(base_e=base_e)
    return DecodeCollectives(group, exchange, f"decode over {found.transport} memory")
