# SPDX-License-Identifier: Apache-2.0
"""A short pair, each arm in a container of the image: the same results layout as with processes."""

import json
import sys
from pathlib import Path

from stack import SERVE, docker, run


def test_a_short_pair_through_the_docker_engine(tmp_path: Path) -> None:
    out = tmp_path / "run"
    tmp_path.chmod(0o755)
    cache = tmp_path / "cache"
    done = run(sys.executable, "-m", "harness", "bench", "--quick", "--image", SERVE, "--out", str(out),
        "--cache", str(cache), "--requests", "8", "--cohort-size", "4", "--output-tokens", "8")  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    assert summary["parity"]["ok"], done.stderr[-2000:]
    arms = {arm["name"]: arm for arm in json.loads((out / "manifest.json").read_text())["arms"]}
    assert set(arms) == {"tp2", "dcp2"}
    for arm in arms.values():
        assert arm["engine"]["image"] == SERVE and arm["engine"]["image_id"].startswith("sha256:")
        assert len(arm["engine"]["image_labels"]["kimi-k3.lock.sha256"]) == 64
    assert arms["dcp2"]["kv_tokens"] == 2 * arms["tp2"]["kv_tokens"]
    assert docker("ps", "-aq", "--filter", "label=kimi-k3.run").stdout == ""
