# SPDX-License-Identifier: Apache-2.0
"""The frozen workload: every prompt, length and arrival, fixed and hashed before any server starts.

A trace file is JSON Lines (gzip when its name ends in `.gz`): a header, then one request a line. Arrivals are
in *unit-rate time*, so that one trace serves every offered rate: at q requests a second a request is due
`arrival / q` seconds after the cell starts. The mean gap is 1 of recorded and constant arrivals; of drawn ones it is
1 in the long run only, so that a short trace has a rate of its own, which reports state. Two runs compare only when
they name the same SHA-256.
"""

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from harness.arrivals import ARRIVALS, BURSTINESS, fits, unit_times
from harness.errors import UserError

__all__ = ["ARRIVALS", "Request", "Trace", "load_trace", "make_trace", "new_trace", "save_trace"]

SCHEMA = 1
FIRST_TOKEN_ID = 3  # ids 0 to 2 are specials (padding, begin, end) in most vocabularies


@dataclass(frozen=True)
class Request:
    """One request of a trace; `arrival` is in unit-rate time, lengths are in tokens.

    What is asked is `prompt` (token ids), or `text`, or `messages` of a chat; with the last two
    `counted_tokens` is what the server must count, the chat template's own tokens included.
    """

    id: str
    cohort: int
    limit_class: str
    arrival: float
    output_tokens: int
    prompt: tuple[int, ...] = ()
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    counted_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt, as the server must count them."""
        return len(self.prompt) if self.counted_tokens is None else self.counted_tokens


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, with the header that says where they come from."""

    header: dict[str, Any]
    scale: float
    sha256: str
    requests: tuple[Request, ...]

    @property
    def span(self) -> float:
        """Unit-rate time between the first and the last arrival."""
        return self.requests[-1].arrival - self.requests[0].arrival

    @property
    def cohorts(self) -> tuple[int, ...]:
        """The cohorts' names, in order of first arrival."""
        return tuple(dict.fromkeys(request.cohort for request in self.requests))

    @property
    def shares_prefixes(self) -> bool:
        """Whether prompts begin alike on purpose, so that hits in a prefix cache are part of the workload."""
        return bool(self.header.get("generator", {}).get("shared_tokens"))


def new_trace(generator: Mapping[str, Any], scale: float, requests: Iterable[Request]) -> Trace:
    """A trace of these requests; `generator` says all that it takes to make it again."""
    kept = tuple(requests)
    header = {"schema": SCHEMA, "generator": dict(generator), "scale": scale}
    return Trace(header, scale, _sha256(header, kept), kept)


def require_usable(requests: int, cohort_size: int, seed: int, vocab_size: int, scale: float) -> None:
    """What every way to make a trace asks for. Raises UserError naming the option."""
    for wrong, problem in (
        (not 0 < scale < float("inf"), f"--scale is {scale:g}; give a finite number above 0"),
        (requests < 1, f"--requests is {requests}; give at least 1"),
        (cohort_size < 1, f"--cohort-size is {cohort_size}; give at least 1"),
        (seed < 0, f"--seed is {seed}; give 0 or more"),
        (vocab_size <= FIRST_TOKEN_ID, f"--vocab-size is {vocab_size}; give more than {FIRST_TOKEN_ID}"),
    ):
        if wrong:
            raise UserError(problem)


def make_trace(
    *,
    requests: int,
    min_tokens: int,
    max_tokens: int,
    output_tokens: int,
    cohort_size: int,
    arrivals: str,
    seed: int,
    vocab_size: int,
    scale: float = 1.0,
    burstiness: float | None = None,
    recorded_s: Sequence[float] = (),
) -> Trace:
    """Draw a trace; the same arguments give the same bytes.

    Prompt lengths are uniform over [min_tokens * scale, max_tokens * scale], one drawn from each of
    `requests` equal strata, so that a small sample still covers the range. `scale` shrinks prompts only,
    never `output_tokens`. `burstiness` belongs to gamma arrivals, `recorded_s` (times of a log, s) to
    recorded ones; see arrivals.py.
    """
    require_usable(requests, cohort_size, seed, vocab_size, scale)
    shortest, longest = round(min_tokens * scale), round(max_tokens * scale)
    for wrong, problem in (
        (not 1 <= shortest <= longest, f"prompts of {shortest} to {longest} tokens; need 1 <= min <= max"),
        (output_tokens < 1, f"--output-tokens is {output_tokens}; give at least 1"),
        (arrivals not in ARRIVALS, f"--arrivals is {arrivals!r}; choose one of {', '.join(ARRIVALS)}"),
        (not fits(arrivals, burstiness), BURSTINESS),
        (
            arrivals == "recorded" and len(recorded_s) < requests,
            f"the log has {len(recorded_s)} arrivals; ask for so many --requests at most",
        ),
    ):
        if wrong:
            raise UserError(problem)

    generator = np.random.Generator(np.random.PCG64(seed))
    lengths = _stratified(generator, requests, shortest, longest)
    times = unit_times(generator, requests, arrivals, burstiness, recorded_s)
    drawn = (
        Request(
            id=f"r{index:04d}",
            cohort=index // cohort_size,
            limit_class="default",
            arrival=float(times[index]),
            output_tokens=output_tokens,
            prompt=draw_tokens(generator, vocab_size, int(lengths[index])),
        )
        for index in range(requests)
    )
    arguments = {
        "name": "uniform-stratified",
        "requests": requests,
        "min_tokens": min_tokens,
        "max_tokens": max_tokens,
        "output_tokens": output_tokens,
        "cohort_size": cohort_size,
        "arrivals": arrivals,
        "seed": seed,
        "vocab_size": vocab_size,
    }
    if burstiness is not None:
        arguments["burstiness"] = burstiness
    if arrivals == "recorded":
        arguments["recorded_sha256"] = hashlib.sha256(orjson.dumps(list(recorded_s))).hexdigest()
    return new_trace(arguments, scale, drawn)


def draw_tokens(generator: np.random.Generator, vocab_size: int, count: int) -> tuple[int, ...]:
    """Uniform token ids, specials left out."""
    return tuple(generator.integers(FIRST_TOKEN_ID, vocab_size, size=count).tolist())


def save_trace(trace: Trace, path: Path) -> None:
    """Write the trace; equal traces give equal files."""
    header = _canonical({**trace.header, "sha256": trace.sha256})
    content = b"\n".join((header, *map(_line, trace.requests))) + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def load_trace(path: Path) -> Trace:
    """Read a trace and check it against its own hash."""
    try:
        content = path.read_bytes()
        lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
        if not lines:
            raise UserError(f"trace {path} is empty; make one with `harness trace make`")
        header = orjson.loads(lines[0])
        if (schema := header.get("schema")) not in (None, SCHEMA):
            raise UserError(
                f"trace {path} is in schema {schema}, this harness reads {SCHEMA}; use the one that wrote it"
            )
        rows = [orjson.loads(line) for line in lines[1:]]
        expected = header.pop("sha256")
        scale = float(header["scale"])
        requests = tuple(_request(row) for row in rows)
    except OSError as error:
        raise UserError(f"cannot read trace {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a trace ({error}); make one with `harness trace make`") from error
    found = _sha256(header, requests)
    if found != expected:
        raise UserError(
            f"trace {path} was changed: its header says sha256 {expected}, its content has {found}; "
            "restore it or make it again"
        )
    if not requests:
        raise UserError(f"trace {path} holds no request; make one with `harness trace make`")
    return Trace(header, scale, found, requests)


def _stratified(generator: np.random.Generator, n: int, low: int, high: int) -> np.ndarray[Any, Any]:
    """`n` integers of [low, high], one from each of n equal strata, in random order."""
    place = (np.arange(n) + generator.random(n)) / n
    lengths = low + np.floor(place * (high - low + 1)).astype(np.int64)
    return generator.permutation(lengths)


def _sha256(header: dict[str, Any], requests: tuple[Request, ...]) -> str:
    digest = hashlib.sha256(_canonical(header))
    for request in requests:
        digest.update(b"\n" + _line(request))
    return digest.hexdigest()


def _request(row: dict[str, Any]) -> Request:
    sequences: dict[str, Any] = {name: tuple(row[name]) for name in ("prompt", "messages") if name in row}
    return Request(**{**row, **sequences})


def _line(request: Request) -> bytes:
    """Without what a request does not have, so that traces of token ids keep their hash."""
    return _canonical({name: value for name, value in vars(request).items() if value is not None})


def _canonical(value: dict[str, Any]) -> bytes:
    """One spelling for one value: sorted keys, no spaces, shortest floats that read back alike."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
