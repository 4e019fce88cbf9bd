# SPDX-License-Identifier: Apache-2.0
"""How near a server is to saturation, and for how long its queue then remembers. Pure.

A queue that keeps up forgets its past whenever it empties. Near saturation that takes long: in units of requests
about 2 rho / (1 - rho)^2 (the relaxation time of a single queue in heavy traffic; Whitt, Planning queueing
simulations, Management Science 35, 1989), where rho is the share of time that the server is busy. Poisson
arrivals see time averages (Wolff, 1982), so rho is what the requests tell: the share of them that come while an
earlier one still waits for its first token.
"""

import math
from collections.abc import Sequence

from harness.client import RequestRecord


def waiting_share(records: Sequence[RequestRecord]) -> float:
    """The share of requests, the first left out, that were due while an earlier one waited for its first token."""
    spans = sorted((record.due_s, _answered_s(record)) for record in records)
    found, busy_until_s = 0, -math.inf
    for index, (due_s, answered_s) in enumerate(spans):
        found += index > 0 and busy_until_s > due_s
        busy_until_s = max(busy_until_s, answered_s)
    return found / max(1, len(spans) - 1)


def memory_requests(share: float) -> float:
    """How many requests long a queue remembers; infinite where it never empties. 0.5: 4, 0.9: 180."""
    return 2 * share / (1 - share) ** 2 if share < 1 else math.inf


def independent_requests(records: Sequence[RequestRecord]) -> float:
    """As how many independent requests those of a cell count, since what one waited says what the next one waits."""
    return independent_of(len(records), waiting_share(records))


def independent_of(n: int, share: float) -> float:
    """As how many independent ones n requests count of which `share` came while another one waited.

    Correlation that dies away over a memory of k requests leaves about n / (1 + c k) of n; c = 1/2 is what the
    intervals of a simulated queue's cells need to cover the truth (benchmarks/cell_selftest.py).
    """
    return n / (1 + memory_requests(share) / 2)


def _answered_s(record: RequestRecord) -> float:
    """When it stopped waiting: with its first token, or its failure."""
    ends = (record.first_token_s, record.done_s)
    return next((end for end in ends if end is not None), math.inf)
