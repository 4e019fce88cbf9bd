# SPDX-License-Identifier: Apache-2.0
"""How often requests waited for the KV cache in a cell: judged sample by sample from what was recorded. Pure.

vLLM counts all that wait to be scheduled as waiting for "capacity", be it KV blocks or computation. But it admits a
request only if its whole prompt fits into the free blocks (`scheduler_reserve_full_isl`, on by default), so a
request of many tokens waits for the cache long before the cache is full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.client import RequestRecord

MetricsSample = Mapping[str, float | None]


@dataclass(frozen=True)
class KvWaits:
    """Of `samples`, one a second, requests waited in `waiting`, and in `kv` of those the next did not fit."""

    samples: int
    waiting: int
    kv: int


def kv_waits(
    samples: Sequence[MetricsSample], records: Sequence[RequestRecord], kv_tokens: int | None
) -> KvWaits | None:
    """What the samples of a cell (`Cell.samples`) say; `kv_tokens` is the size of the engine's KV cache.

    None where that size is unknown or the engine exports neither KV usage nor waiting requests.
    """
    if not kv_tokens:
        return None
    told = waiting = kv = 0
    for sample in samples:
        usage, waits = sample["kv_usage"], sample["waiting_capacity"]
        if usage is None or waits is None:
            continue
        told += 1
        if waits > 0:
            waiting += 1
            kv += usage + _next_prompt_tokens(sample, records) / kv_tokens > 1
    return KvWaits(told, waiting, kv) if told else None


def _next_prompt_tokens(sample: MetricsSample, records: Sequence[RequestRecord]) -> int:
    """The prompt that the engine would admit next, as far as the client can tell; at least the shortest one.

    Requests are admitted in the order in which they came. Of those without a first token the earliest are being
    prefilled: as many as run and do not decode.
    """
    t_s, running = sample["t_s"] or 0.0, sample["running"] or 0.0
    begun = [r for r in records if r.sent_s is not None and r.sent_s <= t_s and not _ended(r, t_s)]
    without = [r for r in begun if r.first_token_s is None or r.first_token_s > t_s]
    prefilling = max(0, int(running) - (len(begun) - len(without)))
    waiting = sorted(without, key=lambda record: record.sent_s or 0.0)[prefilling:]
    return waiting[0].prompt_tokens if waiting else min((r.prompt_tokens for r in records), default=0)


def _ended(record: RequestRecord, t_s: float) -> bool:
    return record.done_s is not None and record.done_s <= t_s
