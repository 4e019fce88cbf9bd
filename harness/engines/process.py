# SPDX-License-Identifier: Apache-2.0
"""An engine as a process of ours: started, awaited, watched, and stopped with everything below it.

    harness ── stdin pipe ── supervise.py (two of it) ── engine ── its workers

The supervisor (see its docstring) ends the engine when we ask, when we die in any way, and when the engine's
main process ends. As a net for supervisors that were killed themselves, each engine carries a token in its
environment that names it and us: stopping it sweeps /proc for the token, and so does the next start of any
engine where a token's harness lives no more.
"""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp

from harness.engines.log import quote_log
from harness.engines.proof import Proof, clear_proofs, complete, read_proofs
from harness.errors import UserError

TOKEN_VARIABLE = "KIMI_K3_RUN_TOKEN"
RECORDED_PREFIXES = (
    *("VLLM_", "KIMI_K3_", "TORCH", "PYTORCH_", "TRITON_", "FLASHINFER_", "HF_HUB_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NCCL_", "GLOO_", "UCX_"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "MALLOC_", "LD_PRELOAD", "LD_BIND_NOW"),
)
"""How the environment variables begin that are recorded and tell one engine from another."""
SECRET = re.compile("KEY|TOKEN|SECRET|PASS")
POLL_S = 0.1
KILL_MARGIN_S = 8.0
"""How much longer than its grace a supervisor may take before it is killed itself."""

T = TypeVar("T")


@dataclass
class Engine:
    """A started engine. `proofs` is empty where it was started without a proof directory."""

    name: str
    url: str
    log_path: Path
    token: str
    stop_grace_s: float
    process: "subprocess.Popen[bytes]"
    proofs: tuple[Proof, ...] = field(default=())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def alive(self) -> bool:
        return self.process.poll() is None

    async def watch(self) -> int:
        """Returns the exit status once the engine has ended, by itself or by stop(); never before."""
        while (status := self.process.poll()) is None:
            await asyncio.sleep(POLL_S)
        return status

    async def guard(self, work: Coroutine[Any, Any, T], doing: str) -> T:
        """The result of `work`, or a UserError that shows the log if the engine ends before it.

        A request often sees a dying engine before its process has ended, so after an error of `work` the
        engine gets a few seconds to turn out dead before that error is believed.
        """
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self.watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and working.exception() is not None and await self.dying():
                raise self.death(doing)
            if not working.done():
                raise self.death(doing)
            return working.result()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def dying(self, within_s: float = 15.0) -> bool:
        """True when the engine has ended, or does not answer /health and ends within `within_s` seconds."""
        deadline = time.monotonic() + within_s
        while self.alive():
            if time.monotonic() >= deadline or await healthy(self.url):
                return not self.alive()
            await asyncio.sleep(POLL_S)
        return True

    def death(self, doing: str) -> UserError:
        """One clear line, then the end of the log."""
        status = self.process.poll()
        return UserError(
            f"engine {self.name} died while {doing} ({describe_status(status)}); {quote_log(self.log_path)}"
        )

    def started_as(self) -> dict[str, Any]:
        """`argv` and `environment` of the engine's main process as the kernel has them, for the record.

        Of the environment only what matters to an engine, and nothing whose name sounds like a secret; paths
        below the working directory are shortened.
        """
        main = _first_child(
            _first_child(self.process.pid)
        )  # of the guard: the supervisor; of that: the engine
        here = f"{Path.cwd()}/"
        argv = _strings(Path(f"/proc/{main}/cmdline"))
        variables = [entry.partition("=") for entry in _strings(Path(f"/proc/{main}/environ"))]
        return {
            "argv": [word.replace(here, "") for word in argv],
            "environment": {
                name: value.replace(here, "")
                for name, _, value in sorted(variables)
                if name.startswith(RECORDED_PREFIXES) and not SECRET.search(name)
            },
        }

    def stop(self) -> list[int]:
        """Ends the engine and all below it; returns the ids that only the sweep found, normally none.

        Blocks for at most the grace plus a few seconds, on purpose: a cancelled task must not be able to
        leave half-way.
        """
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(self.stop_grace_s + KILL_MARGIN_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return sweep(self.token)


async def start(
    name: str,
    argv: Sequence[str],
    *,
    url: str,
    log_path: Path,
    proof_dir: Path | None = None,
    env: Mapping[str, str] | None = None,
    ready_timeout_s: float = 300.0,
    stop_grace_s: float = 10.0,
    nice: int = 10,
    progress: Callable[[str], None] | None = None,
) -> Engine:
    """Starts `argv` at a lower priority and returns once it is ready.

    Ready means that GET <url>/health answers 200 and, with a `proof_dir`, that every rank has written its
    proof there. `env` is added to our environment; stdout and stderr go to `log_path`. `progress` gets a
    short text about once a second.

    Raises UserError for a busy port, an engine that ends before it is ready, and one not ready in
    `ready_timeout_s` seconds; nothing of the engine is left in any of these cases, nor when this coroutine is
    cancelled.
    """
    await end_strays(stop_grace_s + KILL_MARGIN_S)
    require_free_port(url)
    if proof_dir is not None:
        clear_proofs(proof_dir)
    engine = _spawn(name, argv, url=url, log_path=log_path, env=env, stop_grace_s=stop_grace_s, nice=nice)
    try:
        await _until_ready(engine, proof_dir, ready_timeout_s, progress or (lambda _: None))
    except BaseException:
        engine.stop()
        raise
    return engine


async def run_program(
    name: str, argv: Sequence[str], *, log_path: Path, progress: Callable[[str], None] = lambda _: None
) -> None:
    """Runs a program to its end under the same supervision. Raises UserError where it fails."""
    began = time.monotonic()
    with _spawn(name, argv, url="", log_path=log_path, env=None, stop_grace_s=1.0, nice=0) as program:
        watching = asyncio.ensure_future(program.watch())
        while not (await asyncio.wait({watching}, timeout=1.0))[0]:
            progress(f"{time.monotonic() - began:.0f} s")
        if status := watching.result():
            raise UserError(f"{name} failed ({describe_status(status)}); {quote_log(log_path)}")


def _spawn(
    name: str,
    argv: Sequence[str],
    *,
    url: str,
    log_path: Path,
    env: Mapping[str, str] | None,
    stop_grace_s: float,
    nice: int,
) -> Engine:
    log_path.parent.mkdir(parents=True, exist_ok=True)
    token = f"{_owner(os.getpid())}-{uuid.uuid4().hex}"
    supervisor = (sys.executable, "-I", str(Path(__file__).with_name("supervise.py")))
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*supervisor, "--nice", str(nice), "--grace", str(stop_grace_s), "--", *argv],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            # SPT_NOENV: vLLM renames its processes; setproctitle would overwrite the environment in /proc.
            env={**os.environ, **(env or {}), TOKEN_VARIABLE: token, "SPT_NOENV": "1"},
            start_new_session=True,  # Ctrl-C on our terminal is ours to handle
        )
    return Engine(name, url, log_path, token, stop_grace_s, process)


async def _until_ready(
    engine: Engine, proof_dir: Path | None, timeout_s: float, progress: Callable[[str], None]
) -> None:
    began = time.monotonic()
    last_said = began
    while True:
        if not engine.alive():
            raise engine.death("starting")
        health = await healthy(engine.url)
        if proof_dir is not None:
            engine.proofs = read_proofs(proof_dir)
        if health and (proof_dir is None or complete(engine.proofs)):
            return
        elapsed = time.monotonic() - began
        ranks = f"{engine.proofs[0].world_size}" if engine.proofs else "?"
        state = f"health {'ok' if health else 'not yet'}"
        if proof_dir is not None:
            state += f", proofs of {len(engine.proofs)}/{ranks} ranks"
        if elapsed >= timeout_s:
            raise UserError(
                f"engine {engine.name} is not ready after {timeout_s:g} s ({state});"
                f" {quote_log(engine.log_path)}"
            )
        if time.monotonic() - last_said >= 1.0:
            last_said = time.monotonic()
            progress(f"{elapsed:.0f} s, {state}")
        await asyncio.sleep(POLL_S)


async def healthy(url: str, within_s: float = 3.0) -> bool:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=within_s)) as session,
            session.get(f"{url}/health") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def require_free_port(url: str) -> None:
    """Raises UserError where something listens at the address already.

    Asked before the start because vLLM listens with SO_REUSEPORT: two engines could share a port without an
    error, and half of the requests would go to the other one.
    """
    host, port = urlsplit(url).hostname, urlsplit(url).port
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # lingering closed connections do not count
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                f"port {port} on {host} is not free ({error.strerror});"
                " stop what listens there or choose another"
            ) from None


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def sweep(token: str) -> list[int]:
    """Kills every process whose environment holds the token and returns their ids once they are gone."""
    killed: set[int] = set()
    while alive := processes_with(token):
        killed |= set(alive)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return sorted(killed)


def processes_with(token: str) -> list[int]:
    """Ids of living processes started with this token (a zombie has no environment any more)."""
    return [pid for pid, found in _tokens().items() if found == token]


async def end_strays(within_s: float) -> None:
    """Ends what is left of engines whose harness is gone.

    A supervisor that still ends one in order gets `within_s` seconds for it: memory and ports are free after
    that. Processes of other PID namespaces, where other ids hold, are not ours to judge.
    """
    deadline = time.monotonic() + within_s
    while strays := {token for token in _tokens(ours=True).values() if _owner_is_gone(token)}:
        for token in strays:
            pids = processes_with(token)
            supervised = any(b"supervise.py" in _read(Path(f"/proc/{pid}/cmdline")) for pid in pids)
            if not supervised or time.monotonic() > deadline:
                sweep(token)
        await asyncio.sleep(POLL_S)


def _tokens(*, ours: bool = False) -> dict[int, str]:
    """By process id, ourselves excepted: the token in its environment; with `ours` of this PID namespace only."""
    prefix = f"{TOKEN_VARIABLE}=".encode()
    namespace = Path("/proc/self/ns/pid").readlink()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                for variable in (entry / "environ").read_bytes().split(b"\0"):
                    if variable.startswith(prefix) and (
                        not ours or (entry / "ns" / "pid").readlink() == namespace
                    ):
                        found[int(entry.name)] = variable.removeprefix(prefix).decode(errors="replace")
    return found


def _owner(pid: int) -> str:
    """Names a process for good: its id, and the clock ticks since boot at which it started."""
    stat = _read(Path(f"/proc/{pid}/stat")).decode(errors="replace")
    state = stat.rpartition(")")[2].split()  # field 3 on; the name before may hold anything
    return f"{pid}-{state[19]}" if state and state[0] != "Z" else ""


def _owner_is_gone(token: str) -> bool:
    pid, _, rest = token.partition("-")
    return pid.isdigit() and _owner(int(pid)) != f"{pid}-{rest.partition('-')[0]}"


def _first_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _strings(path: Path) -> list[str]:
    """The strings of a /proc file that ends each with a zero byte."""
    return path.read_bytes().decode(errors="replace").split("\0")[:-1]


def describe_status(status: int | None) -> str:
    """A supervisor's exit status in words: 128 + N stands for signal N (supervise.py)."""
    if status is None:
        return "ending"
    number = -status if status < 0 else status - 128
    if status < 0 or status > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(number).name}"
    return f"exit status {status}"
