"""The alert rules ask for metrics that exist, say what to do, and have a fault that makes each of them fire."""

import re
from typing import Any

import yaml

from benchmarks.clients.watching.dashboards import FAULTS
from tests.support.deploy.metric_families import metric_names, router_registry, scheduler_registry, series
from tests.support.repository import ROOT

RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]


def test_every_metric_is_exposed() -> None:
    known = series(router_registry("octavo")) | series(scheduler_registry("octavo"))
    asked = {name for rule in RULES for name in metric_names(rule["expr"])}
    assert len(asked) == 5
    assert not asked - known


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    for rule in RULES:
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        # A fault of a moment, such as a restart, wakes nobody.
        assert rule["for"] == "30s"
        labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert labels <= {"instance", "replica", "thread"}


def test_the_benchmark_makes_the_fault_of_each() -> None:
    assert {rule["alert"] for rule in RULES} == FAULTS.keys()
