# SPDX-License-Identifier: Apache-2.0
"""The command line as a user meets it: a process of its own, a real server, real signals."""

import asyncio
import functools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import small_trace
from fake_server import FakeServer, Script

from harness.cli import main
from harness.store import RunStore
from harness.trace import load_trace, save_trace

LENGTHS = "--min-tokens 4 --max-tokens 40 --output-tokens 4 --vocab-size 100"
MAKE = f"trace make --requests 6 --cohort-size 3 {LENGTHS}"


TRUSTING = (
    "import sys; from harness import cli, validity;"
    "validity.slip_limit_s = lambda *_: 60.0; validity.SPAN_TOLERANCE = 1000.0; sys.exit(cli.main())"
)
"""The command line with a client that is never too late: the fixture `client_is_trusted`, for another process."""


async def harness(*arguments: object, entry: tuple[str, str] = ("-m", "harness")) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *entry, *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    save_trace(small_trace(), tmp_path / "trace.jsonl")
    return tmp_path / "trace.jsonl"


def error_line(code: int, err: str) -> str:
    """The one line that a user reads; anything else fails the test."""
    assert code == 2
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if not line.startswith(("cell ", "plan: "))]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    return lines[0]


async def test_closed_standard_files_do_no_harm(tmp_path: Path) -> None:
    """A daemon may have closed them: sockets would take their numbers, on which libuv aborts."""
    out = tmp_path / "c.json"
    words = f"{sys.executable} -m harness calibrate --rates 50 --body-kb 1 --seconds 0.2 --json {out}"
    process = await asyncio.create_subprocess_shell(f"exec {words} <&- >&- 2>&-")
    assert await process.wait() == 0
    assert json.loads(out.read_bytes())["points"]


async def test_more_requests_in_flight_than_open_files_are_allowed_by_default(tmp_path: Path) -> None:
    """80 requests wait at once under a soft limit of 60 files: none fails for want of a socket."""
    save_trace(small_trace(requests=80, cohort_size=10), trace := tmp_path / "t.jsonl")
    out = tmp_path / "out"
    async with FakeServer(Script(delay_s=1.5)) as server:
        words = f"{sys.executable} -m harness run --skip-calibration --trace {trace} --out {out}"
        words += f" --arm a={server.url} --rates 200 --json"
        process = await asyncio.create_subprocess_shell(f"ulimit -Sn 60; exec {words} >&2")
        assert await process.wait() == 0
    (cell,) = json.loads((out / "summary.json").read_bytes())["arms"][0]["cells"]
    assert (cell["n"], cell["failed"]) == (80, 0)


async def test_trace_make_and_show(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    code, out, err = await harness(*MAKE.split(), "--arrivals", "poisson", "--seed", 7, "--out", path)
    assert (code, err) == (0, "")
    trace = load_trace(path)
    assert trace.requests == small_trace(arrivals="poisson").requests
    assert trace.sha256 in out
    code, out, err = await harness("trace", "show", path)
    assert (code, err) == (0, "")
    for expected in ("requests       6", trace.sha256, "cohort 0", "cohort 1       3 requests"):
        assert expected in out


async def test_run_then_report(tmp_path: Path, trace_file: Path) -> None:
    out = tmp_path / "out"
    key = tmp_path / "key"
    key.write_text("very-secret\n")
    async with FakeServer(Script(delay_s=0.05)) as one, FakeServer() as two:
        words = [
            "run",
            "--trace",
            trace_file,
            "--rates",
            "40,20",
            "--out",
            out,
            "--sla",
            "1,2",
            "--shared-cores",
        ]
        words += ["--arm", f"tp2={one.url}", "--arm", f"dcp2={two.url}/v1/", "--api-key-file", key]
        code, _, err = await harness(*words)
        assert code == 0, err
        code, text, _ = await harness(*words, "--resume", "--skip-calibration")
    assert code == 0
    assert "cell 4/4 tp2 @ 40 QPS  sent 6 running 0 done 6/6" in err
    assert one.headers[-1]["Authorization"] == "Bearer very-secret"
    assert not [path for path in out.rglob("*") if path.is_file() and b"very-secret" in path.read_bytes()]
    summary = json.loads((out / "summary.json").read_bytes())
    assert [arm["name"] for arm in summary["arms"]] == ["tp2", "dcp2"]
    assert [cell["offered_qps"] for cell in summary["arms"][0]["cells"]] == [20.0, 40.0]
    assert all(cell["failed"] == 0 for arm in summary["arms"] for cell in arm["cells"])
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["report", str(out)]) == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert (out / "table.md").read_text() in text
    assert "and so is one unfinished 300 s after the cell's last was due" in text
    assert "error was not measured again before every session" in text


@pytest.mark.usefixtures("hangups_are_heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_in_the_middle_of_a_cell_finishes_the_report(
    tmp_path: Path, trace_file: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    reached = asyncio.Event()

    def answer(index: int, _: object) -> Script:
        if index < 8:  # the warm-up, the first cell and one request of the second
            return Script()
        reached.set()
        return Script(hang_after=1)

    async with FakeServer(answer) as server:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "harness",
                "run",
                "--skip-calibration",
                "--trace",
                str(trace_file),
                "--rates",
                "20,40",
            ),
            *("--out", str(out), "--arm", f"a={server.url}"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        await reached.wait()
        process.send_signal(number)
        stdout, stderr = await process.communicate()
    assert (
        error_line(process.returncode or 0, stderr.decode())
        == f"error: interrupted; 2 cells kept in {out}; go on with --resume"
    )
    assert "# Result" in stdout.decode()
    complete, cut = json.loads((out / "summary.json").read_bytes())["arms"][0]["cells"]
    assert (complete["failed"], complete["n"]) == (0, 6)
    assert cut["invalid_reasons"] == ["interrupted"]
    assert cut["n"] == 6
    assert cut["failed"] >= 1
    assert main(["report", str(out)]) == 0


@pytest.mark.parametrize(("number", "words"), [(1, "--json"), (2, "")])
async def test_who_listens_may_leave(tmp_path: Path, trace_file: Path, number: int, words: str) -> None:
    """`run --json | head -1`, a terminal that is closed, a log on a full disk: every cell is kept."""
    out = tmp_path / "out"
    ours, theirs = os.pipe()
    argv = f"run --skip-calibration --trace {trace_file} --rates 4 --out {out} {words}"
    async with FakeServer() as server:
        others = {1: asyncio.subprocess.PIPE, 2: asyncio.subprocess.PIPE, number: theirs}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "harness", *argv.split(), "--arm", f"a={server.url}"),
            stdout=others[1],
            stderr=others[2],
        )
        os.close(theirs)
        with os.fdopen(ours, "rb") as stream:
            assert b"plan" in await asyncio.to_thread(stream.readline)
        heard = b"".join(filter(None, await process.communicate())).decode()
    assert process.returncode == 0
    assert "Traceback" not in heard and "ignored" not in heard
    (cell,) = RunStore.open(out).cells()
    assert {record.status for record in cell.records} == {"ok"}
    assert (out / "summary.json").exists()


async def test_a_server_that_refuses(tmp_path: Path, trace_file: Path) -> None:
    out = tmp_path / "out"
    async with FakeServer(
        lambda index, _: Script(status=400, body="too long") if index > 6 else Script()
    ) as server:
        code, text, err = await harness(
            "run",
            "--skip-calibration",
            "--trace",
            trace_file,
            "--rates",
            "20,40",
            "--out",
            out,
            "--arm",
            f"a={server.url}",
        )
    assert "HTTP 400: too long" in error_line(code, err)
    assert "# Result" in text
    assert len(json.loads((out / "summary.json").read_bytes())["arms"][0]["cells"]) == 2
    assert "cell 2/2 a @ 40 QPS" in err  # cut short, it ends all the same


async def test_a_run_that_answers_nothing_is_no_success(tmp_path: Path, trace_file: Path) -> None:
    """Server errors do not stop a cell, for they may pass; an arm that gives nothing else has failed."""
    out = tmp_path / "out"
    words = ("run", "--skip-calibration", "--trace", trace_file, "--rates", "100", "--out", out)
    async with FakeServer(lambda index, _: Script(status=503, body="busy") if index else Script()) as server:
        code, text, err = await harness(*words, "--arm", f"a={server.url}")
    assert error_line(code, err) == (
        "error: arm a answered none of 6 requests (HTTP 503: busy); check the server, then measure again:"
        f" {out} is kept"
    )
    assert "none of 6 requests was answered" in text


Change = Callable[[dict[str, str]], object]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"--arm": "http://127.0.0.1:1"}, "is not NAME=URL"),
        ({"--arm": "a=ftp://h:1"}, "is not a server's URL"),
        ({"--arm": "a/b=http://127.0.0.1:1"}, "arm name 'a/b'"),
        ({"--arm": "a=http://a..b:80", "--model": "m"}, "is not a server's URL"),
        ({"--arm": "a=http://127.0.0.1:1/模", "--model": "m"}, "percent-encode it"),
        ({"--arm": "a=http://127.0.0.1:1/a b", "--model": "m"}, "percent-encode it"),
        ({"--arm": "a=https://127.0.0.1:1", "--ca-file": "{trace}"}, "give a PEM file of authorities"),
        ({"--rates": "0.5,x"}, "'x' is not a number"),
        ({"--rates": "0.5,0.50"}, "rate 0.5 is given twice"),
        ({"--rates": "0"}, "'0' is not positive"),
        ({"--sla": "25,15"}, "ascending"),
        ({"--fixed-cohort": "9"}, "no cohort 9"),
        ({"--trace": "missing.jsonl"}, "cannot read trace missing.jsonl"),
        ({"--api-key-file": "missing"}, "cannot read the API key"),
        (
            {"--arm": "a=http://127.0.0.1:{closed}"},
            "Connect call failed ('127.0.0.1', {closed}); is the server",
        ),
        ({"--arm": "a=http://127.0.0.1:{closed}", "--model": "m"}, "is the server up?"),
        ({"--out": "{here}"}, "already in use"),
    ],
)
async def test_mistakes_are_told_in_one_line(
    tmp_path: Path,
    trace_file: Path,
    change: dict[str, str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        async with FakeServer() as server:
            options = {"--trace": str(trace_file), "--rates": "20", "--arm": f"a={server.url}"}
            options |= {"--out": str(tmp_path / "out"), **change}
            port = str(closed.getsockname()[1])
            words = [
                w.replace("{closed}", port)
                .replace("{here}", str(tmp_path))
                .replace("{trace}", str(trace_file))
                for kv in options.items()
                for w in kv
            ]
            code = await asyncio.to_thread(main, ["run", "--skip-calibration", *words])
    line = error_line(code, capsys.readouterr().err)
    assert expected.replace("{closed}", port) in line and "object at" not in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trace", "show", "{trace}"], "was changed"),
        (
            ["run", "--trace", "{trace}", "--rates", "1", "--out", "o", "--arm", "a=http://127.0.0.1:1"],
            "was changed",
        ),
        (["report", "nowhere"], "holds no run"),
        (["bench", "--engine-command", "'", "--dry-run"], """--engine-command "'": no closing quotation"""),
        ([*MAKE.split(), "--arrivals", "poisson", "--seed", "-1", "--out", "x"], "--seed is -1"),
    ],
)
async def test_mistakes_leave_no_traceback(trace_file: Path, arguments: list[str], expected: str) -> None:
    trace_file.write_text(trace_file.read_text().replace('"arrival":1.0', '"arrival":1.25', 1))
    code, _, err = await harness(*(word.replace("{trace}", str(trace_file)) for word in arguments))
    assert expected in error_line(code, err)


def test_a_calibration_lasts_some_time(capsys: pytest.CaptureFixture[str]) -> None:
    for seconds in ("nan", "inf", "0"):
        with pytest.raises(SystemExit, match="2"):
            main(["calibrate", "--seconds", seconds])
        assert f"{seconds} is not a positive number" in capsys.readouterr().err


async def test_two_models_must_be_chosen_from(
    tmp_path: Path, trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeServer(models=("base", "adapter")) as server:
        words = [
            "run",
            "--skip-calibration",
            "--trace",
            trace_file,
            "--rates",
            "50",
            "--out",
            tmp_path / "out",
            "--arm",
            f"a={server.url}",
        ]
        code = await asyncio.to_thread(main, [*map(str, words)])
        assert "offers base, adapter; choose one with --model" in error_line(code, capsys.readouterr().err)
        code, _, err = await harness(*words, "--model", "adapter")
    assert code == 0, err
    assert {body["model"] for body in server.bodies} == {"adapter"}


async def test_a_second_run_of_one_folder_leaves_the_first_alone(tmp_path: Path, trace_file: Path) -> None:
    out, gate, reached = tmp_path / "out", asyncio.Event(), asyncio.Event()

    def answer(index: int, _: object) -> Script:
        if index == 1:
            reached.set()
        return Script(gate=gate) if index else Script()

    async with FakeServer(answer) as server:
        words = ["run", "--skip-calibration", "--trace", trace_file, "--out", out, "--rates", "20"]
        words += ["--arm", f"a={server.url}"]
        first = asyncio.create_task(harness(*words))
        await reached.wait()
        code, _, err = await harness(*words, "--resume")
        assert error_line(code, err) == (
            f"error: another process is at work in {out}; wait for it, or choose another --out"
        )
        code, _, err = await harness(*words)
        assert f"{out} is already in use" in error_line(code, err)
        gate.set()
        code, _, err = await first
    assert code == 0, err
    assert len(list(RunStore.open(out).cells())) == 1
    assert not list(out.rglob("*.tmp"))


async def test_resume_bisect_and_events(tmp_path: Path, trace_file: Path) -> None:
    """The second session finds the first one's cell spoiled, measures it and the missing rate, and tells programs."""
    out = tmp_path / "out"
    words = ["run", "--skip-calibration", "--trace", trace_file, "--out", out, "--sla", "5,9", "--json"]
    run = functools.partial(harness, *words, entry=("-c", TRUSTING))

    async with FakeServer(lambda index, _: Script(status=503 if index > 14 else 200)) as server:
        arm = ["--arm", f"a={server.url}"]
        code, text, err = await run(*arm, "--rates", "20")
        assert code == 0, err
        assert "plan: 1 cells" in err
        facts = json.loads((cell := out / "cells" / "a_q20_r0.json").read_bytes())
        cell.write_text(json.dumps(facts | {"loop_lag_ms": {"p99": 1e6}}))
        code, text, err = await run(*arm, "--rates", "20,40", "--bisect", "10", "--resume")
        assert code == 0, err
        events = [json.loads(line) for line in text.splitlines()]
        assert (events[0]["event"], events[0]["cells"], events[0]["bisect_qps"]) == ("plan", 2, 10.0)
        told = [(event["offered_qps"], event["index"]) for event in events if event["event"] == "cell"]
        assert told == [(20.0, 1), (40.0, 2), (30.0, 3)]  # 20 passes, 40 fails: 30 halves the boundary
        assert events[-1]["event"] == "done" and events[-1]["cells"] == 3
        code, _, err = await run(*arm, "--rates", "50", "--model", "other", "--resume")
        assert "cells are never mixed" in error_line(code, err), err
        code, _, err = await run("--arm", f"b={server.url}", "--rates", "50", "--resume")
        assert "was begun with the arms a, without b" in error_line(code, err), err
        code, _, err = await run(*arm, "--rates", "50", "--sla", "1,2", "--resume")
        assert "was begun with limits {" in error_line(code, err), err
        code, _, err = await run(*arm, "--rates", "50", "--drain-timeout", "5", "--resume")
        assert 'was begun with timeouts {"connect_s": 60.0' in error_line(code, err), err
    cells = json.loads((out / "summary.json").read_bytes())["arms"][0]["cells"]
    assert [cell["offered_qps"] for cell in cells] == [20.0, 30.0, 40.0]
    manifest = RunStore.open(out).manifest
    assert manifest["rates"] == [20.0, 40.0]  # of both sessions
    commands = [session["command"] for session in manifest["sessions"]]
    assert "--resume" not in commands[0] and commands[1].endswith("--bisect 10 --resume")
    assert len(commands) == 3 and "--model other" in commands[2]  # it began, and its first cell was refused
