# SPDX-License-Identifier: Apache-2.0
"""Inside vLLM's workers: which kernels a prefill launches, and what each takes.

`worker_extension_cls="prefill_probe.PrefillProbe"`, then `collective_rpc("start_kernels")`, a request, and
`collective_rpc("end_kernels")`. Kernels and copies are recorded, no host calls.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ACTIVITY, DEVICE = ProfilerActivity.CUDA, DeviceType.CUDA


class PrefillProbe:
    """Mixed into vLLM's worker."""

    recorder: Any  # vLLM's worker has a `profiler` of its own

    def start_kernels(self) -> None:
        torch.cuda.synchronize()
        self.recorder = profile(activities=[ACTIVITY])
        self.recorder.start()

    def end_kernels(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        self.recorder.stop()
        found = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in self.recorder.events()
            if event.device_type == DEVICE
        ]
        return summary(found)


def summary(found: Iterable[tuple[str, float, float]]) -> dict[str, Any]:
    """Of kernels and copies (name, start, end), in microseconds: what they took, in milliseconds.

    Returns:
        `span_ms` from the first start to the last end, `busy_ms` of it in which any ran, and by name under `kernels`
        {"calls", "ms"}.

    Raises:
        RuntimeError: there are none.
    """
    events = sorted(found, key=lambda event: event[1])
    if not events:
        raise RuntimeError("the profiler has recorded nothing on this GPU")
    kernels: dict[str, dict[str, float]] = {}
    busy, reached = 0.0, events[0][1]
    for name, start, end in events:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        kernel = kernels.setdefault(name, {"calls": 0, "ms": 0.0})
        kernel["calls"] += 1
        kernel["ms"] += (end - start) / 1000
    return {"span_ms": (reached - events[0][1]) / 1000, "busy_ms": busy / 1000, "kernels": kernels}
