"""What tests of the hub's pages share: jobs, pictures, and the check of accessibility."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from tests.support.hub.simulated_hub import SimulatedHub

ROOT = Path(__file__).parents[3]
PICTURES = Path(os.environ.get("GPUHUB_TEST_PICTURES", ROOT / ".cache" / "pictures"))
AXE = ROOT / "tests" / "support" / "browser" / "node_modules" / "axe-core" / "axe.min.js"


def start_job(hub: SimulatedHub, **asked: Any) -> Any:
    """Submit a detached job of ada's."""
    body = {"run_id": f"run-{uuid.uuid4().hex[:12]}", "detached": True, "name": "train.py", **asked}
    return hub.send("POST", "/jobs", status=201, json=body)


def check_accessibility(page: Page) -> None:
    """Run axe-core on the page; nothing serious may be found."""
    page.add_script_tag(path=str(AXE))
    found = page.evaluate("() => axe.run(document, { resultTypes: ['violations'] })")["violations"]
    serious = [
        (one["id"], one["help"], [node["html"][:300] for node in one["nodes"]][:5])
        for one in found
        if one["impact"] in {"serious", "critical"}
    ]
    assert serious == []


def take_picture(page: Page, name: str) -> None:
    """Keep a picture of the whole page."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
