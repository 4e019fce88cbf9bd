# SPDX-License-Identifier: Apache-2.0
import itertools
import os
import shutil
import tomllib

import pytest
import yaml
from stack import ROOT, docker, run

PROFILES = [
    list(chosen) for n in range(4) for chosen in itertools.combinations(("cpu", "nodes", "observe"), n)
]


@pytest.mark.parametrize("profiles", PROFILES, ids=["+".join(chosen) or "none" for chosen in PROFILES])
def test_compose_file_is_valid_with_every_profile(profiles: list[str]) -> None:
    arguments = [word for name in profiles for word in ("--profile", name)]
    for files in ([], ["-f", "compose.yaml", "-f", "compose/fabric.yaml"]):
        run("docker-compose", *files, *arguments, "config", "-q")
        docker("compose", *files, *arguments, "config", "-q")


def test_both_generations_of_compose_are_there() -> None:
    assert "version 1.29" in run("docker-compose", "version").stdout
    assert "version 2." in docker("compose", "version").stdout


def test_images_beside_ours_are_the_locked_ones() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for name, entry in tomllib.loads((ROOT / "locks" / "images.toml").read_text()).items():
        if name != "base":
            assert services[name]["image"] == f"{entry['image']}@{entry['digest']}"


def test_dockerfile_has_no_complaint() -> None:
    hadolint = shutil.which("hadolint", path=f"{ROOT}/.venv/bin:{os.environ['PATH']}")
    assert hadolint, "hadolint is in locks/cpu.txt"
    run(hadolint, "Dockerfile")
