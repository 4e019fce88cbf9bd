# SPDX-License-Identifier: Apache-2.0
"""Resolve locks/<image>.in into locks/<image>.txt for the images' platform: one wheel a package, with its SHA-256.

    python locks/resolve_images.py serve-cpu bench        # or no name: all of them

uv solves from metadata alone, so that a GPU image is locked in seconds without downloading its gigabytes. It offers
every wheel of a chosen release; of those, the one that pip would take on the images' base is kept.
`UV_FIND_LINKS` names a folder or page with wheels that the package index lacks (PyTorch's CPU build).
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

LOCKS = Path(__file__).parent
PYTHON = (3, 11)
GLIBC = (2, 36)  # Debian 12
FOLLOWS = {"serve-cpu": "cpu.txt", "bench": "cpu.txt", "serve-sm120": "serve.txt"}
IMAGES = ("build", "serve-cpu", "bench", "serve", "serve-sm120")


def supported_tags() -> list[Tag]:
    """What pip accepts on the base, best first."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC[1], 4, -1)]
    platforms = [name for minor in platforms for name in (minor, *LEGACY.get(minor, ()))] + ["linux_x86_64"]
    return [*cpython_tags(PYTHON, platforms=platforms), *compatible_tags(PYTHON, "cp311", platforms)]


LEGACY = {
    "manylinux_2_17_x86_64": ("manylinux2014_x86_64",),
    "manylinux_2_12_x86_64": ("manylinux2010_x86_64",),
    "manylinux_2_5_x86_64": ("manylinux1_x86_64",),
}


def solve(image: str) -> list[dict[str, Any]]:
    """The packages of a solution, as PEP 751 writes them."""
    source = LOCKS / f"{image}.in"
    overrides = [
        line.partition(":")[2].strip()
        for line in source.read_text().splitlines()
        if line.startswith("# override:")
    ]
    with tempfile.TemporaryDirectory() as folder:
        solution, override = Path(folder) / "pylock.toml", Path(folder) / "override.txt"
        override.write_text("\n".join(overrides))
        command = ["uv", "pip", "compile", "-q", str(source), "--format", "pylock.toml", "-o", str(solution)]
        command += ["--no-python-downloads", "--only-binary", ":all:", "--override", str(override)]
        command += ["--python-version", ".".join(map(str, PYTHON))]
        command += ["--python-platform", f"x86_64-manylinux_{GLIBC[0]}_{GLIBC[1]}"]
        if follows := FOLLOWS.get(image):
            command += ["--constraint", str(LOCKS / follows)]
        environment = dict(os.environ)
        if image != "serve-cpu":
            environment.pop("UV_FIND_LINKS", None)  # a CPU build of torch counts as newer than the CUDA build
        subprocess.run(command, check=True, env=environment)
        packages: list[dict[str, Any]] = tomllib.loads(solution.read_text())["packages"]
        return packages


def best_wheel(package: dict[str, Any], rank: dict[Tag, int]) -> str:
    """`name==version --hash=sha256:…` of the wheel that pip would take.

    Raises:
        SystemExit: the release has no wheel for the images' platform.
    """
    found = []
    for wheel in package.get("wheels", []):
        name = wheel.get("name") or (wheel.get("url") or wheel["path"]).rpartition("/")[2].replace("%2B", "+")
        _, _, build, tags = parse_wheel_filename(name)
        if fitting := [rank[tag] for tag in tags if tag in rank]:
            found.append((min(fitting), tuple(-part for part in build[:1]), wheel["hashes"]["sha256"]))
    if not found:
        sys.exit(f"error: {package['name']} {package['version']} has no wheel for the images' platform")
    return f"{package['name']}=={package['version']} --hash=sha256:{min(found)[2]}"


def main(images: list[str]) -> None:
    rank = {tag: place for place, tag in reversed(list(enumerate(supported_tags())))}
    for image in images or IMAGES:
        lines = sorted(best_wheel(package, rank) for package in solve(image))
        head = (
            f"# Made by locks/resolve_images.py from {image}.in; install with --no-deps --require-hashes.\n"
        )
        (LOCKS / f"{image}.txt").write_text(head + "\n".join(lines) + "\n")
        print(f"{image}: {len(lines)} wheels")


if __name__ == "__main__":
    main(sys.argv[1:])
