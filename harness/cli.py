# SPDX-License-Identifier: Apache-2.0
"""`python -m harness`: make traces, measure servers, rebuild reports."""

import argparse
import resource
import sys
from collections.abc import Sequence
from pathlib import Path

from harness import bench, calibrate, compare, parity_cli, run_cli, trace_cli
from harness.errors import UserError
from harness.report import write_report
from harness.steps import put
from harness.store import RunStore

OPEN_FILES = 65536


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. 0: done; 2: something the user can put right, told in one line on stderr."""
    arguments = _parser().parse_args(argv)
    _allow_open_files()
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except UserError as error:
        put(sys.stderr, f"error: {error}\n")
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        put(sys.stderr, f"error: {where}{error.strerror or error}; what was measured so far is kept\n")
        return 2
    except KeyboardInterrupt:
        put(sys.stderr, "error: interrupted\n")
        return 2
    return 0


def _allow_open_files() -> None:
    """Each request in flight has a socket: a thousand in a queue must not fail by the usual limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _report(arguments: argparse.Namespace) -> None:
    store = RunStore.open(arguments.dir)
    store.trace()  # a run whose trace was changed is not reported
    print(write_report(store), end="")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="harness", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    trace_cli.add_parser(commands)
    run_cli.add_parser(commands)
    report = commands.add_parser(
        "report", help="rebuild tables, plots and summary.json of a run, without a server"
    )
    report.add_argument("dir", type=Path, metavar="DIR", help="the folder that `run --out` or `bench` wrote")
    report.set_defaults(run=_report)
    parity_cli.add_parser(commands)
    compare.add_parser(commands)
    bench.add_parser(commands)
    calibrate.add_parser(commands)
    return parser
