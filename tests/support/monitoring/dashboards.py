"""The Grafana dashboards of docs/monitoring, and the queries of their panels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "docs" / "monitoring" / "grafana"
NAMES = ("closet", "users", "gpu", "job")


def load(name: str) -> dict[str, Any]:
    """Return a dashboard."""
    found: dict[str, Any] = json.loads((FOLDER / "dashboards" / f"{name}.json").read_text(encoding="utf-8"))
    return found


def list_queries(name: str, **variables: str) -> Iterator[tuple[str, str]]:
    """Yield the title of each panel with each of its queries, as Grafana sends them with these variables."""
    values = {"__range": "30m", "__rate_interval": "1m", **variables}
    for panel in load(name)["panels"]:
        for target in panel["targets"]:
            query = target["expr"]
            for variable, value in values.items():
                query = query.replace(f"${variable}", value)
            yield panel["title"], query
