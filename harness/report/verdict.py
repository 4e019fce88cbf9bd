# SPDX-License-Identifier: Apache-2.0
"""The result in words: a pure function of summary.json. Nothing here says more than the numbers bear."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EQUAL_BYTES = 0.01
NOMINAL = 0.05
"""By so much a trace's own rate may differ from the offered one without a word in the verdict."""

PAIRS_TOLD = 4
FAR_TOLD = 3
"""So many pairs of launches, or requests far off, at most stand in words."""

STATES = {"sure": "measured", "open": "open", "bad": "attention"}

Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """`state`: "sure" (resolved, or a plain fact), "open" (not resolved, or too little was measured) or
    "bad" (something is wrong with the measurement)."""

    title: str
    text: str
    state: str


def findings(summary: Summary) -> list[Finding]:
    """What a reader should take away, in the order of importance."""
    parity = summary["parity"]
    if parity is not None and not parity["ok"]:
        refusal = parity.get("refusal") or "the arms' answers differ"
        text = f"**{refusal}** Nothing below is a result of this pair: that its arms compute the same was not shown."
        return [Finding("No comparison", text, "bad")]
    if not _measured(summary):
        return [_trust(summary)]
    first, *others = (arm["name"] for arm in summary["arms"])
    speed = [_speed(summary, first, other) for other in others]
    return [
        *speed,
        *_answers(summary),
        *_far_off(summary),
        _rates(summary),
        *_capacity(summary),
        *_kv_waits(summary),
        _trust(summary),
    ]


def _speed(summary: Summary, first: str, other: str) -> Finding:
    pair = reference_pair(summary, first, other)
    if pair is None:
        text = f"No offered rate has valid cells of both {first} and {other}: they are not compared."
        return Finding("Speed", text, "bad")
    at, elsewhere = f"At {pair['offered_qps']:g} QPS", _elsewhere(summary, pair)
    median = pair["ttft_delta_p50_s"]
    if median is None:
        return Finding("Speed", f"{at} so many requests failed that the median difference is none.", "bad")
    text = f"{at} the first token of {other} comes {_later(median)} than that of {first} at the median"
    text += f"{_sureness(pair)}{elsewhere}"
    return Finding("Speed", text, "sure" if pair["resolved"] else "open")


def _sureness(found: Mapping[str, Any]) -> str:
    """What a paired median (of `found["n"]` requests) is worth, as the end of its sentence and what follows."""
    interval, count = found["interval_s"], _launch_count(found["launches"])
    if interval is None:
        text = f" of {found['n']} paired requests, {count}. No interval ({found['no_interval']})."
        if alone := found["launch_pairs"]:
            told = "; ".join(map(_of_launches, alone[:PAIRS_TOLD]))
            more = "; further ones in the table" if len(alone) > PAIRS_TOLD else ""
            text += f" Of one launch of each alone, over requests: {told}{more}."
        return f"{text} Not resolved."
    scope = "" if found["knows_launches"] else " for these launches alone"
    text = (
        f" (95 % interval{scope} {_signed(interval['low'])} to {_signed(interval['high'])},"
        f" {found['cohorts']} cohorts, {count})."
    )
    return text if found["resolved"] else f"{text} Not resolved: {_why_open(found)}."


def _of_launches(alone: Mapping[str, Any]) -> str:
    low, high = (alone["interval_s"][end] for end in ("low", "high"))
    ends = " to ".join("a failure" if end is None else _signed(end) for end in (low, high))
    return f"{_signed(alone['delta_p50_s'])} (95 % {ends})"


def reference_pair(summary: Summary, first: str, other: str) -> Mapping[str, Any] | None:
    """The comparison that the headline tells: at the fixed cohorts' rate, the lowest whose cells are valid in every
    arm, or else at the lowest at which these two have valid cells. So no result chooses its own rate."""
    pairs = _pairs(summary, first, other)
    rate = summary["arms"][0]["fixed_cohort"]["offered_qps"]
    return next((pair for pair in pairs if pair["offered_qps"] == rate), pairs[0] if pairs else None)


def _pairs(summary: Summary, first: str, other: str) -> list[Mapping[str, Any]]:
    """Upward by rate."""
    pairs = [pair for pair in summary["paired"] if pair["arms"] == [first, other]]
    return sorted(pairs, key=lambda pair: float(pair["offered_qps"]))


def _elsewhere(summary: Summary, told: Mapping[str, Any]) -> str:
    """The range of the median differences at the other rates, so that the headline's is not taken for all."""
    others = [
        pair
        for pair in _pairs(summary, *told["arms"])
        if pair["offered_qps"] != told["offered_qps"] and pair["ttft_delta_p50_s"] is not None
    ]
    if not others:
        return ""
    medians = [pair["ttft_delta_p50_s"] for pair in others]
    if len(others) == 1:
        return f" At {others[0]['offered_qps']:g} QPS it is {_later(medians[0])}."
    return (
        f" At the {len(others)} other rates, up to {others[-1]['offered_qps']:g} QPS: from {_later(min(medians))}"
        f" to {_later(max(medians))}."
    )


def _why_open(pair: Mapping[str, Any]) -> str:
    if not pair["knows_launches"]:
        return "with one launch of an arm nobody knows how much launches differ"
    low, high = pair["interval_s"]["low"], pair["interval_s"]["high"]
    if low <= 0 <= high:
        return "the interval holds zero"
    return f"launches of the same arm differ by up to {pair['noise_floor_s'] * 1e3:.1f} ms"


def _answers(summary: Summary) -> Iterator[Finding]:
    """What the first token's time does not tell: a request admitted early decodes beside more others."""
    at_load = [(arm["name"], arm["at_load"]) for arm in _measured(summary)]
    if any(found["tpot_p50_s"] is None for _, found in at_load):
        return
    if any(found["answer_p50_s"] is None and not found["unstable"] for _, found in at_load):
        return
    rate, unstable = at_load[0][1]["offered_qps"], any(found["unstable"] for _, found in at_load)
    tokens = ", ".join(f"{name} {1e3 * found['tpot_p50_s']:.1f} ms" for name, found in at_load)
    which = "measured" if unstable else "valid"
    text = f"At {rate:g} QPS, the highest rate {which} in every arm, medians: a later token takes {tokens}"
    (first, _), *others = at_load
    if unstable or not others:
        answers = ", ".join(
            f"{name} {'(unstable)' if found['unstable'] else _magnitude(found['answer_p50_s'])}"
            for name, found in at_load
        )
        state = "open" if others else "sure"
        yield Finding("Whole answers", f"{text}; a whole answer {answers}.", state)
        return
    pairs = [pair for pair in summary["paired"] if pair["offered_qps"] == rate and pair["arms"][0] == first]
    text += " (not paired)."
    for pair in pairs:
        answer, other = pair["answer"], pair["arms"][1]
        if answer["delta_p50_s"] is not None:
            briefly = f" of {answer['n']} paired requests: no interval, not resolved."
            text += f" The whole answer of {other} ends {_later(answer['delta_p50_s'])} than that of {first} at the"
            text += f" median{_sureness(answer) if answer['interval_s'] else briefly}"
    sure = bool(pairs) and all(pair["answer"]["resolved"] for pair in pairs)
    yield Finding("Whole answers", text, "sure" if sure else "open")


def _far_off(summary: Summary) -> Iterator[Finding]:
    """A request far off in one cell moves medians that are not paired."""
    if not (found := summary["far_off"]):
        return
    told = [
        f"{far['id']} in repeat {far['repeat']} of {far['arm']} at {far['offered_qps']:g} QPS"
        f" {'failed' if far['ttft_s'] is None else format(far['ttft_s'], '.3f') + ' s'},"
        f" {far['others_s']['low']:.3f} to {far['others_s']['high']:.3f} s in {far['others_s']['cells']} other cells"
        for far in found[:FAR_TOLD]
    ]
    more = f"; and {len(found) - FAR_TOLD} more (summary.json)" if len(found) > FAR_TOLD else ""
    text = (
        f"{_count(len(found), 'request')} far off in one cell only, TTFT: {'; '.join(told)}{more}. Such a request"
        " moves its cell's medians; the paired medians hold against single ones."
    )
    yield Finding("Far off", text, "open")


def _rates(summary: Summary) -> Finding:
    arms = _measured(summary)
    sentences = []
    for name, applied in summary["limits"].items():
        passing = [(arm["name"], _passing(arm, name)) for arm in arms]
        limit = f"At the {name} s limit"
        if applied != summary["limits_source"][name]:
            limit += f" (applied {applied:.3g} s)"
        if len(found := {words for _, words in passing}) == 1 and len(passing) > 1:
            who = "both arms pass" if len(passing) == 2 else "all arms pass"
            sentences.append(f"{limit} {who} {found.pop()}")
        else:
            sentences.append(f"{limit} " + ", ".join(f"{arm} passes {words}" for arm, words in passing))
        sentences[-1] += _boundary(summary, name) + "."
    unstable = [
        f"{arm['name']} from {arm['first_unstable_qps']:g} QPS"
        for arm in arms
        if arm["first_unstable_qps"] is not None
    ]
    if unstable:
        sentences.append(f"Unstable (the backlog grows): {', '.join(unstable)}.")
    factor = summary["arrived_over_offered"]
    if factor is not None and abs(factor - 1) > NOMINAL:
        sentences.append(f"Rates are nominal: this trace's requests arrive at {factor:.2f} times them.")
    short = sum(not cell["stability_known"] for arm in arms for cell in arm["cells"])
    if short:
        sentences.append(
            f"{_count(short, 'cell has', 'cells have')} too few requests to tell whether the backlog grows."
        )
    repeats = min((boundary_repeats(arm) for arm in arms), default=0)
    if repeats < 3 and len(arms) > 1:
        sentences.append(
            f"{_count(repeats, 'repeat')} at a boundary: how far chance moves these rates is not known"
            " (3 repeats needed)."
        )
    return Finding("Load", " ".join(sentences), "open" if short or not _sure_of_rates(summary) else "sure")


def _sure_of_rates(summary: Summary) -> bool:
    """Whether a difference of highest passing rates is more than chance: three repeats over two launches of every
    arm, and intervals of the difference without zero."""
    arms, parts = _measured(summary), summary["boundary_difference"]
    intervals = [part["interval_qps"] for part in parts]
    return (
        all(boundary_repeats(arm) >= 3 and (arm["launches"] > 1 or len(arms) == 1) for arm in arms)
        and all(None not in arm["first_failing_qps"].values() for arm in arms)
        and all(each and (_above(each["low"]) or _above(each["high"], -1)) for each in intervals)
    )


def _above(end: float | None, sign: int = 1) -> bool:
    return end is not None and sign * end > 0


def _passing(arm: Mapping[str, Any], limit: str) -> str:
    """A highest passing rate, with what is not known about it."""
    passed = arm["highest_passing_qps"][limit]
    if arm["first_failing_qps"][limit] is not None:
        return _qps(passed)
    if passed is None:
        return "an unknown rate (no cell counts at the lowest)"
    return f"at least {passed:g} QPS (nothing higher was shown not to pass)"


def boundary_repeats(arm: Mapping[str, Any]) -> int:
    """How often each rate that an arm's verdicts rest on was measured, at the least; 0 where there is none.

    Those are its highest passing rate and the first shown not to pass, for each limit. Cells count that are valid, or
    unstable.
    """
    boundary = {*arm["highest_passing_qps"].values(), *arm["first_failing_qps"].values()} - {None}
    measured = [
        {
            cell["repeat"]
            for cell in arm["cells"]
            if cell["offered_qps"] == rate and (cell["valid"] or cell["unstable"])
        }
        for rate in boundary
    ]
    return min(map(len, measured), default=0)


def _boundary(summary: Summary, limit: str) -> str:
    found = [
        f"{part['arms'][1]} - {part['arms'][0]} {_end(part['interval_qps']['low'])} to"
        f" {_end(part['interval_qps']['high'])} QPS"
        for part in summary["boundary_difference"]
        if part["limit"] == limit and part["interval_qps"]
    ]
    return (
        f" (95 % interval of the difference over repeats of this trace: {'; '.join(found)})" if found else ""
    )


def _capacity(summary: Summary) -> Iterator[Finding]:
    first, *others = summary["arms"]
    for other in others:
        if None in (first["kv_tokens"], other["kv_tokens"], first["kv_bytes"], other["kv_bytes"]):
            continue
        equal = abs(other["kv_bytes"] / first["kv_bytes"] - 1) <= EQUAL_BYTES
        at = "equal bytes" if equal else f"{other['kv_bytes'] / first['kv_bytes']:.2f}x its bytes"
        yield Finding(
            "Capacity",
            f"{other['name']} holds {other['kv_tokens'] / first['kv_tokens']:.2g}x the KV tokens of"
            f" {first['name']} at {at} ({other['kv_tokens']:,} against {first['kv_tokens']:,}).",
            "sure" if equal else "open",
        )


def _kv_waits(summary: Summary) -> Iterator[Finding]:
    """At the highest rate measured in every arm: in which share of the samples the KV cache held requests up."""
    told = {arm["name"]: [cell for cell in arm["cells"] if cell["kv_waits"]] for arm in _measured(summary)}
    rates = [{cell["offered_qps"] for cell in cells} for cells in told.values()]
    if not (common := set.intersection(*rates) if rates else set()):
        return
    rate = max(common)
    held, other = [], []
    for name, cells in told.items():
        waits = [cell["kv_waits"] for cell in cells if cell["offered_qps"] == rate]
        samples, waiting, kv = (sum(part[key] for part in waits) for key in ("samples", "waiting", "kv"))
        held.append(f"{kv} of {samples} ({name})")
        other.append(f"{waiting - kv} ({name})")
    text = (
        f"At {rate:g} QPS, the highest rate measured in every arm, looked at once a second: the next prompt waited"
        f" and did not fit into the free KV cache in {', '.join(held)} samples; it waited though it fitted in"
        f" {', '.join(other)}."
    )
    yield Finding("Waiting for the KV cache", text, "sure")


def _measured(summary: Summary) -> list[Mapping[str, Any]]:
    """The arms that have cells."""
    return [arm for arm in summary["arms"] if arm["cells"]]


def _trust(summary: Summary) -> Finding:
    cells = [(arm["name"], cell) for arm in summary["arms"] for cell in arm["cells"]]
    bad = [(f"{arm} at {cell['offered_qps']:g} QPS", cell) for arm, cell in cells if not cell["valid"]]
    parity = summary["parity"]
    text = "No cell was measured." if not cells else f"All {len(cells)} cells count."
    if bad:
        where = ", ".join(dict.fromkeys(name for name, _ in bad))
        text = f"{len(bad)} of {len(cells)} cells do not count ({where}; reasons below)."
    text += (
        " Whether the arms compute the same was not checked."
        if parity is None
        else f" Parity passed: {parity['compared']} positions compared, {other_tokens(parity)}."
    )
    if other_lengths := summary["other_lengths"]:
        text += f" {_count(other_lengths, 'request')} got answers of different lengths: others then met another load."
    for arm in summary["arms"]:
        if unchecked := list(dict.fromkeys(what for cell in arm["cells"] for what in cell["unchecked"])):
            text += f" Not checked of {arm['name']}: {'; '.join(unchecked)}."
    left_out: Mapping[str, str] = summary.get("left_out") or {}
    if left_out:
        text += f" Left out: {', '.join(left_out)} (reasons below)."
    if summary["scale"] != 1:
        text += f" Prompts are scaled by {summary['scale']:g}: these are not the times of the full workload."
    if sharing := summary["ranks_share_cores"]:
        text += (
            f" Ranks of {' and '.join(sharing)} share cores: whether it works is shown, how fast it is not."
        )
    flawed = not cells or other_lengths or sharing or any(not cell["unstable"] for _, cell in bad)
    return Finding("Trust", text, "bad" if flawed else "open" if parity is None or left_out else "sure")


def other_tokens(parity: Mapping[str, Any]) -> str:
    """Of a parity that passed: how often two sides chose different tokens, which is no failure."""
    n = len(parity["diverged"])
    if n == 0:
        return "no other token"
    if n == 1:
        return "1 other token, explained by its margin"
    return f"{n} other tokens, all explained by their margin"


def _later(seconds: float) -> str:
    if seconds == 0:
        return "neither sooner nor later"
    return f"{_magnitude(abs(seconds))} {'later' if seconds > 0 else 'sooner'}"


def _magnitude(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{_magnitude(abs(seconds))}"


def _qps(rate: float | None) -> str:
    return "no tested rate" if rate is None else f"{rate:g} QPS"


def _end(rate: float | None) -> str:
    return "unbounded" if rate is None else f"{rate:+.3g}"


def _launch_count(launches: Sequence[int]) -> str:
    first, other = launches
    return (
        f"{_count(first, 'launch', 'launches')} an arm" if first == other else f"{first} and {other} launches"
    )


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n} {one if n == 1 else many or one + 's'}"
