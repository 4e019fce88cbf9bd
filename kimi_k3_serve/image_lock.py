# SPDX-License-Identifier: Apache-2.0
"""What an image is made of: the lock files of a target, their common digest, and whether an image still is that.

    locks/images.toml         base image by digest
    locks/<target>.txt        every wheel: exact version, SHA-256
    locks/build.txt           what builds our own wheel
    upstream.toml             text of the upstream functions that the plugin replaces or relies on (source_lock.py)

The digest over these is the image's label `kimi-k3.lock.sha256`. Of patches there are none.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from kimi_k3_serve import source_lock
from kimi_k3_serve.source_lock import SourceLockError

TARGETS = ("serve", "serve-sm120", "serve-cpu", "bench")
LABEL = "kimi-k3.lock.sha256"
OURS = "kimi-k3-serve"
PIN = re.compile(r"([A-Za-z0-9._-]+)==(\S+) --hash=sha256:([0-9a-f]{64})")


def folder() -> Path:
    """`locks/` of the image or of the checkout that this module runs from."""
    return Path(os.environ.get("KIMI_K3_LOCKS", Path(__file__).parents[1] / "locks"))


def lock_files(target: str) -> dict[str, Path]:
    """Name in the digest -> file.

    Raises:
        SourceLockError: no such target, or a file is missing.
    """
    if target not in TARGETS:
        raise SourceLockError(f"target {target!r} is not known; choose one of {', '.join(TARGETS)}")
    files = {name: folder() / name for name in ("images.toml", "build.txt", f"{target}.txt")}
    files["upstream.toml"] = source_lock.LOCK
    for path in files.values():
        if not path.is_file():
            raise SourceLockError(f"{path} is missing; run this in a checkout, or set KIMI_K3_LOCKS")
    return files


def lock_sum(target: str) -> str:
    """SHA-256 over `sha256  name` lines of the target's lock files, in order of name."""
    lines = [f"{sha256(path)}  {name}\n" for name, path in sorted(lock_files(target).items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def pins(path: Path) -> dict[str, tuple[str, str]]:
    """Normalised name -> version, SHA-256 of the one wheel.

    Raises:
        SourceLockError: a line that is neither a pin with its hash nor a comment.
    """
    found = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            if not (match := PIN.fullmatch(line)):
                raise SourceLockError(
                    f"{path.name}: {line[:60]!r} is not name==version with one sha256; resolve the lock anew"
                )
            found[normalise(match[1])] = (match[2], match[3])
    return found


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_installed(target: str, *, deep: bool = False) -> str:
    """Compare this environment with the lock; meant for the inside of an image.

    Args:
        deep: also hash every installed file against the RECORD of its wheel.

    Raises:
        SourceLockError: naming the first difference.
    """
    expected = os.environ.get("KIMI_K3_LOCK_SHA256")
    if expected and expected != lock_sum(target):
        raise SourceLockError(
            f"the lock files in this image add up to {lock_sum(target)[:12]}, its label says {expected[:12]};"
            " somebody changed them after the build: pull the digest again or rebuild"
        )
    locked = pins(folder() / f"{target}.txt")
    installed = {normalise(dist.name): dist for dist in metadata.distributions(path=site_packages())}
    for name, (version, _) in locked.items():
        found = installed[name].version if name in installed else "nothing"
        if found != version:
            raise SourceLockError(f"{name} {version} is locked but {found} is installed; rebuild the image")
    if extra := sorted(set(installed) - set(locked) - {OURS}):
        raise SourceLockError(f"{extra[0]} is installed but not locked; rebuild the image")
    for name, module in sorted(foreign_modules(installed)):
        raise SourceLockError(
            f"{name} would be imported from {module}, not site-packages; unset PYTHONPATH and remove the overlay"
        )
    wheels = folder().parent / "SHA256SUMS"
    if wheels.is_file():
        verify_wheels(wheels, locked)
    if deep:
        for dist in installed.values():
            verify_record(dist)
    return f"{target}: {len(locked)} wheels are the locked ones, lock {lock_sum(target)[:12]}"


def verify_wheels(sums: Path, locked: Mapping[str, tuple[str, str]]) -> None:
    """Compare `sha256  wheel` lines, as the build wrote them, with the lock."""
    for line in sums.read_text().splitlines():
        digest, _, wheel = line.partition("  ")
        name = normalise(wheel.split("-")[0])
        if name != OURS and locked.get(name, ("", ""))[1] != digest:
            raise SourceLockError(
                f"{wheel} was installed with sha256 {digest[:12]}, which is not the locked one"
            )


def verify_record(dist: metadata.Distribution) -> None:
    """Hash each file of a wheel that its RECORD has a digest for."""
    for file in dist.files or ():
        if file.hash is None or file.suffix == ".pyc":  # pip compiles anew what a wheel brought compiled
            continue
        path = Path(str(file.locate()))
        if not path.is_file():
            raise SourceLockError(f"{dist.name}: {file} is missing; pull the image's digest again or rebuild")
        with path.open("rb") as opened:
            found = hashlib.file_digest(opened, file.hash.mode).digest()
        if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != file.hash.value:
            raise SourceLockError(
                f"{dist.name}: the text of {file} differs from its wheel; pull the image's digest again or rebuild"
            )


def site_packages() -> list[str]:
    return [entry for entry in sys.path if entry.endswith("site-packages")]


def foreign_modules(installed: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """vLLM, torch and our packages where they would come from elsewhere than site-packages."""
    from importlib.util import find_spec

    for name in ("vllm", "torch", "kimi_k3_serve", "harness"):
        spec = find_spec(name)
        if spec and spec.origin and not any(spec.origin.startswith(entry) for entry in site_packages()):
            yield name, spec.origin


def verify_image(image: str) -> str:
    """Compare a built image with this checkout's locks: its label, then its inside.

    Raises:
        SourceLockError: naming the first difference.
    """
    labels = json.loads(docker("image", "inspect", image))[0]["Config"]["Labels"] or {}
    target = labels.get("kimi-k3.target")
    if target is None or LABEL not in labels:
        raise SourceLockError(f"{image} has no label {LABEL}; build it with make image")
    if labels[LABEL] != lock_sum(target):
        raise SourceLockError(
            f"{image} was built from lock {labels[LABEL][:12]}, this checkout's is {lock_sum(target)[:12]};"
            " check out the image's revision or rebuild it"
        )
    inside = ["run", "--rm", "--network", "none", "--read-only", "--entrypoint", "kimi-k3", image]
    return docker(*inside, "lock", "verify", "--deep").strip()


def docker(*args: str) -> str:
    """Run the docker command line; its last line of complaint is ours.

    Raises:
        SourceLockError: docker failed, or is not there.
    """
    try:
        done = subprocess.run(
            [os.environ.get("DOCKER", "docker"), *args], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise SourceLockError(
            "docker is not on PATH; install it, or run kimi-k3 lock verify in the image"
        ) from None
    if done.returncode:
        complaint = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise SourceLockError(complaint.removeprefix("error: "))
    return done.stdout


def update_images() -> list[str]:
    """Rewrite the digests in images.toml from the images that this host's Docker engine has pulled."""
    path = folder() / "images.toml"
    text, changed = path.read_text(), []
    for name, entry in tomllib.loads(text).items():
        repository = entry["image"].partition(":")[0]
        pulled = json.loads(docker("image", "inspect", entry["image"]))[0]["RepoDigests"]
        digests = [item.partition("@")[2] for item in pulled if item.partition("@")[0].endswith(repository)]
        if digests and digests[0] != entry["digest"]:
            text = text.replace(entry["digest"], digests[0])
            changed.append(name)
    path.write_text(text)
    return changed


def base_image() -> str:
    """The image that every target is built on, by digest."""
    base = tomllib.loads((folder() / "images.toml").read_text())["base"]
    return f"{base['image']}@{base['digest']}"
