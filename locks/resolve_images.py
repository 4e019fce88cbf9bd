# SPDX-License-Identifier: Apache-2.0
"""Resolve locks/<image>.in into locks/<image>.txt for the images' platform: one wheel a package, with its SHA-256.

    python locks/resolve_images.py serve-cpu bench        # or no name: all of them
    python locks/resolve_images.py --check                # are the locks still a solution, with these very wheels?

uv solves from metadata alone, so that a GPU image is locked in seconds without downloading its gigabytes. It offers
every wheel of a chosen release; of those, the one that pip would take on the images' base is kept.
`UV_FIND_LINKS` names a folder or page with wheels that the package index lacks (PyTorch's CPU build).
"""

import argparse
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


def solve(image: str, constraints: str | None) -> list[dict[str, Any]]:
    """The packages of a solution under the versions in the file `constraints`, as PEP 751 writes them."""
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
        if constraints:
            command += ["--constraint", str(LOCKS / constraints)]
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


def main(images: list[str], check: bool) -> None:
    rank = {tag: place for place, tag in reversed(list(enumerate(supported_tags())))}
    for image in images or IMAGES:
        path = LOCKS / f"{image}.txt"
        packages = solve(image, path.name if check else FOLLOWS.get(image))
        lines = sorted(best_wheel(package, rank) for package in packages)
        head = (
            f"# Made by locks/resolve_images.py from {image}.in; install with --no-deps --require-hashes.\n"
        )
        text = head + "\n".join(lines) + "\n"
        if check and text != path.read_text():
            changed = sorted(set(text.splitlines()) ^ set(path.read_text().splitlines()))
            sys.exit(f"error: {path.name} is no solution any more, see {changed[0]}; run make lock-images")
        path.write_text(text)
        print(f"{image}: {len(lines)} wheels" + (", each offered with the locked SHA-256" if check else ""))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Resolve the images' locks.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(IMAGES)} (all)")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    chosen = parser.parse_args()
    main(chosen.images, chosen.check)
