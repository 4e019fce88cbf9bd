# SPDX-License-Identifier: Apache-2.0
"""These tests need a Docker engine with the built images: .ci/containers prepares both and calls them."""

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stack import Server, run, settings

from harness.engines.process import free_port


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get("KIMI_K3_TEST_IMAGE"):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no Docker engine prepared; run .ci/containers"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    folder.parent.chmod(0o755)
    folder.chmod(0o755)
    run(sys.executable, "-m", "kimi_k3_serve", "checkpoint", "--out", str(folder))
    return folder


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = tmp_path_factory.mktemp("key") / "api_key"
    key.write_text(secrets.token_hex(32) + "\n")
    key.chmod(0o644)  # the container's user reads it
    return key


@pytest.fixture(scope="session")
def server(model: Path, key_file: Path) -> Iterator[Server]:
    started = Server(free_port(), key_file.read_text().strip())
    started.environment = settings(model, key_file, started.port)
    started.compose("up", "-d", "serve-cpu")
    try:
        yield started
    finally:
        started.compose("down", "-v", "--remove-orphans", "-t", "5")
