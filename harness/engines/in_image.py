# SPDX-License-Identifier: Apache-2.0
"""The same `serve` command line, run in a container of an image instead of as a process of this host."""

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from harness.engines import docker
from harness.engines.process import Engine

Start = Callable[..., Awaitable[Engine]]
IMAGE_USER = "10001:10001"
WRITABLE = {"/tmp": "mode=1777,exec", "/cache": "mode=1777,exec"}


def starter(image: str, *, gpus: str | None = None) -> Start:
    """What stands in for `process.start`: it takes the same arguments and starts `image`.

    The words from "serve" on are the container's command. Folders among them are mounted where they lie on
    this host, read-only but for the proofs. The container runs as this user, never as root: for root it is the
    image's own user, who is let into the folders.
    """

    async def start(
        name: str,
        argv: Sequence[str],
        *,
        url: str,
        log_path: Path,
        proof_dir: Path | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Engine:
        command, volumes = mounted(argv[argv.index("serve") :], proof_dir)
        user = f"{os.getuid()}:{os.getgid()}"
        if os.getuid() == 0:
            user = IMAGE_USER
            for folder, mount in volumes.items():
                let_in(Path(folder), 0o077 if mount["mode"] == "rw" else 0o055)
        extra: dict[str, Any] = (
            {"ulimits": docker.GPU_ULIMITS} if gpus else {"ipc_mode": None, "shm_size": "1g"}
        )
        container = docker.Container(
            image, command, volumes=volumes, gpus=gpus, user=user, tmpfs=WRITABLE, **extra
        )
        return await docker.start(
            name, container, url=url, log_path=log_path, proof_dir=proof_dir, progress=progress
        )

    return start


def let_in(folder: Path, bits: int) -> None:
    folder.chmod(folder.stat().st_mode & 0o7777 | bits)


def mounted(command: Sequence[str], proof_dir: Path | None) -> tuple[list[str], dict[str, dict[str, str]]]:
    """The command with absolute folders, and the volumes that put them into the container."""
    words, volumes = [], {}
    for word in command:
        folder = Path(word)
        if "/" in word and folder.is_dir():
            word = str(folder.resolve())
            writable = proof_dir is not None and folder.resolve() == proof_dir.resolve()
            volumes[word] = {"bind": word, "mode": "rw" if writable else "ro"}
        words.append(word)
    return words, volumes
