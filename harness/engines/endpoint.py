# SPDX-License-Identifier: Apache-2.0
"""A server that is already running: known by its URL, owned by someone else."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from harness.client import Target, one_line
from harness.connection import auth, tls_context
from harness.errors import UserError
from harness.scrape import parse_metrics

ANSWER_TIMEOUT_S = 10.0


def normalise_url(url: str) -> str:
    """`http://host:port` without path; a trailing `/` or `/v1` is dropped, a proxy's prefix is kept."""
    if not url.isascii() or not url.isprintable() or " " in url:
        raise UserError(
            f"{url!r} holds what no HTTP request may; percent-encode it, or write a host in punycode"
        )
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise UserError(f"{url!r} is not a server's URL; write http://HOST:PORT, with or without /v1")
    if parts.username or parts.password:
        raise UserError("a URL with a user or password would be recorded; use --api-key-file")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


async def ask_model(base_url: str, api_key: str | None, ca_file: Path | None = None) -> str:
    """The one model that the server offers on /v1/models."""
    url = f"{base_url}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)) as session,
            session.get(url, headers=auth(api_key), ssl=tls_context(ca_file)) as response,
        ):
            body = await response.read()
            status = response.status
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise UserError(f"cannot reach {base_url}: {_cause(error)}; is the server up?") from error
    if status != 200:
        text = one_line(body.decode("utf-8", errors="replace"))
        raise UserError(f"{url} answered HTTP {status}: {text}; name the model with --model")
    try:
        models = [str(model["id"]) for model in orjson.loads(body)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{url} did not answer with a list of models; name the model with --model") from error
    if len(models) != 1:
        raise UserError(f"{base_url} offers {', '.join(models) or 'no model'}; choose one with --model")
    return models[0]


def _cause(error: Exception) -> str:
    """In words for people: aiohttp's own name its objects."""
    if isinstance(error, TimeoutError):
        return f"no answer within {ANSWER_TIMEOUT_S:g} s"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        error = error.certificate_error
    elif isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error
    return one_line(str(error))


async def describe_server(target: Target, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a server tells about itself, and a digest of it: another answer later means another engine.

    Its version, its model's entry in the list without times, and the flags of its cache as vLLM exports them. What
    it does not answer now is as it was `known` before: a busy server that misses a question is no other engine.
    """
    known = known or {}
    version = await _ask(target, "/version")
    models = await _ask(target, "/v1/models")
    metrics = await _ask(target, "/metrics")
    card: dict[str, Any] = {}
    if models:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            entries = [model for model in orjson.loads(models)["data"] if model["id"] == target.model]
            listed = entries[0] if entries else {}
            card = {name: listed[name] for name in ("id", "root", "max_model_len") if name in listed}
    cache = [series.labels for series in parse_metrics(metrics, frozenset({"vllm:cache_config_info"}))]
    found = {
        "model": target.model,
        "version": one_line(version) or known.get("version"),
        "card": card or known.get("card", {}),
        "flags": cache or known.get("flags", []),
        "extensions": target.extensions,
    }
    digest = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
    return {**found, "digest": f"sha256:{digest}"}


async def _ask(target: Target, path: str) -> str:
    """The text at a path; empty where the server does not answer 200."""
    try:
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S), headers=auth(target.api_key)
            ) as session,
            session.get(target.base_url + path, ssl=tls_context(target.ca_file)) as response,
        ):
            return await response.text() if response.status == 200 else ""
    except (aiohttp.ClientError, TimeoutError, OSError):
        return ""


async def check_reachable(base_url: str) -> None:
    """Fail unless something accepts connections there; for servers whose model is already named."""
    parts = urlsplit(base_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except (OSError, TimeoutError) as error:
        raise UserError(
            f"cannot reach {base_url}: {one_line(str(error) or 'timed out')}; is the server up?"
        ) from error
    writer.close()
