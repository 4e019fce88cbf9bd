# SPDX-License-Identifier: Apache-2.0
"""Runs one container and leaves nothing of it behind, whatever ends first.

    python docker_supervise.py --grace 10 < pipe        KIMI_K3_CONTAINER holds the container's description

The same protocol as supervise.py: the harness holds the only writing end of our stdin, and its end of file
means that the container is to go, because the harness asked or is gone. The container's output is our output.
It is removed with its anonymous volumes in every case.

Exit status: the container's own; 125 when it could not be started, with one line why.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import threading
from typing import Any

import docker
from docker.errors import APIError, DockerException, NotFound
from docker.types import DeviceRequest, Ulimit

DESCRIPTION = "KIMI_K3_CONTAINER"
CANNOT_START = 125


def main() -> int:
    parser = argparse.ArgumentParser(prog="docker_supervise")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    grace_s = parser.parse_args().grace
    stop_requested = _signals_as_file_descriptor()
    description = json.loads(os.environ[DESCRIPTION])
    try:
        client = docker.from_env(timeout=60)
        container = client.containers.create(**container_arguments(description))
    except DockerException as error:
        print(f"cannot create the container: {explanation(error)}", file=sys.stderr)
        return CANNOT_START
    try:
        container.start()
        ended = _ended(container)
        select.select([sys.stdin.fileno(), stop_requested, ended], [], [])
        with contextlib.suppress(NotFound):
            container.stop(timeout=max(1, round(grace_s)))
        return int(container.wait()["StatusCode"])
    except DockerException as error:
        print(f"the container failed: {explanation(error)}", file=sys.stderr)
        return CANNOT_START
    finally:
        with contextlib.suppress(NotFound):
            container.remove(force=True, v=True)


def container_arguments(description: dict[str, Any]) -> dict[str, Any]:
    """Arguments of docker-py's `containers.create` from plain data (harness.engines.docker.Container)."""
    arguments = {key: value for key, value in description.items() if value is not None}
    if gpus := arguments.pop("gpus", None):
        chosen = {"count": -1} if gpus == "all" else {"device_ids": gpus.split(",")}
        arguments["device_requests"] = [DeviceRequest(capabilities=[["gpu"]], **chosen)]
    arguments["ulimits"] = [
        Ulimit(name=name, soft=value, hard=value) for name, value in arguments.pop("ulimits", {}).items()
    ]
    return arguments


def _ended(container: Any) -> int:
    """Copies the container's output to ours; the returned file descriptor is readable once it has ended."""
    readable, writable = os.pipe()

    def follow() -> None:
        try:
            with contextlib.suppress(DockerException):
                for chunk in container.logs(stream=True, follow=True):
                    sys.stdout.buffer.write(chunk)
                    sys.stdout.buffer.flush()
                container.wait()
        finally:
            os.close(writable)

    threading.Thread(target=follow, daemon=True).start()
    return readable


def _signals_as_file_descriptor() -> int:
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return readable


def explanation(error: Exception) -> str:
    """The engine's own words, on one line."""
    text = error.explanation if isinstance(error, APIError) else str(error)
    return " ".join(str(text).split())


if __name__ == "__main__":
    sys.exit(main())
