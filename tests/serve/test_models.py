# SPDX-License-Identifier: Apache-2.0
"""Download with resume and offline use, against a hub of our own that breaks connections; and the health check."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kimi_k3_serve import health
from kimi_k3_serve.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARD = bytes(24 << 20)  # the hub's library keeps what came in steps of 10 MiB
FILES = {
    "config.json": b"{}",
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors"}}).encode(),
    "model-1.safetensors": SHARD,
}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of a model hub as a snapshot needs. It breaks the first transfer of a shard half-way."""

    protocol_version = "HTTP/1.1"
    ranges: ClassVar[list[str | None]] = []
    broken = 0

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path.startswith("/api/"):
            siblings = [{"rfilename": name, "size": len(FILES[name])} for name in FILES]
            if "/tree/" in self.path:
                listing = [
                    {"type": "file", "path": name, "size": len(FILES[name]), "oid": "0"} for name in FILES
                ]
                self.answer(json.dumps(listing).encode(), {})
            else:
                self.answer(json.dumps({"id": "org/model", "sha": COMMIT, "siblings": siblings}).encode(), {})
            return
        name = self.path.partition("?")[0].rpartition("/")[2]
        if name not in FILES:
            self.send_error(404)
            return
        body = FILES[name]
        headers = {
            "X-Repo-Commit": COMMIT,
            "ETag": f'"{hashlib.sha256(body).hexdigest()}"',
            "Accept-Ranges": "bytes",
        }
        start = 0
        if name.endswith("1.safetensors") and self.command == "GET":
            Hub.ranges.append(self.headers.get("Range"))
            start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        cut = None
        if name.endswith("1.safetensors") and self.command == "GET" and Hub.broken:
            Hub.broken -= 1
            cut = start + (12 << 20)
        self.answer(body[start:], headers, 206 if start else 200, None if cut is None else cut - start)

    def answer(self, body: bytes, headers: dict[str, str], status: int = 200, cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.ranges.clear()
    yield {
        **os.environ,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "no_proxy": "127.0.0.1",
    }
    server.shutdown()
    server.server_close()


def download(environment: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kimi_k3_serve", "download", "--model", "org/model", *more]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)


def test_download_resumes_and_then_works_offline(hub: dict[str, str]) -> None:
    before = download(hub, "--offline")
    assert before.returncode == 2 and "is not in" in before.stderr and before.stderr.count("\n") == 1
    Hub.broken = 1
    first = download(hub)
    if first.returncode:  # the library did not retry by itself: the second call resumes
        assert "run it again to resume" in first.stderr, first.stderr
        first = download(hub)
    assert first.returncode == 0, first.stderr
    assert len(Hub.ranges) == 2 and Hub.ranges[1] not in (None, "bytes=0-"), Hub.ranges
    offline = download({**hub, "HF_ENDPOINT": "http://127.0.0.1:9"}, "--offline")
    assert offline.returncode == 0 and offline.stdout.strip().endswith("is whole")
    next(Path(hub["HF_HOME"]).rglob("model-1.safetensors")).unlink()
    broken = download(hub, "--offline")
    assert broken.returncode == 2 and "not whole there; run kimi-k3 download" in broken.stderr


class Engine(http.server.BaseHTTPRequestHandler):
    tokens = 1
    asked: ClassVar[list[str]] = []

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({"usage": {"completion_tokens": self.tokens}})

    def answer(self, body: object) -> None:
        Engine.asked.append(self.path)
        allowed = self.headers.get("Authorization") == "Bearer right" or self.path == "/health"
        text = json.dumps(body).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


@pytest.fixture
def engine() -> Iterator[int]:
    server = http.server.HTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Engine.tokens, Engine.asked = 1, []
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_health_generates_once_and_then_only_asks(engine: int, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    Engine.tokens = 0
    with pytest.raises(UserError, match="answered with 0 tokens"):
        health.check("127.0.0.1", engine, "right", marker)
    Engine.tokens = 1
    assert health.check("127.0.0.1", engine, "right", marker) == "has generated a token"
    Engine.asked.clear()
    assert "since it started" in health.check("127.0.0.1", engine, "right", marker)
    assert Engine.asked == ["/health"]
    marker.write_text("another start")
    health.check("127.0.0.1", engine, "right", marker)
    assert "/v1/completions" in Engine.asked


def test_health_without_the_key_or_the_server(engine: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="HTTP 401"):
        health.check("127.0.0.1", engine, "wrong", tmp_path / "marker")
    with pytest.raises(UserError, match="may be loading"):
        health.check("127.0.0.1", 9, None, tmp_path / "marker")


def test_key_files(tmp_path: Path) -> None:
    key = tmp_path / "key"
    with pytest.raises(UserError, match="cannot be read"):
        health.read_key(key)
    key.write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        health.read_key(key)
    key.write_text("secret\n")
    assert health.read_key(key) == "secret" and health.read_key(None) is None
