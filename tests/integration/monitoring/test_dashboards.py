"""The Grafana dashboards of docs/monitoring: what Grafana and Prometheus refuse is found here."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.monitoring import dashboards

DATASOURCES = dashboards.FOLDER / "provisioning" / "datasources" / "gpuhub.yml"


def test_every_dashboard_is_listed() -> None:
    files = {file.stem for file in (dashboards.FOLDER / "dashboards").iterdir()}
    assert files == set(dashboards.NAMES)
    assert len({dashboards.load(name)["uid"] for name in files}) == len(files)


@pytest.mark.parametrize("name", dashboards.NAMES)
def test_queries_are_valid(name: str, tmp_path: Path) -> None:
    """`promtool` reads each, with the variables replaced as Grafana does."""
    queries = list(dashboards.list_queries(name, UUID="GPU-a", job="j1"))
    assert [query for _, query in queries if "$" in query] == []
    rules = [{"record": f"query:{number}", "expr": query} for number, (_, query) in enumerate(queries)]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": name, "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", file], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", dashboards.NAMES)
def test_panels_read_the_provisioned_source_and_do_not_overlap(name: str) -> None:
    [source] = yaml.safe_load(DATASOURCES.read_text(encoding="utf-8"))["datasources"]
    dashboard = dashboards.load(name)
    panels = dashboard["panels"]
    readers = [*panels, *(target for panel in panels for target in panel["targets"]), *dashboard["templating"]["list"]]
    assert {reader["datasource"]["uid"] for reader in readers} == {source["uid"]}
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    assert [
        (one["title"], other["title"]) for one, other in itertools.combinations(panels, 2) if overlap(one, other)
    ] == []
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    first, second = one["gridPos"], other["gridPos"]
    return all(
        first[start] < second[start] + second[size] and second[start] < first[start] + first[size]
        for start, size in (("x", "w"), ("y", "h"))
    )
