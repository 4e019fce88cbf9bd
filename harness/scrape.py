# SPDX-License-Identifier: Apache-2.0
"""What the engine says about itself: its Prometheus metrics, read once a second while a cell runs."""

import asyncio
import contextlib
import math
import re
import time
from dataclasses import dataclass, fields
from types import TracebackType

import aiohttp

from harness.client import Target
from harness.connection import auth, tls_context

INTERVAL_S = 1.0
LAST_LOOKS = 3
ANSWER_TIMEOUT_S = 2.0

_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Series:
    """One line of the text exposition format. A suffix `_total` belongs to the name."""

    name: str
    labels: dict[str, str]
    value: float


def parse_metrics(text: str, names: frozenset[str] | None = None) -> list[Series]:
    """The series of a /metrics page; `names`, where given, are the only ones kept. Bad lines are skipped."""
    found = []
    for line in text.splitlines():
        if line.startswith("#") or (names and line.partition("{")[0].partition(" ")[0] not in names):
            continue
        if match := _SERIES.match(line.strip()):
            name, labels, value = match.groups()
            with contextlib.suppress(ValueError):
                found.append(Series(name, dict(_LABEL.findall(labels or "")), float(value)))
    return found


@dataclass(frozen=True)
class Sample:
    """One look at an engine; None for what it does not export. All but KV usage are summed over ranks."""

    unix_s: float
    running: float | None = None
    waiting: float | None = None
    waiting_capacity: float | None = None
    kv_usage: float | None = None
    preemptions_total: float | None = None
    prefix_hits_total: float | None = None
    process_start_unix_s: float | None = None

    @property
    def requests(self) -> float | None:
        """All that are in the engine."""
        known = [value for value in (self.running, self.waiting) if value is not None]
        return sum(known) if known else None


COLUMNS = tuple(field.name for field in fields(Sample) if field.name != "unix_s")

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
_KV_USAGE = "vllm:kv_cache_usage_perc"
_PREEMPTIONS = "vllm:num_preemptions_total"
_PREFIX_HITS = "vllm:prefix_cache_hits_total"
_PROCESS_START = "process_start_time_seconds"
_NAMES = frozenset(
    (_RUNNING, _WAITING, _WAITING_BY_REASON, _KV_USAGE, _PREEMPTIONS, _PREFIX_HITS, _PROCESS_START)
)


def sample_of(text: str, unix_s: float) -> Sample:
    """The few numbers of a /metrics page that a cell is judged by."""
    series = parse_metrics(text, _NAMES)

    def values(name: str, **labels: str) -> list[float]:
        matching = (s.value for s in series if s.name == name and labels.items() <= s.labels.items())
        return [value for value in matching if math.isfinite(value)]

    def total(name: str, **labels: str) -> float | None:
        found = values(name, **labels)
        return sum(found) if found else None

    return Sample(
        unix_s=unix_s,
        running=total(_RUNNING),
        waiting=total(_WAITING),
        waiting_capacity=total(_WAITING_BY_REASON, reason="capacity"),
        kv_usage=max(values(_KV_USAGE), default=None),
        preemptions_total=total(_PREEMPTIONS),
        prefix_hits_total=total(_PREFIX_HITS),
        process_start_unix_s=max(values(_PROCESS_START), default=None),
    )


class Scraper:
    """`async with Scraper(target) as s:` samples its /metrics at entry, every second and at exit (`s.samples`).

    A server without metrics gives no samples; an answer that fails or is late leaves a gap.
    """

    def __init__(self, target: Target) -> None:
        self.samples: list[Sample] = []
        self._target = target
        self._tls = tls_context(target.ca_file)
        # Kept, so that a step of the clock moves no sample within its cell.
        self._epoch_s = time.time() - time.monotonic()

    async def __aenter__(self) -> "Scraper":
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S), headers=auth(self._target.api_key)
        )
        await self._scrape()
        self._task = asyncio.create_task(self._repeat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._last_look()
        await self._session.close()

    async def _last_look(self) -> None:
        """Repeated where an engine that answered before does not: a cell without it does not count."""
        known = len(self.samples)
        await self._scrape()
        for _ in range(LAST_LOOKS - 1 if known else 0):
            if len(self.samples) > known:
                return
            await asyncio.sleep(INTERVAL_S)
            await self._scrape()

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self._scrape()

    async def _scrape(self) -> None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.get(f"{self._target.base_url}/metrics", ssl=self._tls) as response:
                if response.status == 200:
                    text = await response.text(errors="replace")
                    self.samples.append(sample_of(text, self._epoch_s + time.monotonic()))


async def wait_until_idle(target: Target, stop: asyncio.Event, limit_s: float = 60.0) -> float | None:
    """Returns when no request is in the engine (or it does not tell), `stop` is set, or after `limit_s`.

    What an overloaded cell left behind would be the next one's queue. The answer is when the server's process was
    started (`Sample.process_start_unix_s`), where it tells.
    """
    async with Scraper(target) as scraper:
        ends_s = time.monotonic() + limit_s
        while scraper.samples and scraper.samples[-1].requests and time.monotonic() < ends_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), INTERVAL_S)
                break
    return scraper.samples[-1].process_start_unix_s if scraper.samples else None
