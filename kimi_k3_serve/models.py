# SPDX-License-Identifier: Apache-2.0
"""Where a model lies: a folder, or a snapshot in the hub's cache below HF_HOME; and whether it is whole."""

import json
import os
from pathlib import Path

from kimi_k3_serve.errors import UserError

INDEX = "model.safetensors.index.json"


def locate(model: str) -> Path:
    """The folder of `model`, without asking the network.

    Raises:
        UserError: neither a folder nor in the cache.
    """
    if is_path(model):
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, ValueError):
        raise UserError(
            f"{model} is not in {cache()} or not whole there; run kimi-k3 download --model {model},"
            " or give a checkpoint's folder"
        ) from None


def is_path(model: str) -> bool:
    return Path(model).is_dir() or model.startswith((".", "/"))


def cache() -> str:
    return os.environ.get("HF_HOME", "~/.cache/huggingface")


def download(model: str, revision: str | None = None, *, offline: bool = False) -> str:
    """Fetch what is missing of a model, then check that it is whole; a second call resumes.

    Returns:
        One line with the folder.

    Raises:
        UserError: the hub cannot be reached, or shards are missing.
    """
    if is_path(model) or offline or os.environ.get("HF_HUB_OFFLINE") == "1":
        folder = locate(model)
        remedy = "copy them there" if is_path(model) else "run kimi-k3 download without --offline"
    else:
        folder = fetch(model, revision)
        remedy = "run the download again"
    if missing := missing_shards(folder):
        raise UserError(f"{folder} lacks {len(missing)} shards, the first is {missing[0]}; {remedy}")
    return f"{folder} is whole"


def fetch(model: str, revision: str | None) -> Path:
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"{model} was not downloaded whole ({cause[:160]}); what came is kept, run it again to resume"
        ) from None


def missing_shards(folder: Path) -> list[str]:
    """Names of the weight files that the index lists and the folder lacks, by name.

    Raises:
        UserError: no configuration, or no weights at all.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} holds no config.json; give a checkpoint's folder with --model")
    if not (folder / INDEX).is_file():
        if not any(folder.glob("*.safetensors")):
            raise UserError(f"{folder} holds no *.safetensors; download the model again")
        return []
    names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    return sorted(name for name in names if not (folder / name).is_file())
