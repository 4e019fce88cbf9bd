# SPDX-License-Identifier: Apache-2.0
"""What a run was measured with: the machine, and the code of the harness."""

import functools
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")


def host_facts(cpuinfo: Path = CPUINFO) -> dict[str, Any]:
    """For the manifest; no name of the machine, for runs are published."""
    return {
        "machine": platform.machine(),
        "cpu": cpu_model(cpuinfo),
        "cpus": os.cpu_count(),
        "system": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def cpu_model(cpuinfo: Path = CPUINFO) -> str | None:
    """As the first processor names itself; None where the kernel does not tell, as on Arm."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return None
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in fields if name.strip() == "model name"), None)


@functools.cache
def code_sha256() -> str:
    """SHA-256 over the modules that measure; what only reports may change between sessions."""
    modules = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in modules)).hexdigest()
