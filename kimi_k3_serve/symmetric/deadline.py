# SPDX-License-Identifier: Apache-2.0
"""How long kernels wait for other ranks, and what the host then says: a CUDA error names nobody."""

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from kimi_k3_serve.errors import UserError

logger = logging.getLogger("vllm.kimi_k3_serve.symmetric")


class RendezvousTimeout(RuntimeError):
    """A rank did not come in time. The engine cannot go on: its peers' values are missing."""


class Deadline:
    """A limit in seconds for every wait of one protocol's launches, and the report of the one that was too long.

    The clock of a wait starts with the wait, so a launch in a CUDA graph has as long in every replay.
    """

    def __init__(self, limit_s: float, words: Callable[[int, int, int, int], str], *, on_gpu: bool) -> None:
        """Args:
        limit_s: 0: for ever.
        words: a report as text: the missing rank, its last epoch, the epoch waited for, the place of the wait.
        on_gpu: a thread then watches for a report and logs it, as long as this object lives.
        """
        self.limit_s, self.words = limit_s, words
        # Pinned, so that it can still be read when a lost rendezvous has cost the CUDA context.
        # On the host by name: vLLM builds its layers with a GPU as the default device.
        self.report = torch.zeros(4, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self.reported = self.report.numpy()
        if on_gpu and limit_s:
            arguments = (self.report, weakref.ref(self))
            threading.Thread(target=watch, args=arguments, name="rendezvous-watch", daemon=True).start()

    def arguments(self) -> tuple[int, int]:
        """What a kernel takes as `report` and `limit_ns`. Raises RendezvousTimeout where a report is there already."""
        self.check()
        return self.report.data_ptr(), int(self.limit_s * 1e9)

    def check(self) -> None:
        """Raises RendezvousTimeout where a rank has been reported."""
        if int(self.reported[0]):
            raise RendezvousTimeout(self.text())

    def text(self) -> str:
        """The report in words."""
        missing, last, epoch, place = self.reported.tolist()
        return self.words(missing - 1, last, epoch, place)


def watch(report: torch.Tensor, deadline: "weakref.ref[Deadline]") -> None:
    """Log a report; until there is one, or the deadline is gone."""
    reported: Any = report.numpy()
    while not int(reported[0]):
        time.sleep(1.0)
        if deadline() is None:
            return
    if (found := deadline()) is not None:
        logger.critical("%s", found.text())


def limit_s(name: str, default: float) -> float:
    """Seconds that the environment variable `name` states, 0 or more.

    Raises:
        UserError: it is no such number.
    """
    asked = os.environ.get(name)
    try:
        seconds = default if asked is None else float(asked)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise UserError(f"{name}={asked!r} is not a number of seconds; give 0 (no limit) or more")
    return seconds
