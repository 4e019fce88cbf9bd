# SPDX-License-Identifier: Apache-2.0
"""The CPU server under compose: it generates, it is locked down, it survives a restart, it stops and is gone."""

import json
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

import pandas as pd
import pytest
from stack import BENCH, ROOT, Server, docker, run

HARNESS = [sys.executable, "-m", "harness"]


def test_healthy_means_that_a_token_was_generated(server: Server) -> None:
    server.wait_healthy()
    log = docker("exec", server.container, "kimi-k3", "health").stdout
    assert "has generated a token" in log
    assert server.complete(server.key)["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("key", [None, "wrong"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/invocations", "/tokenize", "/docs"])
def test_without_the_key_nothing_is_answered(server: Server, path: str, key: str | None) -> None:
    body = None if path in ("/v1/models", "/docs") else {"model": "/model", "prompt": [5], "max_tokens": 1}
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.ask(path, body, key)
    assert refused.value.code == 401


def test_the_container_can_do_little(server: Server) -> None:
    facts = server.inspect()
    host = facts["HostConfig"]
    assert isinstance(host, dict)
    assert host["ReadonlyRootfs"] and not host["Privileged"]
    assert host["CapAdd"] is None and host["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert "docker.sock" not in json.dumps(facts["Mounts"])
    assert {binding["HostIp"] for ports in host["PortBindings"].values() for binding in ports} == {
        "127.0.0.1"
    }
    assert docker("exec", server.container, "id", "-u").stdout == "10001\n"
    assert docker("exec", server.container, "touch", "/opt/x", check=False).returncode != 0
    caps = docker("exec", server.container, "grep", "CapEff", "/proc/self/status").stdout
    assert int(caps.split()[1], 16) == 0


def test_the_key_shows_nowhere(server: Server) -> None:
    seen = docker("logs", server.container)
    processes = docker("exec", server.container, "sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    for text in (seen.stdout, seen.stderr, json.dumps(server.inspect()), processes):
        assert server.key not in text
    assert "kimi_k3" in processes or "kimi-k3" in processes  # the look did see the server


def test_download_and_doctor_run_as_services(server: Server) -> None:
    checked = server.compose("run", "--rm", "-T", "download", MODEL="/model", DOWNLOAD="--offline")
    assert "/model is whole" in checked.stdout
    run_doctor = ["run", "--rm", "-T", "--no-deps", "serve-cpu", "doctor", "--json", "--model", "/model"]
    found = {item["check"]: item for item in json.loads(server.compose(*run_doctor).stdout)["findings"]}
    assert found["checkpoint"]["level"] == found["shm"]["level"] == found["keep-alive"]["level"] == "ok"
    assert found["gpus"]["level"] == "skip"


def test_the_bench_image_measures_the_server(server: Server, tmp_path: Path) -> None:
    """From beside it on its network, as a read-only container of another user."""
    tmp_path.chmod(0o777)
    key = server.environment["API_KEY_FILE"]
    contained = ["run", "--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--user", "12345:12345",
        "--network", f"{server.project}_default", "-v", f"{key}:/run/key:ro",
        "-v", f"{tmp_path}:/results", BENCH]  # fmt: skip
    docker(*contained, "trace", "make", "--out", "trace.jsonl.gz", *shape(requests=6, output_tokens=8))
    measured = docker(*contained, "run", "--trace", "trace.jsonl.gz", "--rates", "2", "--out", "run",
        "--arm", "cpu=http://model-server:8000", "--api-key-file", "/run/key")  # fmt: skip
    (cell,) = (tmp_path / "run").glob("cells/cpu_q*[0-9].parquet")
    assert (pd.read_parquet(cell)["status"] == "ok").sum() == 6, measured.stdout
    assert_no_key(tmp_path, server.key)


def test_a_restart_mid_request_is_recorded_and_survived(server: Server, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.jsonl.gz", tmp_path / "run"
    run(*HARNESS, "trace", "make", "--out", str(trace), *shape(requests=12, output_tokens=1500))
    command = [*HARNESS, "run", "--trace", str(trace), "--rates", "1", "--out", str(out)]
    command += ["--arm", f"cpu={server.url}", "--api-key-file", server.environment["API_KEY_FILE"]]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as measuring:
        wait_until_running(server)
        docker("restart", "-t", "1", server.container)
        said, _ = measuring.communicate(timeout=240)
    cells = [pd.read_parquet(path) for path in out.glob("cells/cpu_q*[0-9].parquet")]
    assert cells, said
    assert (pd.concat(cells)["status"] != "ok").any()
    assert_no_key(out, server.key)
    server.wait_healthy()
    assert server.complete(server.key)["usage"]


def shape(*, requests: int, output_tokens: int) -> list[str]:
    """Arguments of `trace make` for prompts that the small model takes."""
    return ["--requests", str(requests), "--min-tokens", "60", "--max-tokens", "180",
        "--output-tokens", str(output_tokens), "--cohort-size", "4", "--arrivals", "constant",
        "--seed", "1", "--vocab-size", "1000"]  # fmt: skip


def assert_no_key(folder: Path, key: str) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert key.encode() not in path.read_bytes(), path


def wait_until_running(server: Server, timeout_s: float = 60.0) -> None:
    """Until /metrics counts a running request."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        lines = server.ask("/metrics").decode().splitlines()
        if any(line.startswith("vllm:num_requests_running") and not line.endswith(" 0.0") for line in lines):
            return
        time.sleep(0.05)
    raise AssertionError("no request was running")


def test_a_stop_lets_a_running_request_end_and_leaves_nothing(server: Server) -> None:
    program = (
        "import sys; sys.path[:0] = ['tests/containers']; from stack import Server;"
        f"print(Server({server.port}, '').complete(sys.stdin.read(), 200)['usage']['completion_tokens'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdin
        client.stdin.write(server.key)
        client.stdin.close()
        wait_until_running(server)
        began = time.monotonic()
        server.compose("stop", "-t", "60")
        took_s = time.monotonic() - began
        assert client.stdout and client.stdout.read() == "200\n"
    state = server.inspect()["State"]
    assert isinstance(state, dict) and not state["OOMKilled"] and state["ExitCode"] in (0, 143), state
    assert took_s < 50  # or it was killed
    server.compose("down", "-v", "--remove-orphans")
    assert server.left_over() == []
    assert processes_of_images() == []


def processes_of_images() -> list[str]:
    """Command lines on this host that run out of an image's environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if line.startswith("/opt/kimi-k3/"):
            found.append(line)
    return found
