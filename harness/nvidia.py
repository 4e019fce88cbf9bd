# SPDX-License-Identifier: Apache-2.0
"""What nvidia-smi says about this host's GPUs."""

import subprocess
from collections.abc import Sequence

SMI = ("nvidia-smi",)
FACTS = (
    "name",
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


def visible_gpus(nvidia_smi: Sequence[str] = SMI) -> list[str]:
    """Names of this host's GPUs; none where nvidia-smi is not there or fails."""
    return [name for (name,) in _query(nvidia_smi, ("name",))]


def gpu_facts(nvidia_smi: Sequence[str] = SMI) -> list[dict[str, str]]:
    """For each GPU what it is and how it runs now, with units as nvidia-smi writes them."""
    return [dict(zip(FACTS, values, strict=True)) for values in _query(nvidia_smi, FACTS)]


def _query(nvidia_smi: Sequence[str], fields: Sequence[str]) -> list[list[str]]:
    command = [*nvidia_smi, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [row for row in rows if len(row) == len(fields)]
