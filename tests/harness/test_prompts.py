# SPDX-License-Identifier: Apache-2.0
"""Text and chat traces against a server that tokenises for itself, and reasons before it answers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from builders import manifest, small_trace
from tokenizer import make_tokenizer
from transformers import AutoTokenizer

from harness.load import Target
from harness.report.summary import build_summary
from harness.store import CellKey, RunStore
from harness.sweep import Plan, measure
from harness.trace import Trace
from harness.workloads import as_words

REASONING_S, ANSWER_S = 0.1, 0.3
pytestmark = pytest.mark.usefixtures("client_is_trusted")


class Server:
    """Counts prompts with the model's tokenizer; `template` False forgets what the chat template adds."""

    def __init__(self, model: Path, template: bool = True) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(str(model))
        self.template = template
        self.paths: list[str] = []

    def count(self, body: dict[str, Any]) -> int:
        if "messages" not in body:
            return len(self.tokenizer(body["prompt"])["input_ids"])
        words = " ".join(message["content"] for message in body["messages"])
        if self.template:
            words = self.tokenizer.apply_chat_template(body["messages"], tokenize=False)
        return len(self.tokenizer(words, add_special_tokens=False)["input_ids"])

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """At once the role; then a token of reasoning; then the answer. Usage only at the end."""
        body = await request.json()
        self.paths.append(request.path)
        chat = "messages" in body
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def say(delta: dict[str, str], **more: Any) -> None:
            choice = {"index": 0, "delta": delta} if chat else {"index": 0, "text": delta.get("content", "")}
            chunk = {"choices": [choice], **more}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())

        await say({"role": "assistant", "content": ""})
        await asyncio.sleep(REASONING_S)
        await say({"reasoning_content": "hm"} if chat else {"content": "hm"})
        await asyncio.sleep(ANSWER_S)
        await say({"content": "yes"})
        usage = {"prompt_tokens": self.count(body), "completion_tokens": body["max_tokens"]}
        await response.write(
            f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode()
        )
        return response


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("model"))


async def measured(folder: Path, server: Server, trace: Trace) -> dict[str, Any]:
    app = web.Application()
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, server.answer)
    store = RunStore.create(folder / "run", manifest(trace, ("a",), shared_cores=True), trace)
    async with TestServer(app) as running:
        target = Target("a", str(running.make_url("")).rstrip("/"), "m")
        await measure(store, [target], trace, Plan((40.0,), request_timeout_s=10.0))
    (cell,) = store.cells()
    assert all(record.status == "ok" for record in cell.records)
    found: dict[str, Any] = build_summary(store.manifest, [cell])["arms"][0]["cells"][0]
    return found


@pytest.mark.parametrize(("kind", "path"), [("text", "/v1/completions"), ("chat", "/v1/chat/completions")])
async def test_the_servers_count_is_the_traces(tmp_path: Path, model: Path, kind: str, path: str) -> None:
    server = Server(model)
    trace = as_words(small_trace(vocab_size=98), kind, model)
    cell = await measured(tmp_path, server, trace)
    assert cell["invalid_reasons"] == []
    assert set(server.paths) == {path}


async def test_a_server_that_forgets_the_chat_template_is_found(tmp_path: Path, model: Path) -> None:
    trace = as_words(small_trace(vocab_size=98), "chat", model)
    cell = await measured(tmp_path, Server(model, template=False), trace)
    assert cell["invalid_reasons"][0].startswith("server counted other prompt tokens in 6 requests (r0000: ")


async def test_reasoning_is_the_first_token_and_the_role_is_not(tmp_path: Path, model: Path) -> None:
    trace = as_words(small_trace(vocab_size=98), "chat", model)
    cell = await measured(tmp_path, Server(model), trace)
    assert cell["ttft_s"]["p50"] >= REASONING_S
    records = RunStore.open(tmp_path / "run").cell(CellKey("a", 40.0, 0)).records
    assert [record.token_counts for record in records] == [[1, 2]] * 6  # the answer is the second
