# SPDX-License-Identifier: Apache-2.0
"""An engine as a container of ours: an image by digest, started, awaited, watched, stopped and removed.

    harness ── stdin pipe ── docker_supervise.py ── Docker engine ── container

It is an Engine like a process: the supervisor is the process whose end is the engine's end. As a net for a
supervisor that was killed itself, each container carries a unique label, and stopping removes what bears it.
Ready means that the server has generated a token, not that it listens.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import docker
from docker.errors import DockerException, ImageNotFound, NotFound

from harness.connection import auth
from harness.engines.docker_supervise import DESCRIPTION, explanation
from harness.engines.process import RECORDED_PREFIXES, SECRET, Engine, _until_ready, require_free_port
from harness.engines.proof import clear_proofs
from harness.errors import UserError

LABEL = "kimi-k3.run"
FIRST_TOKEN_TIMEOUT_S = 600.0
GPU_ULIMITS = {"memlock": -1, "stack": 67108864}
"""What NCCL's pinned buffers and vLLM's threads need; an engine without GPUs keeps the daemon's own."""


@dataclass(frozen=True)
class Container:
    """What to run, in the words of docker-py.

    `image` by digest or by id. `volumes`: host folder -> {"bind": path, "mode": "ro" | "rw"}. `gpus`: "all",
    device ids separated by commas, or None. `ulimits`: name -> soft and hard limit.
    """

    image: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    gpus: str | None = None
    network_mode: str = "host"
    ipc_mode: str | None = "host"
    shm_size: str | None = None
    ulimits: Mapping[str, int] = field(default_factory=dict)
    user: str | None = None
    read_only: bool = True
    tmpfs: Mapping[str, str] = field(default_factory=lambda: {"/tmp": "mode=1777,exec"})
    cap_drop: Sequence[str] = ("ALL",)
    security_opt: Sequence[str] = ("no-new-privileges:true",)
    init: bool = True
    entrypoint: Sequence[str] | None = None


@dataclass
class DockerEngine(Engine):
    """`token` is the value of the container's label."""

    def started_as(self) -> dict[str, Any]:
        """Image by digest, `argv` and `environment` of the container; nothing that sounds like a secret."""
        (container,) = containers(self.token)
        config = container.attrs["Config"]
        variables = [entry.partition("=") for entry in config["Env"]]
        return {
            "image": config["Image"],
            "image_id": container.attrs["Image"],
            "image_labels": config["Labels"],
            "argv": [container.attrs["Path"], *container.attrs["Args"]],
            "environment": {
                name: value
                for name, _, value in sorted(variables)
                if name.startswith(RECORDED_PREFIXES) and not SECRET.search(name)
            },
        }

    def stop(self) -> list[int]:
        """Ends the container; returns process ids that only the sweep found, as for a process."""
        left = super().stop()
        for container in containers(self.token):
            container.remove(force=True, v=True)
        return left


async def start(
    name: str,
    container: Container,
    *,
    url: str,
    log_path: Path,
    proof_dir: Path | None = None,
    ready_timeout_s: float = 3600.0,
    stop_grace_s: float = 30.0,
    api_key: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> DockerEngine:
    """Starts a container and returns once its server has generated a token.

    Raises UserError for an image that is not there, a busy port, a container that ends before it is ready, and
    one not ready in `ready_timeout_s` seconds; nothing of it is left in any of these cases, nor when this
    coroutine is cancelled.
    """
    require_image(container.image)
    require_free_port(url)
    if proof_dir is not None:
        clear_proofs(proof_dir)
    engine = _spawn(name, container, url=url, log_path=log_path, stop_grace_s=stop_grace_s)
    try:
        await _until_ready(engine, proof_dir, ready_timeout_s, progress or (lambda _: None))
        await engine.guard(generate_one_token(url, api_key), "generating its first token")
    except BaseException:
        engine.stop()
        raise
    return engine


def _spawn(name: str, container: Container, *, url: str, log_path: Path, stop_grace_s: float) -> DockerEngine:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    token = uuid.uuid4().hex
    description = {**asdict(container), "labels": {LABEL: token}, "name": f"kimi-k3-{name}-{token[:8]}"}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.engines.docker_supervise", "--grace", str(stop_grace_s)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, DESCRIPTION: json.dumps(description)},
            start_new_session=True,  # Ctrl-C on our terminal is ours to handle
        )
    return DockerEngine(name, url, log_path, token, stop_grace_s, process)


async def generate_one_token(url: str, api_key: str | None) -> None:
    """Raises UserError where the server does not generate a token for a prompt of one id."""
    timeout = aiohttp.ClientTimeout(total=FIRST_TOKEN_TIMEOUT_S)
    began = time.monotonic()
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=auth(api_key)) as session:
            async with session.get(f"{url}/v1/models") as answer:
                answer.raise_for_status()
                model = (await answer.json())["data"][0]["id"]
            body = {"model": model, "prompt": [3], "max_tokens": 1, "temperature": 0}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                tokens = (await answer.json())["usage"]["completion_tokens"]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UserError(
            f"{url} listens but generated no token within {time.monotonic() - began:.0f} s ({error})"
        ) from error
    if tokens < 1:
        raise UserError(f"{url} answered a request for one token with none")


def command_line(container: Container) -> list[str]:
    """The `docker run` that a container amounts to, for people; the engine itself goes through docker-py."""
    words = ["docker", "run", "--rm", "--network", container.network_mode]
    if container.gpus:
        words += ["--gpus", container.gpus if container.gpus == "all" else f"device={container.gpus}"]
    words += ["--ipc", container.ipc_mode] if container.ipc_mode else []
    words += ["--shm-size", container.shm_size] if container.shm_size else []
    words += ["--user", container.user] if container.user else []
    words += ["--read-only"] if container.read_only else []
    words += ["--init"] if container.init else []
    for name, limit in container.ulimits.items():
        words += ["--ulimit", f"{name}={limit}"]
    for name, value in container.environment.items():
        words += ["--env", f"{name}={value}"]
    for option, values in (("--cap-drop", container.cap_drop), ("--security-opt", container.security_opt)):
        words += [word for value in values for word in (option, value)]
    for target, options in container.tmpfs.items():
        words += ["--tmpfs", f"{target}:{options}"]
    for source, mount in container.volumes.items():
        words += ["--volume", f"{source}:{mount['bind']}:{mount['mode']}"]
    return [*words, container.image, *container.command]


def require_image(image: str) -> None:
    """Raises UserError where there is no Docker engine to ask, or it does not have the image."""
    try:
        client().images.get(image)
    except ImageNotFound:
        raise UserError(
            f"image {image} is not on this host; docker pull it, or build it with make image"
        ) from None
    except DockerException as error:
        raise UserError(
            f"no Docker engine answers ({explanation(error)}); start it, or set DOCKER_HOST"
        ) from None


def containers(token: str) -> list[Any]:
    """Every container, running or not, that one start() made."""
    with contextlib.suppress(NotFound):
        found: list[Any] = client().containers.list(all=True, filters={"label": f"{LABEL}={token}"})
        return found
    return []


def client() -> Any:
    return docker.from_env(timeout=60)
