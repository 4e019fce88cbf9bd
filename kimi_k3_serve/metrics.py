# SPDX-License-Identifier: Apache-2.0
"""Which DCP paths are in use, on the server's own /metrics: the ranks' proofs as two gauges.

    kimi_k3_feature_active{rank, feature}    1 where the worker found the feature in its loaded model, else 0
    kimi_k3_path_used{rank, path}            1 for each code path that has run at least once

The workers write the proofs (proof.py), the API server reads them when it is scraped.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kimi_k3_serve.proof import PROOF_DIR


class Proofs:
    """A collector for prometheus_client; without proofs it yields gauges without samples."""

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import GaugeMetricFamily

        active = GaugeMetricFamily(
            "kimi_k3_feature_active", "Found in the loaded model", labels=["rank", "feature"]
        )
        used = GaugeMetricFamily("kimi_k3_path_used", "Has run at least once", labels=["rank", "path"])
        for path in sorted(Path(os.environ.get(PROOF_DIR, "/nowhere")).glob("rank-*.json")):
            proof = json.loads(path.read_text())
            rank = str(proof["rank"])
            for name, state in proof["features"].items():
                active.add_metric([rank, name], float(state["active"]))
            for name in proof["used"]:
                used.add_metric([rank, name], 1.0)
        yield active
        yield used


_installed = False


def install() -> None:
    """Register with the process's default registry, once; only the API server's is ever scraped."""
    global _installed
    if not _installed:
        from prometheus_client import REGISTRY

        REGISTRY.register(Proofs())
        _installed = True
