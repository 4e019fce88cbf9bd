# SPDX-License-Identifier: Apache-2.0
"""The CPU server under compose: it generates, it is locked down, it survives a restart, it stops and is gone."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pandas as pd
import pytest
from conftest import PROJECT, ROOT, Server, docker, run


def complete(server: Server, key: str | None, tokens: int = 8) -> dict[str, object]:
    model = "/model"
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, object] = json.load(answer)
        return found


def test_healthy_means_that_a_token_was_generated(server: Server) -> None:
    server.wait_healthy()
    log = docker("exec", server.container, "kimi-k3", "health").stdout
    assert "has generated a token" in log
    usage = complete(server, server.key)["usage"]
    assert isinstance(usage, dict) and usage["completion_tokens"] == 8


@pytest.mark.parametrize("key", [None, "wrong"])
def test_without_the_key_nothing_is_answered(server: Server, key: str | None) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(server, key)
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


def test_a_restart_mid_request_is_recorded_and_survived(server: Server, tmp_path: Path) -> None:
    harness = [sys.executable, "-m", "harness"]
    trace, out, key = tmp_path / "trace.jsonl.gz", tmp_path / "run", server.environment["API_KEY_FILE"]
    shape = ["--requests", "12", "--min-tokens", "60", "--max-tokens", "180", "--output-tokens", "1500"]
    run(
        *harness,
        "trace",
        "make",
        "--out",
        str(trace),
        *shape,
        "--cohort-size",
        "4",
        "--arrivals",
        "constant",
        "--seed",
        "1",
        "--vocab-size",
        "1000",
    )
    command = [*harness, "run", "--trace", str(trace), "--rates", "1", "--out", str(out)]
    command += ["--arm", f"cpu={server.url}", "--api-key-file", key]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as measuring:
        deadline = time.monotonic() + 60
        while "1.0" not in running(server) and time.monotonic() < deadline:
            time.sleep(0.2)
        docker("restart", "-t", "1", server.container)
        said, _ = measuring.communicate(timeout=240)
    cells = [pd.read_parquet(path) for path in out.glob("cells/cpu_q*[0-9].parquet")]
    assert cells, said
    assert (pd.concat(cells)["status"] != "ok").any()
    for path in out.rglob("*"):
        if path.is_file():
            assert server.key.encode() not in path.read_bytes(), path
    server.wait_healthy()
    assert complete(server, server.key)["usage"]


def running(server: Server) -> str:
    """The line of /metrics that counts running requests, as soon as there is one."""
    try:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
    except OSError:
        return ""
    return "".join(line.rpartition(" ")[2] for line in lines if line.startswith("vllm:num_requests_running"))


def test_a_stop_lets_a_running_request_end_and_leaves_nothing(server: Server) -> None:
    program = (
        "import sys; sys.path[:0] = ['tests/containers'];"
        "from test_serving import complete; from conftest import Server;"
        f"print(complete(Server({server.port}, ''), sys.stdin.read(), 200)['usage']['completion_tokens'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        assert client.stdin
        client.stdin.write(server.key)
        client.stdin.close()
        deadline = time.monotonic() + 60
        while "1.0" not in running(server) and time.monotonic() < deadline:
            time.sleep(0.05)
        server.compose("stop", "-t", "60")
        assert client.stdout and client.stdout.read() == "200\n"
    state = server.inspect()["State"]
    assert isinstance(state, dict) and not state["OOMKilled"] and state["ExitCode"] in (0, 143)
    server.compose("down", "-v", "--remove-orphans")
    label = f"label=com.docker.compose.project={PROJECT}"
    for kind in ("container", "volume", "network"):
        assert docker(kind, "ls", "-q", "--filter", label).stdout == ""
