# SPDX-License-Identifier: Apache-2.0
"""When requests arrive, in unit-rate time: the first at 0, the mean gap 1 (of drawn gaps: expected). Pure.

- `constant`: every gap is 1; for calibration, and to see a server without bursts.
- `poisson`: exponential gaps; many users who know nothing of one another.
- `gamma`: gaps of shape `burstiness` b and mean 1, whose coefficient of variation is 1 / sqrt(b): b = 1 is
  Poisson, b < 1 comes in bursts, b > 1 is more even. The same meaning as `--burstiness` of vLLM's benchmark.
- `recorded`: the gaps of a log, in its order.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from harness.errors import UserError

ARRIVALS = ("poisson", "constant", "gamma", "recorded")


def fits(kind: str, burstiness: float | None) -> bool:
    """A positive burstiness belongs to gamma arrivals and to no others."""
    return burstiness is None if kind != "gamma" else burstiness is not None and burstiness > 0


BURSTINESS = "gamma arrivals and a positive --burstiness belong together (1 is Poisson, less comes in bursts)"


def unit_times(
    generator: np.random.Generator,
    n: int,
    kind: str,
    burstiness: float | None = None,
    recorded_s: Sequence[float] = (),
) -> npt.NDArray[np.float64]:
    """`n` arrival times. `recorded_s` are a log's times in seconds, of which the first n are used."""
    if kind == "recorded":
        return from_log(recorded_s[:n])
    if kind == "poisson":
        gaps = generator.exponential(1.0, n - 1)
    elif kind == "gamma" and burstiness is not None:
        gaps = generator.gamma(burstiness, 1 / burstiness, n - 1)
    else:
        gaps = np.ones(n - 1)
    return np.concatenate(([0.0], np.cumsum(gaps)))


def from_log(times_s: Sequence[float]) -> npt.NDArray[np.float64]:
    """Times of a log, ascending, over their own mean gap: 10, 10, 14 and 16 s become 0, 0, 2 and 3."""
    times = np.asarray(times_s, dtype=np.float64)
    if np.any(np.diff(times) < 0):
        raise ValueError("times of a log must ascend")
    since = times - times[0]
    return np.asarray(since / mean_gap_s(times_s)) if len(times) > 1 else since


def mean_gap_s(times_s: Sequence[float]) -> float:
    """Seconds between arrivals on average: the span over the number of gaps."""
    span = float(times_s[-1]) - float(times_s[0])
    if not span > 0:
        raise UserError(
            "the log's requests all have the same time; it has no rate of its own, use --arrivals"
        )
    return span / (len(times_s) - 1)
