# SPDX-License-Identifier: Apache-2.0
"""What a resident run is asked for."""

from dataclasses import dataclass

from harness import parity
from harness.serving import Serving


@dataclass(frozen=True)
class ResidentOptions:
    """What a resident run is asked beyond a pair's options.

    `repeats` of each cell. `lone_prompts` of `context_tokens` go to each arm alone, and `contexts` at once; 0 leaves
    them out. `parity_tokens` are asked for in answer to each parity prompt, while prompts of `prefill_tokens` are
    prefilled beside. `deadline_s`: on time.monotonic(), when to end. `kill` names the arm whose last rank gets
    SIGKILL in the middle of its first cell. `warm_up_together`: all arms compile their kernels at once, in less time.
    `despite_refusal` goes on timing arms that disagree, for a diagnosis.
    """

    serving: Serving
    vocab_size: int
    arrivals: str = "poisson"
    repeats: int = 1
    lone_prompts: int = 0
    contexts: int = 0
    context_tokens: int = 120_000
    parity_tokens: int = parity.OUTPUT_TOKENS
    prefill_tokens: int = 700
    tolerance: parity.Tolerance = parity.EXACT
    deadline_s: float | None = None
    kill: str | None = None
    warm_up_together: bool = False
    despite_refusal: bool = False
