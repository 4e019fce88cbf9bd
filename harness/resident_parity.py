# SPDX-License-Identifier: Apache-2.0
"""Whether the engines of a resident run may be timed: of a session's first engines, and of each that comes back."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness import parity
from harness.checks import keep_check
from harness.errors import UserError
from harness.files import write_json
from harness.fleet import Fleet
from harness.load import Target
from harness.pair import Options
from harness.parity_collect import collect, continue_freely
from harness.prepare import ask_reference, keep_prompts
from harness.resident_options import ResidentOptions
from harness.run_folder import RunFolder
from harness.steps import Steps


@dataclass(frozen=True)
class _Asked:
    """What this session's arms were asked for parity."""

    prompts: Sequence[parity.Prompt]
    reference: parity.Answers | None
    ask: Callable[[Target], Coroutine[Any, Any, parity.ArmAnswers]]


class ResidentParity:
    """`leave_out` goes on without arms that failed, or raises where no pair is left."""

    def __init__(
        self,
        fleet: Fleet,
        folder: RunFolder,
        steps: Steps,
        options: Options,
        resident: ResidentOptions,
        leave_out: Callable[[Mapping[str, UserError]], None],
    ) -> None:
        self._fleet, self._run, self._steps = fleet, folder, steps
        self._options, self._resident, self._leave_out = options, resident, leave_out
        self._asked: _Asked | None = None
        self._answers: dict[str, parity.ArmAnswers] = {}

    async def check(self) -> None:
        """All arms that run. UserError where they must not be timed."""
        options, resident, run, fleet = self._options, self._resident, self._run, self._fleet
        prompts = parity.make_prompts(options.seed, resident.vocab_size, options.parity_lengths)
        reference: parity.Answers | None = None
        if resident.serving.gpu:
            first = fleet.targets[options.arms[0].name]
            continuations = await continue_freely(first, prompts, resident.parity_tokens)
            keep_prompts(run.folder("parity"), prompts, resident.parity_tokens, continuations)
        else:
            reference = await ask_reference(
                options.program,
                resident.serving.model,
                prompts,
                folder=run.folder("parity"),
                log_path=run.folder("logs") / "reference.log",
                progress=self._steps.progress,
            )
            continuations = {asked: tuple(p.token for p in answer) for asked, answer in reference.items()}

        async def ask(target: Target) -> parity.ArmAnswers:
            return await collect(
                target,
                prompts,
                continuations,
                resident.vocab_size,
                self._steps.progress,
                prefill_tokens=resident.prefill_tokens,
            )

        self._asked = _Asked(prompts, reference, ask)
        answers, failed = await fleet.ask_each(ask, "answering the parity prompts")
        self._leave_out(failed)
        refusal = self._judge(prompts, reference, answers)
        self._answers = answers
        arms = {arm.name: arm for arm in options.arms}
        for name in list(fleet.targets):
            try:
                proofs = run.read_proofs(name)
                arms[name].require_proof(proofs, used=True, gpu=resident.serving.gpu)
            except UserError as error:
                self._leave_out({name: error})
        if refusal and not resident.despite_refusal:
            raise UserError(refusal)

    async def admit(self, name: str) -> None:
        """An engine that came back is another launch: it is asked and proven like the first one.

        UserError where it must not be timed. Its answers are compared with those that another arm gave at first.
        """
        assert self._asked is not None, "no arm is timed before parity"
        asked, resident, run, fleet = self._asked, self._resident, self._run, self._fleet
        answering = asked.ask(fleet.targets[name])
        answers = await fleet.engines[name].guard(answering, "answering the parity prompts again")
        others = [arm for arm in self._answers if arm != name]
        other = next((arm for arm in others if arm in fleet.engines), others[0])
        arms = {other: self._answers[other], name: answers}
        verdict = parity.compare(
            asked.prompts, asked.reference, arms, resident.tolerance, resident.parity_tokens
        )
        launch = run.launches()[name]
        record = verdict.record(asked.prompts)
        write_json(run.path / f"parity-{name}-launch{launch + 1}.json", record)
        keep_check(run.path, run.manifest, record, arms, {name: launch})
        arm = next(arm for arm in self._options.arms if arm.name == name)
        arm.require_proof(run.read_proofs(name), used=True, gpu=resident.serving.gpu)
        if (refusal := verdict.refusal()) and not resident.despite_refusal:
            raise UserError(refusal)

    def _judge(
        self,
        prompts: Sequence[parity.Prompt],
        reference: parity.Answers | None,
        answers: dict[str, parity.ArmAnswers],
    ) -> str | None:
        """Why the arms must not be timed; arms at fault beside a pair that agrees are left out, with their verdict."""
        first, resident, run = self._options.arms[0].name, self._resident, self._run
        while refusal := run.judge(
            prompts,
            reference,
            answers,
            self._steps,
            launches={name: launch for name, launch in run.launches().items() if name in answers},
            tolerance=resident.tolerance,
            output_tokens=resident.parity_tokens,
        ):
            wrong = parity.at_fault(run.manifest["parity"]["diverged"], first)
            if resident.despite_refusal or first in wrong or len(answers.keys() - wrong) < 2:
                return refusal
            write_json(run.path / f"parity-with-{'-'.join(sorted(wrong))}.json", run.manifest["parity"])
            self._leave_out({name: UserError(refusal) for name in sorted(wrong)})
            for name in wrong:
                del answers[name]
        return None
