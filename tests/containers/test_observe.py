# SPDX-License-Identifier: Apache-2.0
"""Prometheus itself: it takes the configuration, fires each alert when it should, and scrapes a real server.

Grafana is not run: its dashboard's queries are, one by one, by Prometheus over what it scraped.
"""

import json
import os
import re
import time
import urllib.parse
import urllib.request
from typing import Any

import pytest
import yaml
from stack import ROOT, Server, docker, run

from harness.engines.process import free_port

PROMETHEUS = ROOT / "compose" / "prometheus"
GPU_ONLY = re.compile(r"\bDCGM_\w+")
METRIC = re.compile(r"\b(vllm:\w+|kimi_k3_\w+|process_\w+)")


def promtool(*argv: str) -> str:
    return run(f"{os.environ['KIMI_K3_TEST_PROMETHEUS']}/promtool", *argv).stdout


def test_prometheus_takes_the_configuration_and_its_rules() -> None:
    rules = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
    assert f"{len(rules)} rules found" in promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))


def test_each_alert_fires_when_it_should_and_not_before() -> None:
    cases = ROOT / "tests" / "containers" / "alerts.yml"
    promtool("test", "rules", str(cases))
    rules = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
    fired = {
        check["alertname"]
        for case in yaml.safe_load(cases.read_text())["tests"]
        for check in case["alert_rule_test"]
        if check.get("exp_alerts")
    }
    assert fired == {rule["alert"] for rule in rules}


@pytest.fixture(scope="module")
def prometheus(server: Server) -> Any:
    """Address of Prometheus beside the server, after a few scrapes of a server that has worked."""
    server.wait_healthy()
    port = str(free_port())
    files = {"COMPOSE_FILE": "compose.yaml:tests/containers/observe.yml", "PROMETHEUS_PORT": port}
    server.compose("up", "-d", "--no-deps", "prometheus", **files)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_scrapes(url, server)
        yield url
    finally:
        server.compose("rm", "-sfv", "prometheus", **files)


def wait_for_scrapes(url: str, server: Server) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        server.complete(server.key, 16)
        try:
            scraped = query(url, 'count_over_time(up{job="kimi-k3"}[5m])')
            rules = api(url, "rules")["groups"][0]["rules"]
        except OSError:  # it is starting
            time.sleep(0.5)
            continue
        if scraped and float(scraped[0]["value"][1]) >= 4 and all(rule["health"] == "ok" for rule in rules):
            return
        time.sleep(1)
    raise AssertionError(docker("ps", "-a").stdout)


def api(url: str, path: str, **parameters: str) -> Any:
    with urllib.request.urlopen(
        f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30
    ) as answer:
        found = json.load(answer)
    assert found["status"] == "success"
    return found["data"]


def query(url: str, expression: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api(url, "query", query=expression)["result"]
    return found


def dashboard_expressions() -> list[str]:
    panels = json.loads((ROOT / "compose/grafana/dashboards/kimi-k3.json").read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_the_server_is_scraped_through_its_name_on_the_network(prometheus: str) -> None:
    (target,) = [t for t in api(prometheus, "targets")["activeTargets"] if t["labels"]["job"] == "kimi-k3"]
    assert target["health"] == "up" and target["scrapeUrl"] == "http://model-server:8000/metrics"


@pytest.mark.parametrize("expression", dashboard_expressions())
def test_each_panel_has_data(prometheus: str, expression: str) -> None:
    found = query(prometheus, expression.replace("$__rate_interval", "1m"))
    assert bool(found) != bool(GPU_ONLY.search(expression)), expression


def test_the_dcp_paths_of_every_rank_are_seen(prometheus: str) -> None:
    used = {sample["metric"]["rank"] for sample in query(prometheus, "kimi_k3_path_used == 1")}
    assert used == {"0", "1"}


def test_alerts_name_metrics_that_the_server_has_and_none_fires(prometheus: str) -> None:
    rules = api(prometheus, "rules")["groups"][0]["rules"]
    names = set(api(prometheus, "label/__name__/values"))
    for rule in rules:
        assert set(METRIC.findall(rule["query"])) <= names, rule["name"]
        assert rule["state"] == "inactive", rule["name"]
