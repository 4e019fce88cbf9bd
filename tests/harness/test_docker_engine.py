# SPDX-License-Identifier: Apache-2.0
"""The docker engine on a real Docker engine and a small image that has python3: KIMI_K3_TEST_IMAGE names it."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

docker_py = pytest.importorskip("docker")

from harness.engines.docker import LABEL, Container, client, containers, start  # noqa: E402
from harness.engines.docker_supervise import container_arguments  # noqa: E402
from harness.engines.process import free_port  # noqa: E402
from harness.errors import UserError  # noqa: E402

IMAGE = os.environ.get("KIMI_K3_TEST_IMAGE", "")
needs_docker = pytest.mark.skipif(not IMAGE, reason="KIMI_K3_TEST_IMAGE names no image with python3")

SERVER = textwrap.dedent(
    """
    import http.server, json, os, sys, time
    tokens, key = int(sys.argv[2]), os.environ.get("VLLM_API_KEY")
    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, body, status=200):
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
        def do_GET(self):
            self.answer({"data": [{"id": "m"}]})
        def do_POST(self):
            self.answer({"usage": {"completion_tokens": tokens}})
    print("serving as", os.getuid(), flush=True)
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
    """
)


def server(port: int, tokens: int = 1, **changes: object) -> Container:
    command = ["python3", "-c", SERVER, str(port), str(tokens)]
    return Container(IMAGE, command, user="10001:10001", ipc_mode=None, shm_size="64m", **changes)  # type: ignore[arg-type]


def left_over() -> list[object]:
    found: list[object] = client().containers.list(all=True, filters={"label": LABEL})
    return found


@needs_docker
async def test_a_container_is_ready_once_it_generated_and_is_gone_after_stop(tmp_path: Path) -> None:
    port = free_port()
    secret = {"VLLM_API_KEY": "secret", "VLLM_LOGGING_LEVEL": "INFO"}
    engine = await start(
        "a", server(port, environment=secret), url=f"http://127.0.0.1:{port}", log_path=tmp_path / "log"
    )
    with engine:
        facts = engine.started_as()
        assert facts["environment"] == {"VLLM_LOGGING_LEVEL": "INFO"}
        assert facts["argv"][-1] == "1"
        (container,) = containers(engine.token)
        host = container.attrs["HostConfig"]
        assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and not host["Privileged"]
    assert containers(engine.token) == []
    assert "serving as 10001" in (tmp_path / "log").read_text()
    assert not engine.alive()


@needs_docker
async def test_a_server_that_generates_nothing_is_not_ready(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(UserError, match="with none"):
        await start("mute", server(port, tokens=0), url=f"http://127.0.0.1:{port}", log_path=tmp_path / "log")
    assert left_over() == []


@needs_docker
async def test_a_container_that_dies_shows_its_log(tmp_path: Path) -> None:
    port = free_port()
    dying = Container(IMAGE, ["python3", "-c", "raise SystemExit('no weights here')"], ipc_mode=None)
    with pytest.raises(UserError, match=r"died while starting \(exit status 1\)(.|\n)*no weights here"):
        await start("dead", dying, url=f"http://127.0.0.1:{port}", log_path=tmp_path / "log")
    assert left_over() == []


@needs_docker
async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    never = Container(IMAGE, ["sleep", "600"], ipc_mode=None)
    starting = asyncio.ensure_future(
        start("never", never, url=f"http://127.0.0.1:{port}", log_path=tmp_path / "log", stop_grace_s=1)
    )
    while not left_over():
        await asyncio.sleep(0.05)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert left_over() == []


@needs_docker
def test_a_killed_harness_leaves_no_container(tmp_path: Path) -> None:
    port = free_port()
    program = textwrap.dedent(
        f"""
        import asyncio, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pathlib import Path
        from test_docker_engine import server
        from harness.engines.docker import start
        async def main():
            url = "http://127.0.0.1:{port}"
            await start("killed", server({port}), url=url, log_path=Path({str(tmp_path / "log")!r}))
            print("ready", flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None and harness.stdout.readline() == "ready\n"
        assert len(left_over()) == 1
        harness.send_signal(signal.SIGKILL)
        harness.wait()
    for _ in range(400):
        if not left_over():
            return
        signal.sigtimedwait([], 0.1)
    pytest.fail("the container outlived a killed harness by 40 s")


@needs_docker
async def test_a_missing_image_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not on this host; docker pull it"):
        missing = Container("kimi-k3-no-such-image:0", ["true"])
        await start("x", missing, url=f"http://127.0.0.1:{free_port()}", log_path=tmp_path / "log")


@pytest.mark.parametrize(
    ("gpus", "expected"), [("all", {"Count": -1, "DeviceIDs": []}), ("0,3", {"DeviceIDs": ["0", "3"]})]
)
def test_gpus_become_device_requests(gpus: str, expected: dict[str, object]) -> None:
    (request,) = container_arguments({"image": "x", "gpus": gpus})["device_requests"]
    assert request["Capabilities"] == [["gpu"]]
    assert {key: request[key] for key in expected} == expected


def test_no_gpu_asks_for_none() -> None:
    assert "device_requests" not in container_arguments({"image": "x", "gpus": None})
