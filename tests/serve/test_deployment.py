# SPDX-License-Identifier: Apache-2.0
"""Files that no program of ours reads: dashboards, alert rules, manifests. They name real metrics and real options."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kimi_k3_serve import launch
from kimi_k3_serve.cli import parser
from kimi_k3_serve.profile import load
from kimi_k3_serve.topology import Topology

COMPOSE = Path(__file__).parents[2] / "compose"
KUBERNETES = "1.34"
METRIC = re.compile(r"\b(vllm:\w+|kimi_k3_\w+)")


def expressions() -> list[str]:
    panels = json.loads((COMPOSE / "grafana/dashboards/kimi-k3.json").read_text())["panels"]
    rules = yaml.safe_load((COMPOSE / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    return [target["expr"] for panel in panels for target in panel["targets"]] + [
        rule["expr"] for rule in rules
    ]


def test_dashboards_and_alerts_name_metrics_that_exist() -> None:
    spec = find_spec("vllm")
    assert spec and spec.origin
    source = (Path(spec.origin).parent / "v1/metrics/loggers.py").read_text()
    source += (Path(__file__).parents[2] / "kimi_k3_serve/metrics.py").read_text()
    named = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert len(named) >= 12
    for name in named:
        assert f'"{re.sub("_(bucket|total)$", "", name)}"' in source or f'"{name}"' in source, name


def test_a_dashboard_panel_for_each_thing_to_watch() -> None:
    panels = json.loads((COMPOSE / "grafana/dashboards/kimi-k3.json").read_text())["panels"]
    titles = {panel["title"] for panel in panels}
    wanted = {"Time to first token", "Queue", "KV usage", "Preemptions", "DCP paths in use", "GPU memory"}
    assert wanted <= titles and len({panel["id"] for panel in panels}) == len(panels)


@pytest.fixture
def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((COMPOSE / "kubernetes/leaderworkerset.yaml").read_text()))


def test_manifests_fit_the_published_schemas(manifests: list[dict[str, Any]]) -> None:
    """A LeaderWorkerSet is no core resource; its two pod templates are checked as Pods."""
    group, service = manifests
    kubernetes_validate.validate(service, KUBERNETES, strict=True)
    template = group["spec"]["leaderWorkerTemplate"]
    assert set(group["spec"]) == {"replicas", "startupPolicy", "leaderWorkerTemplate"}
    assert set(template) == {"size", "restartPolicy", "workerTemplate", "leaderTemplate"}
    for name in ("leaderTemplate", "workerTemplate"):
        pod = {"apiVersion": "v1", "kind": "Pod", **template[name]}
        pod["metadata"] = {"name": "x", **pod["metadata"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_manifests_launch_what_their_profile_says(manifests: list[dict[str, Any]]) -> None:
    template = manifests[0]["spec"]["leaderWorkerTemplate"]
    (container,) = template["leaderTemplate"]["spec"]["containers"]
    assert container["args"] == template["workerTemplate"]["spec"]["containers"][0]["args"]
    words = [
        word.replace("$(LWS_WORKER_INDEX)", "3").replace("$(LWS_LEADER_ADDRESS)", "h")
        for word in container["args"]
    ]
    args = parser().parse_args(words)
    profile = load(args.profile)
    assert profile.machine and template["size"] == profile.machine.nodes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(profile.machine.gpus_per_node)
    assert Topology.parse(args.topology) == Topology(16, 16)
    plan = launch.plan(profile=args.profile, topology=args.topology, model=args.model, host=args.host,
        port=args.port, node=args.node, head=args.head)  # fmt: skip
    assert "--headless" in plan.argv
