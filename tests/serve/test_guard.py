# SPDX-License-Identifier: Apache-2.0
"""The key guards every path of vLLM's own server, but for those that probes and Prometheus ask."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from kimi_k3_serve.cli import parser, planned
from kimi_k3_serve.guard import MIDDLEWARE, KeyRequired


def ask(path: str, authorization: str | None, kind: str = "http") -> list[MutableMapping[str, Any]]:
    """What a client gets; the guarded application answers 200 to everything."""
    answers: list[MutableMapping[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("a refusal reads nothing")

    async def send(message: MutableMapping[str, Any]) -> None:
        answers.append(message)

    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    asyncio.run(KeyRequired(app)({"type": kind, "path": path, "headers": headers}, receive, send))
    return answers


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/tokenize", "/pause", "/", "/metricsx"])
@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", "Bearer secretx", "Basic secret"]
)
def test_without_the_key_nothing_is_answered(path: str, authorization: str | None) -> None:
    assert ask(path, authorization)[0]["status"] == 401


@pytest.mark.parametrize("authorization", ["Bearer secret", "bearer secret"])
def test_with_the_key_all_is(authorization: str) -> None:
    assert ask("/invocations", authorization)[0]["status"] == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/ping"])
def test_probes_need_no_key(path: str) -> None:
    assert ask(path, None)[0]["status"] == 200


def test_a_socket_is_closed_before_it_opens() -> None:
    assert ask("/v1/realtime", None, "websocket") == [{"type": "websocket.close", "code": 1008}]


def test_no_key_is_no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(ValueError, match="--api-key-file"):
        ask("/health", None)


def test_serve_with_a_key_file_adds_it() -> None:
    common = ["serve", "--profile", "b300-8", "--topology", "tp8", "--model", "moonshotai/Kimi-K3"]
    argv = planned(parser().parse_args([*common, "--api-key-file", "/k"]), "m").argv
    assert argv[argv.index("--middleware") + 1] == MIDDLEWARE
    assert "--middleware" not in planned(parser().parse_args(common), "m").argv
