# SPDX-License-Identifier: Apache-2.0
"""What nvidia-smi says about this host's GPUs: once, or once a second while a cell runs."""

import asyncio
import contextlib
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Any

SMI = ("nvidia-smi",)
FACTS = (
    "name",
    "uuid",
    "driver_version",
    "memory.total",
    "memory.used",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "clocks_event_reasons.active",
)
TIMEOUT_S = 30.0
NUMBERS = {
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
SAMPLED = ("index", *NUMBERS.values(), "clocks_event_reasons.active")
FIRST_WITHIN_S = 5.0
"""How long a cell waits for a first reading: on a host of many GPUs nvidia-smi takes a second or two to start."""


def visible_gpus(nvidia_smi: Sequence[str] = SMI) -> list[str]:
    """Names of this host's GPUs; none where nvidia-smi is not there or fails."""
    return [name for (name,) in _query(nvidia_smi, ("name",))]


def gpu_facts(nvidia_smi: Sequence[str] = SMI) -> list[dict[str, str]]:
    """For each GPU what it is and how it runs now, with units as nvidia-smi writes them."""
    return [dict(zip(FACTS, values, strict=True)) for values in _query(nvidia_smi, FACTS)]


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one time; None for a number that it does not tell. `event_reasons`: what holds its clocks, a mask."""

    unix_s: float
    gpu: int
    sm_mhz: float | None
    memory_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    event_reasons: str


class GpuSampler:
    """`async with GpuSampler() as g:` has a reading of each GPU before its body begins, and one a second (`g.samples`).

    A single nvidia-smi repeats itself and a thread reads its lines, so that the client's event loop neither starts
    nor waits for anything while it sends. Where nvidia-smi is not there, or fails, there are no samples.
    """

    def __init__(self, nvidia_smi: Sequence[str] = SMI) -> None:
        self.samples: list[GpuSample] = []
        self._command = [*nvidia_smi, f"--query-gpu={','.join(SAMPLED)}", "--format=csv,noheader,nounits"]
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._begun = threading.Event()
        self._epoch_s = time.time() - time.monotonic()

    async def __aenter__(self) -> "GpuSampler":
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [*self._command, "--loop=1"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # with this process its reader ends, and so does it
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self._reader.start()
            await asyncio.to_thread(self._begun.wait, FIRST_WITHIN_S)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._reader.join, TIMEOUT_S)

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        with self._process:
            for line in self._process.stdout:
                values = [value.strip() for value in line.split(",")]
                if len(values) == len(SAMPLED) and values[0].isdecimal():
                    unix_s = self._epoch_s + time.monotonic()
                    sm, memory, power, temperature = map(number, values[1:-1])
                    self.samples.append(
                        GpuSample(unix_s, int(values[0]), sm, memory, power, temperature, values[-1])
                    )
                    self._begun.set()
        self._begun.set()


def summarise_gpus(samples: Sequence[GpuSample]) -> list[dict[str, Any]]:
    """For each GPU how many samples there are, each number's least, median and most, and every reason."""
    found = []
    for gpu in sorted({sample.gpu for sample in samples}):
        mine = [sample for sample in samples if sample.gpu == gpu]
        numbers = {name: _extremes([getattr(sample, name) for sample in mine]) for name in NUMBERS}
        reasons = sorted({sample.event_reasons for sample in mine})
        found.append({"gpu": gpu, "samples": len(mine), **numbers, "event_reasons": reasons})
    return found


def _extremes(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"min": min(known), "median": median(known), "max": max(known)} if known else None


def number(text: str) -> float | None:
    """Of what nvidia-smi writes, with its unit (`1980 MHz`) or without; None where it does not tell (`[N/A]`)."""
    try:
        return float(text.partition(" ")[0])
    except ValueError:
        return None


def _query(nvidia_smi: Sequence[str], fields: Sequence[str]) -> list[list[str]]:
    command = [*nvidia_smi, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [row for row in rows if len(row) == len(fields)]
