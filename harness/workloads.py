# SPDX-License-Identifier: Apache-2.0
"""Traces besides the default one: prompts that share a prefix, a production log, limit classes, text and chat.

Each function is pure but for the file it is told to read, and writes into the trace's header what it takes to
make the trace again.
"""

import csv
import hashlib
import io
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from harness.arrivals import BURSTINESS, fits, from_log, mean_gap_s, unit_times
from harness.errors import UserError
from harness.trace import Request, Trace, draw_tokens, new_trace, require_usable

PROMPT_KINDS = ("tokens", "text", "chat")


def make_shared_prefix(
    *,
    requests: int,
    shared_tokens: int,
    own_tokens: int,
    output_tokens: int,
    prefixes: int,
    cohort_size: int,
    arrivals: str,
    seed: int,
    vocab_size: int,
    scale: float = 1.0,
    burstiness: float | None = None,
) -> Trace:
    """Prompts that begin alike: one of `prefixes` prefixes of `shared_tokens`, then `own_tokens` of their own.

    Which prefix a request has is drawn at random. Hits in the prefix cache are then part of the workload: they
    are reported, and do not make a cell invalid.
    """
    require_usable(requests, cohort_size, seed, vocab_size, scale)
    shared, own = round(shared_tokens * scale), round(own_tokens * scale)
    for name, value in (
        ("--shared-tokens times --scale", shared),
        ("--own-tokens times --scale", own),
        ("--output-tokens", output_tokens),
        ("--prefixes", prefixes),
    ):
        if value < 1:
            raise UserError(f"{name} is {value}; give at least 1")
    if not fits(arrivals, burstiness):
        raise UserError(BURSTINESS)
    generator = np.random.Generator(np.random.PCG64(seed))
    heads = [draw_tokens(generator, vocab_size, shared) for _ in range(prefixes)]
    chosen = generator.integers(prefixes, size=requests)
    times = unit_times(generator, requests, arrivals, burstiness)
    return new_trace(
        {
            "name": "shared-prefix",
            "requests": requests,
            "shared_tokens": shared_tokens,
            "own_tokens": own_tokens,
            "output_tokens": output_tokens,
            "prefixes": prefixes,
            "cohort_size": cohort_size,
            "arrivals": arrivals,
            "burstiness": burstiness,
            "seed": seed,
            "vocab_size": vocab_size,
        },
        scale,
        (
            Request(
                id=f"r{index:04d}",
                cohort=index // cohort_size,
                limit_class="default",
                arrival=float(times[index]),
                output_tokens=output_tokens,
                prompt=heads[chosen[index]] + draw_tokens(generator, vocab_size, own),
            )
            for index in range(requests)
        ),
    )


# A production log


@dataclass(frozen=True)
class LogRow:
    """One request of a log: seconds since an arbitrary origin, and how long prompt and answer were."""

    time_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Columns:
    """What a log calls its three columns."""

    time: str = "time"
    prompt_tokens: str = "prompt_tokens"
    output_tokens: str = "output_tokens"


def read_log(path: Path, columns: Columns = Columns()) -> list[LogRow]:
    """Rows in order of time, from CSV with a header line or from JSON Lines.

    Times are seconds (any origin) or ISO 8601. Raises UserError naming line and column of what cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read log {path}: {error}; give CSV or JSON Lines in UTF-8") from error
    rows = [_log_row(path, line, row, columns) for line, row in _rows(path, text)]
    if not rows:
        raise UserError(f"log {path} holds no request; give a line for each")
    return sorted(rows, key=lambda row: row.time_s)


def import_log(
    path: Path,
    *,
    seed: int,
    vocab_size: int,
    cohort_size: int,
    scale: float = 1.0,
    columns: Columns = Columns(),
    limit: int | None = None,
) -> Trace:
    """A trace with the lengths and gaps of a log (its first `limit` requests); prompts are random tokens.

    `scale` shrinks prompts, as everywhere. The log's own rate is kept in the header (`recorded_qps`): offered
    at that rate, the trace runs as it was recorded.
    """
    require_usable(1 if limit is None else limit, cohort_size, seed, vocab_size, scale)
    rows = read_log(path, columns)[:limit]
    times = [row.time_s for row in rows]
    generator = np.random.Generator(np.random.PCG64(seed))
    arrivals = from_log(times)
    return new_trace(
        {
            "name": "imported-log",
            "requests": len(rows),
            "log_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "recorded_qps": 1 / mean_gap_s(times) if len(rows) > 1 else None,
            "arrivals": "recorded",
            "cohort_size": cohort_size,
            "seed": seed,
            "vocab_size": vocab_size,
        },
        scale,
        (
            Request(
                id=f"r{index:04d}",
                cohort=index // cohort_size,
                limit_class="default",
                arrival=float(arrivals[index]),
                output_tokens=row.output_tokens,
                prompt=draw_tokens(generator, vocab_size, max(1, round(row.prompt_tokens * scale))),
            )
            for index, row in enumerate(rows)
        ),
    )


def _rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line number, row); JSON Lines where the first line is an object, else CSV."""
    if not text.lstrip().startswith("{"):
        csv.field_size_limit(sys.maxsize)  # a column may hold whole prompts
        reader = csv.DictReader(io.StringIO(text))
        yield from ((reader.line_num, row) for row in reader)
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise UserError(
                    f"{path}, line {number}: not JSON ({error}); put it right or remove it"
                ) from None
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number}: not a JSON object; put it right or remove it")
            yield number, row


def _log_row(path: Path, line: int, row: Mapping[str, Any], columns: Columns) -> LogRow:
    def value(column: str) -> Any:
        if row.get(column) in (None, ""):
            known = ", ".join(map(str, row))
            raise UserError(
                f"{path}, line {line}: no column {column!r} among {known}; name it with --columns"
            )
        return row[column]

    def count(column: str) -> int:
        try:
            number = float(value(column))
            if number < 1 or number != round(number):
                raise ValueError
            return round(number)
        except (ValueError, TypeError, OverflowError):
            wrong = f"{column} is {value(column)!r}"
            raise UserError(
                f"{path}, line {line}: {wrong}, not a count of 1 or more; remove the line"
            ) from None

    try:
        time_s = _seconds(value(columns.time))
    except ValueError:
        wrong = f"{columns.time} is {value(columns.time)!r}"
        raise UserError(f"{path}, line {line}: {wrong}, neither seconds nor ISO 8601; put it right") from None
    return LogRow(time_s, count(columns.prompt_tokens), count(columns.output_tokens))


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = datetime.fromisoformat(str(value)).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(value)
    return seconds


# Limit classes


@dataclass(frozen=True)
class LimitClass:
    """Requests whose prompts have from `min_tokens` to `max_tokens` tokens, both included."""

    name: str
    min_tokens: int
    max_tokens: int

    @classmethod
    def parse(cls, text: str) -> "LimitClass":
        """`chat=0-8000`."""
        name, _, span = text.partition("=")
        low, _, high = span.partition("-")
        if not name or not (low.isdecimal() and high.isdecimal() and int(low) <= int(high)):
            raise UserError(
                f"--limit-class {text!r} is not usable; write NAME=MIN-MAX tokens, like chat=0-8000"
            )
        return cls(name, int(low), int(high))


def with_limit_classes(trace: Trace, classes: Sequence[LimitClass]) -> Trace:
    """The trace with each request in the first class whose range holds its prompt; the others are `default`."""

    def name(request: Request) -> str:
        found = (c.name for c in classes if c.min_tokens <= request.prompt_tokens <= c.max_tokens)
        return next(found, "default")

    return new_trace(
        {**trace.header["generator"], "limit_classes": [vars(c) for c in classes]},
        trace.scale,
        (replace(request, limit_class=name(request)) for request in trace.requests),
    )


# Text and chat


def as_words(trace: Trace, kind: str, tokenizer_dir: Path) -> Trace:
    """The trace with text or chat prompts of about the same lengths, counted by the model's own tokenizer.

    Token ids are decoded to text, which need not encode to the same ids again: the count that is kept, and that
    the server must confirm, is of the text as a server encodes it, special tokens and chat template included.
    """
    from transformers import AutoTokenizer  # seconds to import, and only this needs it

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir), local_files_only=True)
    except (OSError, ValueError) as error:
        cause = str(error).splitlines()[0]
        raise UserError(f"no tokenizer in {tokenizer_dir} ({cause}); give the model's folder") from error
    if kind == "chat" and not tokenizer.chat_template:
        raise UserError(f"the tokenizer in {tokenizer_dir} has no chat template; use --prompts text")

    def worded(request: Request) -> Request:
        text = tokenizer.decode(request.prompt, skip_special_tokens=True)
        if kind == "text":
            return replace(request, prompt=(), text=text, counted_tokens=len(tokenizer(text)["input_ids"]))
        messages = ({"role": "user", "content": text},)
        rendered = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        count = len(tokenizer(rendered, add_special_tokens=False)["input_ids"])
        return replace(request, prompt=(), messages=messages, counted_tokens=count)

    requests = tuple(worded(request) for request in trace.requests)
    if empty := next((r.id for r in requests if not r.counted_tokens), None):
        raise UserError(f"request {empty} decodes to nothing; is --vocab-size that of {tokenizer_dir}?")
    return new_trace({**trace.header["generator"], "prompts": kind}, trace.scale, requests)
