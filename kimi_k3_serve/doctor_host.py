# SPDX-License-Identifier: Apache-2.0
"""What the doctor looks at: this machine through its files and nvidia-smi. Tests give it another root and program.

Nothing here judges; doctor.py does.
"""

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "driver_version",
    "compute_cap",
    "ecc.errors.uncorrected.volatile.total",
)

CUDA_VERSION = re.compile(r"CUDA (?:UMD )?Version: *(\d+)\.(\d+)")  # drivers from 600 on say UMD


@dataclass(frozen=True)
class GPU:
    """Memory in MiB as nvidia-smi counts; `ecc_errors` is None where ECC is off."""

    index: int
    uuid: str
    name: str
    memory_mib: int
    used_mib: int
    driver: str
    sm: str
    ecc_errors: int | None


@dataclass(frozen=True)
class Host:
    """`root` stands for / and `nvidia_smi` for the program, in tests."""

    root: Path = Path("/")
    nvidia_smi: Sequence[str] = ("nvidia-smi",)
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))

    def read(self, path: str) -> str | None:
        """A file's text, None where it is not there."""
        try:
            return (self.root / path).read_text(errors="replace")
        except OSError:
            return None

    def gpus(self) -> list[GPU]:
        """Those that CUDA_VISIBLE_DEVICES leaves to CUDA; empty without a driver or a GPU."""
        text = self.smi(f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits")
        found = []
        for line in (text or "").splitlines():
            values = [value.strip() for value in line.split(",")]
            if len(values) == len(FIELDS) and values[0].isdigit():
                index, uuid, name, memory, used, driver, sm, ecc = values
                errors = int(ecc) if ecc.isdigit() else None
                found.append(GPU(int(index), uuid, name, int(memory), int(used), driver, sm, errors))
        return visible(found, self.environment.get("CUDA_VISIBLE_DEVICES"))

    def smi(self, *arguments: str) -> str | None:
        """nvidia-smi's answer, None where it fails or is not there."""
        try:
            done = subprocess.run(
                [*self.nvidia_smi, *arguments], capture_output=True, text=True, timeout=30, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout

    def cuda_of_driver(self) -> tuple[int, int] | None:
        """The newest CUDA that the driver runs, from the head of nvidia-smi."""
        found = CUDA_VERSION.search(self.smi() or "")
        return (int(found[1]), int(found[2])) if found else None

    def links(self) -> dict[tuple[int, int], str]:
        """Pair of GPUs -> how peer access between them stands ("OK", "NS", "CNS", …)."""
        lines = [line.split() for line in (self.smi("topo", "-p2p", "r") or "").splitlines()]
        rows = [
            words
            for words in lines
            if len(words) > 2 and words[0].startswith("GPU") and words[1][:3] != "GPU"
        ]
        return {(i, j): state for i, words in enumerate(rows) for j, state in enumerate(words[1:]) if i < j}

    def free_gb(self, folder: Path) -> float:
        """Free space where `folder` is or would be, in 10^9 bytes."""
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free / 1e9

    def shm_mb(self) -> float | None:
        folder = self.root / "dev/shm"
        return shutil.disk_usage(folder).total / 1e6 if folder.is_dir() else None

    def limit(self, which: int) -> int:
        """Soft limit of this process; -1 is none."""
        return resource.getrlimit(which)[0]


def visible(gpus: list[GPU], setting: str | None) -> list[GPU]:
    """What CUDA sees of `gpus`: entries are indices or UUIDs, and the first unknown one ends the list."""
    if setting is None:
        return gpus
    chosen: list[GPU] = []
    for word in setting.split(","):
        entry = word.strip()
        named = [
            g for g in gpus if entry == str(g.index) or (entry[:4] == "GPU-" and g.uuid.startswith(entry))
        ]
        if not named:
            break
        chosen += named
    return chosen
