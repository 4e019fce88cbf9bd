# SPDX-License-Identifier: Apache-2.0
"""What lies in an image, written while it is built: CycloneDX 1.6 and the SHA256SUMS of the wheels.

Runs in the image's own environment. Times and hosts are left out, so that the same lock gives the same text.
"""

import json
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kimi_k3_serve import __version__
from kimi_k3_serve.image_lock import OURS, normalise, pins, site_packages


def write(target: str, report: Path, lock: Path, out: Path) -> None:
    """Write `out`/sbom.cdx.json and `out`/SHA256SUMS.

    Args:
        report: pip's --report of the installation: which wheels really came, with their digests.
        lock: the target's lock file.
    """
    (out / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in wheels(report)))
    components = python_components({name: digest for name, (_, digest) in pins(lock).items()})
    (out / "sbom.cdx.json").write_text(
        json.dumps(document(target, components + debian_components()), indent=1) + "\n"
    )


def wheels(report: Path) -> list[tuple[str, str]]:
    """File name and SHA-256 of each wheel in pip's report, by name."""
    found = []
    for item in json.loads(report.read_text())["install"]:
        info = item["download_info"]
        name = unquote(urlsplit(info["url"]).path.rpartition("/")[2])
        archive = info["archive_info"]  # before pip 23.1 it has only "hash": "sha256=…"
        found.append(
            (name, archive.get("hashes", {}).get("sha256") or archive["hash"].removeprefix("sha256="))
        )
    return sorted(found)


def python_components(digests: dict[str, str]) -> list[dict[str, Any]]:
    """One component a distribution, with the digest of its wheel where the lock has one."""
    components = []
    for dist in sorted(metadata.distributions(path=site_packages()), key=lambda dist: normalise(dist.name)):
        name = normalise(dist.name)
        component: dict[str, Any] = {
            "type": "library",
            "name": name,
            "version": dist.version,
            "purl": f"pkg:pypi/{name}@{dist.version}",
            "bom-ref": f"pkg:pypi/{name}@{dist.version}",
        }
        if name in digests:
            component["hashes"] = [{"alg": "SHA-256", "content": digests[name]}]
        if "License-Expression" in dist.metadata:
            component["licenses"] = [{"expression": dist.metadata["License-Expression"]}]
        components.append(component)
    return components


def debian_components() -> list[dict[str, Any]]:
    """The base image's packages; none where dpkg is not."""
    try:
        listed = subprocess.run(
            ["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}\n"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except FileNotFoundError:
        return []
    components = []
    for line in listed.splitlines():
        name, version, architecture = line.split()
        purl = f"pkg:deb/debian/{name}@{version}?arch={architecture}"
        components.append(
            {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}
        )
    return components


def document(target: str, components: list[dict[str, Any]]) -> dict[str, Any]:
    subject = {
        "type": "container",
        "name": f"{OURS}-{target}",
        "version": __version__,
        "bom-ref": f"{OURS}-{target}",
    }
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": components,
    }
