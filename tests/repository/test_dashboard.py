"""Grafana can import deploy/grafana/octavo.json, and every metric that it queries exists."""

import json
import re
from itertools import combinations
from typing import Any

from tests.support.deploy.metric_families import (
    metric_names,
    router_registry,
    scheduler_registry,
    series,
    worker_registry,
)
from tests.support.repository import ROOT

DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/octavo.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def expressions() -> list[str]:
    return [target["expr"] for panel in GRAPHS for target in panel["targets"]]


def test_every_metric_is_exposed():
    known = series(router_registry("octavo")) | series(scheduler_registry("octavo")) | series(worker_registry())
    asked = {name for expression in expressions() for name in metric_names(expression)}
    assert len(asked) > 25
    assert not asked - known


def test_names_are_found_in_expressions():
    """Otherwise the check above might pass because it finds nothing."""
    expression = (
        'histogram_quantile(0.9, sum by (le) (rate(a_bucket{instance=~"$i"}[5m]))) / b_total and on (instance) c'
    )
    assert metric_names(expression) == {"a_bucket", "b_total", "c"}


def test_grafana_can_import_it():
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["title"] == "Octavo"
    assert "id" not in DASHBOARD, "an id belongs to one Grafana instance"
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    for panel in GRAPHS:
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"] == DATASOURCE
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        assert all(target["datasource"] == DATASOURCE for target in panel["targets"])
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used <= variables.keys() | {"__rate_interval", "__all"}


def test_panels_lie_on_the_grid_beside_each_other():
    places = [panel["gridPos"] for panel in PANELS]
    for place in places:
        assert place["w"] > 0
        assert place["h"] > 0
        assert 0 <= place["x"] <= 24 - place["w"]
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (a, b)
