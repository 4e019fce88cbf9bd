# SPDX-License-Identifier: Apache-2.0
"""At which clocks each arm's GPUs worked, and what held them down, as a note. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from harness.nvidia import number
from harness.store import Cell

IDLE = 0x1
SLOWDOWNS = {
    0x4: "The power cap",
    0x8: "A hardware slowdown",
    0x20: "A software thermal slowdown",
    0x40: "A hardware thermal slowdown",
    0x80: "A power brake",
}
"""Bits of nvidia-smi's `clocks_event_reasons.active`, as NVML documents them."""
ALIKE = 0.01
"""By how much the arms' mean clocks may differ before a reader is warned."""

Busy = tuple[float, int]
"""One sample of a GPU that worked: SM clock in MHz, event reasons."""


def clock_notes(manifest: Mapping[str, Any], cells: Sequence[Cell]) -> Iterator[str]:
    """One note of all arms, over the offered rates at which each has samples; none where there are none."""
    busy = {cell.key: found for cell in cells if (found := list(_busy(cell)))}
    rates = {
        arm["name"]: {key.offered_qps for key in busy if key.arm == arm["name"]} for arm in manifest["arms"]
    }
    rates = {arm: found for arm, found in rates.items() if found}
    if rates and (common := set.intersection(*rates.values())):  # an arm is as busy as its load makes it
        alike = [(key.arm, found) for key, found in busy.items() if key.offered_qps in common]
        by_arm = {name: [sample for arm, found in alike if arm == name for sample in found] for name in rates}
        yield _note(by_arm, _max_mhz(manifest))


def _note(by_arm: Mapping[str, Sequence[Busy]], max_mhz: float | None) -> str:
    mean = {arm: fmean(mhz for mhz, _ in samples) for arm, samples in by_arm.items()}
    most = "" if max_mhz is None else f", of at most {max_mhz:,.0f} MHz"
    sentences = [
        "Mean SM clock of busy GPUs (looked at once a second; busy: a request was under way and the GPU did not "
        f"report itself idle): {', '.join(f'{arm} {mhz:,.0f} MHz' for arm, mhz in mean.items())}{most}."
    ]
    for bit, reason in SLOWDOWNS.items():
        held = {arm: sum(bool(mask & bit) for _, mask in samples) for arm, samples in by_arm.items()}
        if any(held.values()):
            shares = ", ".join(f"{count} of {len(by_arm[arm])} ({arm})" for arm, count in held.items())
            sentences.append(f"{reason} held the clock down in {shares} busy samples.")
    if len(sentences) == 1:
        sentences.append("No busy sample tells of a slowdown.")
    apart = max(mean.values()) / min(mean.values()) - 1
    if apart > ALIKE:
        sentences.append(
            f"The arms' clocks differ by {100 * apart:.1f} %: a difference in speed may be one of clocks."
        )
    return " ".join(sentences)


def _busy(cell: Cell) -> Iterator[Busy]:
    """The samples at whose time a request was under way, of GPUs that tell clock and reasons and are not idle."""
    spans = [(r.sent_s, r.done_s) for r in cell.records if r.sent_s is not None and r.done_s is not None]
    sent, done = sorted(sent_s for sent_s, _ in spans), sorted(done_s for _, done_s in spans)
    for sample in cell.gpus:
        mhz, mask = sample["sm_mhz"], _mask(sample["event_reasons"])
        under_way = bisect_right(sent, sample["t_s"]) > bisect_left(done, sample["t_s"])
        if mhz and mask is not None and not mask & IDLE and under_way:
            yield mhz, mask


def _mask(text: str) -> int | None:
    """None where the GPU does not tell (`[N/A]`)."""
    try:
        return int(text, 16)
    except ValueError:
        return None


def _max_mhz(manifest: Mapping[str, Any]) -> float | None:
    """The highest that a GPU of the run can reach, where the manifest has it (`1980 MHz`)."""
    gpus = [gpu for session in manifest.get("sessions", ()) for gpu in session.get("gpus", ())]
    return max((mhz for gpu in gpus if (mhz := number(gpu["clocks.max.sm"])) is not None), default=None)
