# SPDX-License-Identifier: Apache-2.0
"""Upgrade and rollback by digest, under compose v2."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import SERVE, Server, docker, settings

from harness.engines.process import free_port


@pytest.fixture
def v2(model: Path, key_file: Path) -> Iterator[Server]:
    server = Server(free_port(), key_file.read_text().strip(), project="kimi-k3-upgrade", v2=True)
    server.environment = settings(model, key_file, server.port)
    try:
        yield server
    finally:
        server.compose("--profile", "cpu", "down", "-v", "--remove-orphans", "-t", "5")


def test_a_new_digest_upgrades_and_the_old_one_rolls_back(v2: Server, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {SERVE}\nLABEL org.opencontainers.image.version=next\n")
    docker("build", "-q", "-t", "kimi-k3-test:next", str(tmp_path))
    old, new = (image_id(name) for name in (SERVE, "kimi-k3-test:next"))
    assert old != new
    usages = []
    for digest in (old, new, old):
        v2.compose("--profile", "cpu", "up", "-d", "--wait", "serve-cpu", IMAGE=digest)
        assert v2.inspect()["Image"] == digest
        usages.append(v2.complete(v2.key)["usage"])
    assert usages[0]["completion_tokens"] == 8 and usages[0] == usages[1] == usages[2]
    v2.compose("--profile", "cpu", "down", "-v", "--remove-orphans")
    assert v2.left_over() == []
    docker("rmi", "kimi-k3-test:next")


def image_id(name: str) -> str:
    found: str = json.loads(docker("image", "inspect", name).stdout)[0]["Id"]
    return found
