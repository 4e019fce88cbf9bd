# SPDX-License-Identifier: Apache-2.0
"""`kimi-k3 health`: healthy means that this server has generated a token, not merely that it listens.

The first success is remembered for as long as the container's first process lives; from then on /health is
asked, so that a health check never competes with the users' requests.
"""

import http.client
import json
import os
from pathlib import Path
from typing import Any

from kimi_k3_serve.errors import UserError

MARKER = Path("/tmp/kimi-k3-has-generated")
TOKEN_ID = 3  # any id that is not special; a prompt of ids needs no tokenizer


def check(host: str, port: int, api_key: str | None, marker: Path = MARKER, timeout_s: float = 55.0) -> str:
    """One line that says why the server counts as healthy.

    Raises:
        UserError: it is not, and why.
    """
    server = started()
    if marker.exists() and marker.read_text() == server:
        ask(host, port, "GET", "/health", None, api_key, timeout_s)
        return "answers /health, and has generated a token since it started"
    model = json.loads(ask(host, port, "GET", "/v1/models", None, api_key, timeout_s))["data"][0]["id"]
    request = {"model": model, "prompt": [TOKEN_ID], "max_tokens": 1, "temperature": 0}
    answer = json.loads(ask(host, port, "POST", "/v1/completions", request, api_key, timeout_s))
    if (tokens := answer["usage"]["completion_tokens"]) < 1:
        raise UserError(f"{host}:{port} answered with {tokens} tokens; see the server's log")
    marker.write_text(server)
    return "has generated a token"


def started() -> str:
    """When the container's first process began, in clock ticks: another one after each restart."""
    return Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19]


def ask(
    host: str, port: int, method: str, path: str, body: Any, api_key: str | None, timeout_s: float
) -> bytes:
    """The body of an answer with status 200.

    Raises:
        UserError: no answer, or another status.
    """
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read()
    except OSError as error:
        raise UserError(f"no answer from {host}:{port}{path} ({error}); the server may be loading") from None
    finally:
        connection.close()
    if response.status != 200:
        raise UserError(f"{path} answered HTTP {response.status}; see the server's log")
    return text


def read_key(path: Path | None) -> str | None:
    """The API key in a file, None where there is no file to read one from.

    Raises:
        UserError: the file cannot be read or is empty.
    """
    if path is None:
        return None
    try:
        key = path.read_text().strip()
    except OSError as error:
        raise UserError(
            f"API key file {path} cannot be read ({error.strerror}); it must be readable for user {os.getuid()}"
        ) from None
    if not key:
        raise UserError(f"API key file {path} is empty; write a key into it, e.g. openssl rand -hex 32")
    return key
