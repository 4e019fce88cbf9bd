# SPDX-License-Identifier: Apache-2.0
"""The long prompts of a resident run: what they take in each arm, and what idle engines beside cost."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from harness import long_context
from harness.files import write_json
from harness.fleet import Fleet
from harness.run_folder import RunFolder
from harness.steps import Steps

IDLE_PROMPTS = 3
STOP_S = 20.0

Times = Mapping[str, Sequence[float]]
"""`ttft_s` and `tpot_ms` of each prompt."""


class LongPrompts:
    """Prompts of `tokens` tokens, the same in every session; `find` keeps a finding for the report."""

    def __init__(
        self,
        fleet: Fleet,
        folder: RunFolder,
        steps: Steps,
        find: Callable[[str], None],
        *,
        session: int,
        tokens: int,
        vocab_size: int,
        seed: int,
    ) -> None:
        self._fleet, self._run, self._steps, self._find = fleet, folder, steps, find
        self._session, self._tokens = session, tokens
        self._vocab_size, self._seed = vocab_size, seed
        self._found: dict[str, Any] = {"tokens": tokens}
        self._prompt_s = 0.0

    def _prompts(self, count: int) -> list[list[int]]:
        return long_context.prompts(self._seed, count, self._tokens, self._vocab_size)

    def _keep(self) -> None:
        write_json(self._run.path / f"long_context-{self._session}.json", self._found)

    async def lone(self, count: int) -> None:
        """`count` prompts to each arm, one at a time."""
        targets = list(self._fleet.targets.values())
        began = time.monotonic()
        times = await long_context.lone(targets, self._prompts(count), self._steps.progress)
        self._prompt_s = (time.monotonic() - began) / (count * len(targets))
        self._found["lone"] = times
        self._keep()
        asked = f"lone prompts of {self._tokens:,} tokens (n = {count}, session {self._session})"
        for name, arm in times.items():
            self._find(f"{name}, {asked}: {long_context.lone_text(arm)}")
        for paired in long_context.paired_texts(times):
            self._find(f"Lone prompts, TTFT (session {self._session}): {paired}")

    async def together(self, count: int) -> None:
        """`count` prompts to each arm, all at once."""
        arms = self._found["together"] = {"contexts": count, "arms": {}}
        for name, target in self._fleet.targets.items():
            self._steps.progress(f"{name}: {count} contexts at once")
            chunk_tokens = self._fleet.serving.chunk_tokens
            times = await long_context.together(target, self._prompts(count), chunk_tokens)
            arms["arms"][name] = times
            self._keep()
            between = long_context.between_text(times["tpot_ms"])
            self._find(
                f"{name}, {count} contexts of {self._tokens:,} tokens at once (session {self._session}): {between}"
            )

    def idle_cost_s(self) -> float:
        """How long `idle_cost` will take, from what lone prompts took; 0 where there were none."""
        return 2 * IDLE_PROMPTS * self._prompt_s + STOP_S if self._prompt_s else 0.0

    async def idle_cost(self) -> None:
        """The first arm's lone prompts beside idle engines, then with the others stopped, which they stay."""
        first, *others = self._fleet.targets
        target, asked = self._fleet.targets[first], self._prompts(IDLE_PROMPTS)
        beside = (await long_context.lone([target], asked, self._steps.progress))[first]
        self._fleet.stop(others)
        without = (await long_context.lone([target], asked, self._steps.progress))[first]
        write_json(
            self._run.path / f"residency-{self._session}.json",
            {
                "arm": first,
                "idle_beside": others,
                "tokens": self._tokens,
                "ttft_cost": _rise(beside, without, "ttft_s"),
                "beside": beside,
                "without": without,
            },
        )
        told = idle_text(first, others, beside, without)
        self._find(f"{told} The prompts' times: residency-{self._session}.json.")


def idle_text(first: str, others: Sequence[str], beside: Times, without: Times) -> str:
    """What idle engines beside changed, in words: an estimate of few prompts, never a verdict."""
    n = len(without["ttft_s"])
    return (
        f"Idle engines beside ({', '.join(others)}) changed {first}'s P50 TTFT of lone prompts by"
        f" {_rise(beside, without, 'ttft_s'):+.2%} and its time between tokens by"
        f" {_rise(beside, without, 'tpot_ms'):+.2%} (n = {n}, no interval)."
    )


def _rise(beside: Times, without: Times, time: str) -> float:
    return median(beside[time]) / median(without[time]) - 1
