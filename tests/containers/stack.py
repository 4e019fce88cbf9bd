# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder share: commands on the Docker engine, and the CPU server under compose."""

import json
import os
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SERVE, BENCH = "kimi-k3-serve:serve-cpu", "kimi-k3-serve:bench"
PROJECT = "kimi-k3-test"


def run(
    *argv: str, check: bool = True, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **(env or {})})
    if check and done.returncode:
        raise AssertionError(f"{argv} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done


def docker(*argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return run(os.environ.get("DOCKER", "docker"), *argv, check=check, env={"DOCKER_BUILDKIT": "1"})


@dataclass
class Server:
    """The CPU server under compose: docker-compose 1.29, or compose v2 as the docker client's plugin."""

    port: int
    key: str
    environment: dict[str, str] = field(default_factory=dict)
    project: str = PROJECT
    v2: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def compose(self, *argv: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        program = [os.environ.get("DOCKER", "docker"), "compose"] if self.v2 else ["docker-compose"]
        return run(*program, "-p", self.project, *argv, check=check, env=self.environment | environment)

    @property
    def container(self) -> str:
        label = f"label=com.docker.compose.project={self.project}"
        (name,) = docker("ps", "-aq", "--filter", label).stdout.split()
        return name

    def inspect(self) -> dict[str, object]:
        facts: dict[str, object] = json.loads(docker("inspect", self.container).stdout)[0]
        return facts

    def wait_healthy(self, timeout_s: float = 420.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            state = self.inspect()["State"]
            assert isinstance(state, dict)
            if state["Health"]["Status"] == "healthy":
                return
            time.sleep(1)
        raise AssertionError(f"not healthy: {state}\n{docker('logs', '--tail', '40', self.container).stdout}")

    def ask(self, path: str, body: object = None, key: str | None = None) -> bytes:
        """The answer's body; urllib's HTTPError where it is a refusal."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            found: bytes = answer.read()
        return found

    def complete(self, key: str | None, tokens: int = 8) -> dict[str, Any]:
        body = {
            "model": "/model",
            "prompt": [5, 6, 7],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        found: dict[str, Any] = json.loads(self.ask("/v1/completions", body, key))
        return found

    def left_over(self) -> list[str]:
        """Containers, volumes and networks of this project."""
        label = f"label=com.docker.compose.project={self.project}"
        return [
            f"{kind} {name}"
            for kind in ("container", "volume", "network")
            for name in docker(kind, "ls", "-q", "--filter", label).stdout.split()
        ]


def settings(model: Path, key_file: Path, port: int) -> dict[str, str]:
    """What a user would write into .env."""
    return {
        "IMAGE": SERVE,
        "MODEL_DIR": str(model),
        "API_KEY_FILE": str(key_file),
        "PORT": str(port),
        "TOPOLOGY": "dcp2",
        "DRAIN_S": "40",
    }
