# SPDX-License-Identifier: Apache-2.0
"""`--middleware kimi_k3_serve.guard.KeyRequired`: every path but those for probes needs the API key.

vLLM 0.32.0 asks for the key only below /v1, /v2, /inference and /cohere; /invocations, which generates as they do,
/tokenize, /pause and others answer without it. `serve --api-key-file` adds this in front of them.
"""

import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from secrets import compare_digest
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MIDDLEWARE = "kimi_k3_serve.guard.KeyRequired"
OPEN = frozenset(("/health", "/ping", "/version", "/metrics", "/metrics/"))


class KeyRequired:
    """ASGI middleware. The key is the one that vLLM itself reads, in the environment variable VLLM_API_KEY.

    Raises:
        ValueError: there is no key.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        key = os.environ.get("VLLM_API_KEY")
        if not key:
            raise ValueError("VLLM_API_KEY is not set; start the server with kimi-k3 serve --api-key-file")
        self.expected = f"bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] in OPEN or self.has_key(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps({"error": "Unauthorized"}).encode()})

    def has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return compare_digest(scheme.lower() + b" " + key, self.expected)
