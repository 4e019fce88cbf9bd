# SPDX-License-Identifier: Apache-2.0
"""When each request is due. Pure: no clock is read here."""

from harness.trace import Trace


def due_times(trace: Trace, offered_qps: float) -> list[float]:
    """Seconds from the cell's start at which each request is due: arrival / rate.

    Arrivals 0, 1, 3 at 0.5 requests a second are due at 0, 2 and 6 s. An infinite rate makes everything due
    at 0.
    """
    if not offered_qps > 0:
        raise ValueError(f"offered rate must be positive, got {offered_qps}")
    return [request.arrival / offered_qps for request in trace.requests]
