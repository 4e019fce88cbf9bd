# SPDX-License-Identifier: Apache-2.0
"""Real processes, really killed: whatever ends first, nothing of an engine stays behind."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.engines.log import log_end
from harness.engines.process import TOKEN_VARIABLE, Engine, describe_status, free_port, processes_with, start
from harness.engines.proof import Proof, complete, objections, parse_proof
from harness.errors import UserError

FAKE = Path(__file__).with_name("fake_engine.py")
CAPACITY = "INFO GPU KV cache size: 3,906 tokens, Maximum concurrency"  # of fake_argv's bytes


def fake_argv(port: int, proof_dir: Path, topology: str = "tp2") -> list[str]:
    return [
        *(sys.executable, str(FAKE), "serve", "--profile", "cpu", "--topology", topology, "--model", "m"),
        *("--host", "127.0.0.1", "--port", str(port), "--kv-cache-memory-bytes", "4000000"),
        *("--proof-dir", str(proof_dir)),
    ]


async def start_fake(
    directory: Path, *, port: int | None = None, ready_timeout_s: float = 30.0, **faults: object
) -> Engine:
    port = port or free_port()
    return await start(
        "tp2",
        fake_argv(port, directory / "proof"),
        url=f"http://127.0.0.1:{port}",
        log_path=directory / "engine.log",
        proof_dir=directory / "proof",
        env={"FAKE_ENGINE": json.dumps(faults)},
        ready_timeout_s=ready_timeout_s,
        stop_grace_s=0.5,
    )


def eventually(condition: Callable[[], bool], within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def gone(pid: int) -> bool:
    """No such process, or a zombie, which runs no more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
async def family(tmp_path: Path) -> AsyncIterator[tuple[Engine, list[int]]]:
    """An engine, and the ids of its main process, a stubborn grandchild and a daemon."""
    engine = await start_fake(tmp_path, children=True)
    pids = [engine.proofs[0].pid, *json.loads((tmp_path / "proof" / "children.json").read_text())]
    assert not any(gone(pid) for pid in pids)
    yield engine, pids
    engine.stop()
    Path(f"/dev/shm/fake_engine_{pids[0]}").unlink(missing_ok=True)


async def test_ready_engine_has_every_proof_and_a_lower_priority(tmp_path: Path) -> None:
    (tmp_path / "proof").mkdir()
    (tmp_path / "proof" / "rank-7.json").write_text("{}")  # of an earlier engine
    with await start_fake(tmp_path) as engine:
        assert [proof.rank for proof in engine.proofs] == [0, 1]
        assert os.getpriority(os.PRIO_PROCESS, engine.proofs[0].pid) == min(
            19, os.getpriority(os.PRIO_PROCESS, 0) + 10
        )
        assert engine.alive()
    assert not engine.alive()
    assert "fake engine tp2 starting" in (tmp_path / "engine.log").read_text()


async def test_what_changes_how_an_engine_computes_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = {
        "LD_BIND_NOW": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "a:b",
        "TRITON_DEBUG": "0",
        "KMP_BLOCKTIME": "1",
    }
    for name, value in {**recorded, "UNRELATED": "1", "NCCL_API_KEY": "secret"}.items():
        monkeypatch.setenv(name, value)
    with await start_fake(tmp_path) as engine:
        found = engine.started_as()["environment"]
    assert recorded.items() <= found.items() and not {"UNRELATED", "NCCL_API_KEY"} & found.keys()


async def test_stop_leaves_no_descendant(family: tuple[Engine, list[int]]) -> None:
    engine, pids = family
    assert len(processes_with(engine.token)) >= 5  # guard, supervisor, main process, two grandchildren
    segment = Path(f"/dev/shm/fake_engine_{pids[0]}")
    assert segment.exists()
    assert engine.stop() == []  # the supervisor left nothing to sweep
    assert all(gone(pid) for pid in pids)
    assert processes_with(engine.token) == []
    assert not segment.exists()


async def test_killed_main_process_is_reported_and_takes_everything_along(
    family: tuple[Engine, list[int]],
) -> None:
    engine, pids = family
    os.kill(pids[0], signal.SIGKILL)
    status = await asyncio.wait_for(engine.watch(), 20)
    assert describe_status(status) == "killed by SIGKILL"
    assert all(gone(pid) for pid in pids)
    line, *log = str(engine.death("serving")).splitlines()
    assert (
        line.startswith("engine tp2 died while serving (killed by SIGKILL)") and str(engine.log_path) in line
    )
    assert log == ["  | fake engine tp2 starting", f"  | {CAPACITY}"]


def child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.parametrize("which", ["guard", "supervisor"])
async def test_either_supervisor_ends_the_engine_alone(family: tuple[Engine, list[int]], which: str) -> None:
    engine, pids = family
    os.kill(engine.process.pid if which == "guard" else child(engine.process.pid), signal.SIGKILL)
    assert eventually(lambda: all(gone(pid) for pid in pids))
    assert eventually(lambda: processes_with(engine.token) == [])
    assert not engine.alive()


HARNESS = """
import asyncio, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_process_engine import start_fake

async def main():
    with await start_fake(Path(sys.argv[1]), children=True) as engine:
        print(engine.token, flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@contextmanager
def harness_with_family(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", str, int]]:
    """A process that has started an engine, the engine's token, and the id of its guard."""
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, str(folder), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert harness.stdout is not None
    with harness.stdout:
        token = harness.stdout.readline().strip()
        assert len(processes_with(token)) >= 5
        yield harness, token, child(harness.pid)
    harness.wait(20)


@pytest.mark.parametrize("also", ["nobody", "guard", "supervisor"])
def test_nothing_outlives_a_killed_harness(tmp_path: Path, also: str) -> None:
    with harness_with_family(tmp_path) as (harness, token, guard):
        killed = {"nobody": [], "guard": [guard], "supervisor": [child(guard)]}[also]
        for pid in (harness.pid, *killed):
            os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: processes_with(token) == [])


def test_nothing_outlives_an_interrupted_harness(tmp_path: Path) -> None:
    with harness_with_family(tmp_path) as (harness, token, _):
        harness.send_signal(signal.SIGINT)
        assert eventually(lambda: processes_with(token) == [])


async def test_what_outlives_everybody_is_ended_by_the_next_start(
    tmp_path: Path, family: tuple[Engine, list[int]]
) -> None:
    """Harness, guard and supervisor are killed at once; an engine whose harness lives is left alone."""
    ours, alive = family
    with harness_with_family(tmp_path / "other") as (harness, token, guard):
        for pid in (harness.pid, child(guard), guard):
            os.kill(pid, signal.SIGSTOP)  # so that none of them sees another one die
        for pid in (harness.pid, child(guard), guard):
            os.kill(pid, signal.SIGKILL)
        harness.wait(20)
    time.sleep(0.5)
    assert processes_with(token)  # the control: nobody is left who would end them
    with await start_fake(tmp_path / "next"):
        assert processes_with(token) == []
    assert ours.alive() and not any(gone(pid) for pid in alive)


RENAMES = """
import os, setproctitle, time
setproctitle.setproctitle("VLLM::Worker" * 200)
print(os.getpid(), flush=True)
time.sleep(1000)
"""


async def test_renamed_process_is_still_found_by_its_token(tmp_path: Path) -> None:
    pytest.importorskip("setproctitle")
    log = tmp_path / "log"
    argv = [sys.executable, "-c", RENAMES]
    starting = asyncio.ensure_future(start("a", argv, url=f"http://127.0.0.1:{free_port()}", log_path=log))
    while not (log.exists() and log.read_bytes().endswith(b"\n")):
        await asyncio.sleep(0.02)
    process = Path("/proc") / log.read_text().strip()
    assert (process / "cmdline").read_bytes().startswith(b"VLLM::Worker")
    assert TOKEN_VARIABLE.encode() in (process / "environ").read_bytes()
    starting.cancel()  # as Ctrl-C does while an engine starts
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert gone(int(process.name))


async def test_busy_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            UserError, match=f"port {port} on 127.0.0.1 is not free .*; stop what listens there or choose"
        ):
            await start_fake(tmp_path, port=port)
    assert not (tmp_path / "engine.log").exists()


async def test_engine_that_dies_while_starting_shows_its_log(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        await start_fake(tmp_path, exit_at_start=3)
    line, *log = str(caught.value).splitlines()
    assert (
        line
        == f"engine tp2 died while starting (exit status 3); its log is {tmp_path / 'engine.log'} and ends:"
    )
    assert log == [
        "  | fake engine tp2 starting",
        f"  | {CAPACITY}",
        "  | ValueError: no room for the KV cache",
    ]


def test_end_of_a_log_shows_the_cause_and_leaves_noise_out(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    traceback = [f"  File {number}" for number in range(30)]
    noise = [' - leaked type "a"', "nanobind: leaked 5 types!", "", " - ... skipped remainder"]
    log.write_text(
        "\n".join(["INFO up", "\x1b[31mERROR worker 1 died\x1b[0m", *traceback, "RuntimeError: x", *noise])
    )
    assert log_end(log) == ["ERROR worker 1 died", "...", *traceback[-14:], "RuntimeError: x"]


async def test_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exit status 127") as caught:
        await start(
            "a", ["no-such-program"], url=f"http://127.0.0.1:{free_port()}", log_path=tmp_path / "log"
        )
    assert "cannot execute no-such-program: No such file or directory" in str(caught.value)


async def test_engine_that_is_never_ready_is_given_up_and_removed(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"engine tp2 is not ready after 8 s .health not yet, proofs of 2/2 ranks"
    ):
        await start_fake(tmp_path, never_ready=True, ready_timeout_s=8.0)
    pid = json.loads((tmp_path / "proof" / "rank-0.json").read_text())["pid"]
    assert gone(pid)


async def test_guard_prefers_the_death_of_the_engine_to_the_error_it_causes(
    family: tuple[Engine, list[int]],
) -> None:
    engine, pids = family

    async def fails_on_its_own() -> None:
        raise UserError("HTTP 400")

    async def loses_its_connection() -> None:
        os.kill(pids[0], signal.SIGKILL)
        raise ConnectionResetError

    async def works() -> int:
        return 5

    assert await engine.guard(works(), "working") == 5
    with pytest.raises(UserError, match="HTTP 400"):
        await engine.guard(fails_on_its_own(), "working")
    with pytest.raises(UserError, match=r"engine tp2 died while comparing .killed by SIGKILL"):
        await engine.guard(loses_its_connection(), "comparing")


async def test_guard_interrupts_work_when_the_engine_dies(family: tuple[Engine, list[int]]) -> None:
    engine, pids = family
    asyncio.get_running_loop().call_later(0.2, os.kill, pids[0], signal.SIGTERM)
    with pytest.raises(UserError, match="engine tp2 died while waiting"):
        await asyncio.wait_for(engine.guard(asyncio.sleep(1000), "waiting"), 20)


def proof(rank: int, **changes: object) -> Proof:
    facts: dict[str, object] = {
        "rank": rank,
        "world_size": 2,
        "dcp_world_size": 2,
        "features": {"cpu_dcp_mla": {"active": True, "reason": ""}},
        "attention_backend": ["OURS"],
        "kv_tokens": 100,
        "kv_bytes": 1000,
        "vllm": "0.32.0",
        "pid": 1,
        "used": ["decode_merge"],
    }
    return parse_proof({**facts, **changes}, "a proof")


def test_proofs_are_complete_with_every_rank() -> None:
    assert not complete(())
    assert not complete((proof(0),))
    assert complete((proof(0), proof(1)))


@pytest.mark.parametrize(
    ("second", "objection"),
    [
        ({"dcp_world_size": 1}, "rank 1 runs DCP 1, not 2"),
        ({"world_size": 4}, "rank 1 belongs to 4 ranks, not 2"),
        ({"features": {}}, "cpu_dcp_mla is not active on rank 1: it says nothing of it"),
        (
            {"features": {"cpu_dcp_mla": {"active": False, "reason": "no DCP here"}}},
            "cpu_dcp_mla is not active on rank 1: no DCP here",
        ),
        ({"used": []}, "decode_merge has not run on rank 1"),
        ({"calls": {"decode_merge": {"startup": 2}}}, "decode_merge has not run on rank 1"),
        ({"attention_backend": ["CPU_MLA"]}, 'ranks differ in attention_backend: ["CPU_MLA"], ["OURS"]'),
        ({"kv_tokens": 50}, "ranks differ in kv_tokens: 100, 50"),
    ],
)
def test_proofs_that_are_not_the_arm(second: dict[str, object], objection: str) -> None:
    wanted: dict[str, Any] = {"tp": 2, "dcp": 2, "features": ["cpu_dcp_mla"], "used": ["decode_merge"]}
    assert objections((proof(0), proof(1)), **wanted) == []
    assert objections((proof(0), proof(1, **second)), **wanted) == [objection]


def test_proof_of_another_version_is_named() -> None:
    with pytest.raises(UserError, match="a proof lacks 'rank'"):
        parse_proof({}, "a proof")
