# SPDX-License-Identifier: Apache-2.0
import gzip
from pathlib import Path

import pytest
from builders import small_trace

from harness.errors import UserError
from harness.trace import load_trace, save_trace


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    trace = small_trace(arrivals="poisson", scale=0.5)
    save_trace(trace, tmp_path / name)
    assert load_trace(tmp_path / name) == trace


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    save_trace(small_trace(), tmp_path / "a.jsonl.gz")
    save_trace(small_trace(), tmp_path / "b.jsonl.gz")
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert small_trace(seed=8).sha256 != small_trace(seed=7).sha256


def test_the_hash_of_a_known_trace_never_changes() -> None:
    """If this fails, old traces cannot be made again: results measured with them stand alone."""
    trace = small_trace(arrivals="poisson")
    assert trace.sha256 == "d9c1c70cae05fbc6f708d3699c3fec19900c27018bd37d1ada3e58096e7ecf42"


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_one_changed_token_is_caught(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    trace = small_trace()
    save_trace(trace, path)
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    first = trace.requests[0].prompt[0]
    changed = text.replace(f'"prompt":[{first},', f'"prompt":[{first + 1},', 1)
    assert changed != text
    path.write_bytes(gzip.compress(changed.encode()) if path.suffix == ".gz" else changed.encode())
    with pytest.raises(UserError, match=trace.sha256) as caught:
        load_trace(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"arrival":1.0', '"arrival":1.5'),
        ('"scale":1.0', '"scale":2.0'),
        ('"seed":7', '"seed":8'),
        ("r0001", "r0009"),
    ],
)
def test_any_other_change_is_caught(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "t.jsonl"
    save_trace(small_trace(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match="was changed"):
        load_trace(path)


def test_a_missing_request_is_caught(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    save_trace(small_trace(), path)
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(UserError, match="was changed"):
        load_trace(path)


def test_a_trace_in_another_schema_is_not_read(tmp_path: Path) -> None:
    save_trace(small_trace(), path := tmp_path / "t.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"schema":1', b'"schema":2', 1))
    with pytest.raises(UserError, match=r"is in schema 2, this harness reads 1; use the one that wrote it"):
        load_trace(path)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"[1]\n", b'{"schema":1}\n', b"\x1f\x8b\x00"])
@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_what_is_no_trace_is_said_so(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match="trace"):
        load_trace(tmp_path / name)


def test_lengths_are_stratified() -> None:
    """Each of n equal strata of [100, 199] gives exactly one length."""
    trace = small_trace(requests=50, min_tokens=100, max_tokens=199)
    strata = sorted((len(request.prompt) - 100) // 2 for request in trace.requests)
    assert strata == list(range(50))


def test_scale_shrinks_prompts_and_nothing_else() -> None:
    trace = small_trace(requests=24, min_tokens=60_000, max_tokens=180_000, scale=0.01)
    lengths = [len(request.prompt) for request in trace.requests]
    assert 600 <= min(lengths) <= 650
    assert 1750 <= max(lengths) <= 1800
    assert {request.output_tokens for request in trace.requests} == {4}
    assert trace.scale == trace.header["scale"] == 0.01


def test_arrivals() -> None:
    assert [request.arrival for request in small_trace().requests] == [0, 1, 2, 3, 4, 5]
    poisson = small_trace(arrivals="poisson", requests=2000, min_tokens=1, max_tokens=1)
    times = [request.arrival for request in poisson.requests]
    assert times[0] == 0
    assert times == sorted(times)
    assert 0.9 < poisson.span / 1999 < 1.1


def test_cohorts_are_consecutive_and_ids_unique() -> None:
    trace = small_trace(requests=7)
    assert [request.cohort for request in trace.requests] == [0, 0, 0, 1, 1, 1, 2]
    assert trace.cohorts == (0, 1, 2)
    assert len({request.id for request in trace.requests}) == 7


def test_tokens_avoid_specials_and_stay_inside_the_vocabulary() -> None:
    tokens = {
        token for request in small_trace(requests=50, vocab_size=8).requests for token in request.prompt
    }
    assert tokens == {3, 4, 5, 6, 7}


@pytest.mark.parametrize(
    "change",
    [
        {"requests": 0},
        {"min_tokens": 0},
        {"min_tokens": 41},
        {"scale": 0.0},
        {"output_tokens": 0},
        {"cohort_size": 0},
        {"arrivals": "bursty"},
        {"vocab_size": 3},
        {"seed": -1},
    ],
)
def test_impossible_arguments_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(UserError):
        small_trace(**change)
