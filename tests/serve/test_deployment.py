# SPDX-License-Identifier: Apache-2.0
"""Files that no program of ours reads: dashboards, alert rules, manifests. They name real metrics and real options."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from kimi_k3_serve import image_lock, launch
from kimi_k3_serve.cli import parser, planned
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


def test_the_dashboard_is_laid_out_and_reads_the_provisioned_source() -> None:
    dashboard = json.loads((COMPOSE / "grafana/dashboards/kimi-k3.json").read_text())
    sources = yaml.safe_load((COMPOSE / "grafana/provisioning/datasources/prometheus.yml").read_text())
    known = {(source["type"], source["uid"]) for source in sources["datasources"]}
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        assert (panel["datasource"]["type"], panel["datasource"]["uid"]) in known, panel["title"]
        assert panel["type"] in ("timeseries", "stat", "gauge", "table")
        letters = [target["refId"] for target in panel["targets"]]
        assert letters and len(set(letters)) == len(letters), panel["title"]
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert dashboard["uid"] and dashboard["schemaVersion"] >= 36  # from 36 on a data source is type and uid


def test_grafana_finds_what_is_mounted() -> None:
    grafana = yaml.safe_load((COMPOSE.parent / "compose.yaml").read_text())["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    inside = {target: COMPOSE.parent / source for source, target in mounts.items() if source.startswith("./")}
    providers = yaml.safe_load((COMPOSE / "grafana/provisioning/dashboards/kimi-k3.yml").read_text())
    (folder,) = {provider["options"]["path"] for provider in providers["providers"]}
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (inside[folder] / home.name).is_file() and str(home.parent) == folder
    assert (inside["/etc/grafana/provisioning"] / "datasources").is_dir()


def compose_command(service: str, **environment: str) -> list[str]:
    """A service's command line as compose would interpolate it."""
    services = yaml.safe_load((COMPOSE.parent / "compose.yaml").read_text())["services"]
    text = re.sub(
        r"\$\{(\w+):-([^}]*)\}", lambda at: environment.get(at[1], at[2]), services[service]["command"]
    )
    return text.split()


@pytest.mark.parametrize("profile", sorted(set(launch.profiles()) - {"cpu", "h200-8", "b200-8"}))
def test_compose_launches_every_topology_of_a_profile(profile: str) -> None:
    """With the same names on one node, on several and on Kubernetes."""
    chosen = load(profile)
    assert chosen.machine
    service = "serve" if chosen.machine.nodes == 1 else "serve-node"
    for topology in chosen.topologies:
        settings = {"PROFILE": profile, "TOPOLOGY": topology, "HEAD": "10.0.0.1", "NODE": "1"}
        args = parser().parse_args(compose_command(service, **settings))
        argv = planned(args, args.model).argv
        assert argv[argv.index("--tensor-parallel-size") + 1] == str(Topology.parse(topology).tp)
        assert ("--headless" in argv) == (chosen.machine.nodes > 1)


@pytest.fixture
def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((COMPOSE / "kubernetes/leaderworkerset.yaml").read_text()))


def check(manifests: list[dict[str, Any]]) -> None:
    """A LeaderWorkerSet is no core resource: its own fields by its types, its two pod templates as Pods."""
    group, service = manifests
    jsonschema.validate(group, json.loads((Path(__file__).parent / "leaderworkerset_v1.json").read_text()))
    kubernetes_validate.validate(service, KUBERNETES, strict=True)
    for name in ("leaderTemplate", "workerTemplate"):
        template = group["spec"]["leaderWorkerTemplate"][name]
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            **template,
            "metadata": {"name": "x", **template["metadata"]},
        }
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_manifests_fit_the_published_schemas(manifests: list[dict[str, Any]]) -> None:
    check(manifests)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.startupPolicy", "LeaderFirst"),
        ("spec.leaderWorkerTemplate.size", "four"),
        ("spec.leaderWorkerTemplate.restartPolicy", "Always"),
        ("spec.leaderWorkerTemplate.image", "x"),
        ("spec.leaderWorkerTemplate.leaderTemplate.spec.containers", "x"),
        ("spec.leaderWorkerTemplate.workerTemplate.spec.runAsNonRoot", True),
    ],
)
def test_a_wrong_manifest_is_found(manifests: list[dict[str, Any]], path: str, value: object) -> None:
    *parents, name = path.split(".")
    place = manifests[0]
    for parent in parents:
        place = place[parent]
    place[name] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check(manifests)


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


def test_workflows_pin_actions_by_commit_and_may_only_read() -> None:
    workflows = list((COMPOSE.parent / ".github/workflows").glob("*.yml"))
    assert workflows
    for path in workflows:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        for step in steps:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{'0' * 40}")), step
        for command in (step["run"].split()[-1] for step in steps if ".ci/" in step.get("run", "")):
            assert (COMPOSE.parent / command).is_file()


@pytest.mark.parametrize("target", ["serve", "serve-sm120"])
def test_the_gpu_images_hold_one_cuda(target: str) -> None:
    """The compiler, its headers and the runtime; CCCL refuses to compile otherwise."""
    locked = image_lock.pins(image_lock.folder() / f"{target}.txt")
    parts = ("nvidia-cuda-runtime", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-nvvm")
    assert {locked[name][0].rpartition(".")[0] for name in parts} == {"13.0"}
