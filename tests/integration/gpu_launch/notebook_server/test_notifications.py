"""Notifications in a real JupyterLab, in Chromium, from a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from tests.support.broker.process import Served, serving
from tests.support.browser.chromium import chromium
from tests.support.docker.simulated_nodes import wait_until
from tests.support.hub.browser import PICTURES
from tests.support.hub.jupyter_lab import TOKEN, build_extension, serve_lab

TIMEOUT_MS = 90_000
TOAST = ".Toastify__toast"


def run_job(served: Served, run_id: str) -> None:
    """Run a detached job of ada and stop it."""
    headers = {"Authorization": "token ada"}
    with httpx.Client(base_url=served.url, headers=headers, trust_env=False, timeout=60) as client:
        answer = client.post("/jobs", json={"run_id": run_id, "detached": True})
        job = answer.json()["id"]
        client.delete(f"/jobs/{job}")
        wait_until(lambda: client.get(f"/jobs/{job}").json()["state"] == "ended", "the job has ended")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, nodes=1, gpus=2) as broker:
        run_job(broker, "run-before")
        yield broker


@pytest.fixture
def lab(served: Served, tmp_path: Path) -> Iterator[str]:
    """The address of ada's JupyterLab, with the image's extensions."""
    environ = {
        "GPUHUB_BROKER_URL": served.url.removesuffix("/api/v1"),
        "JUPYTERHUB_API_TOKEN": "ada",
        "GPUHUB_LEASE": "l0",
    }
    with serve_lab(tmp_path / "lab", build_extension(tmp_path / "extension"), environ) as lab:
        wait_until(lambda: lab.request("GET", "/gpuhub/notifications").is_success, "the notifications are there", 60)
        yield lab.url


def test_what_happens_while_a_notebook_is_open_is_shown_once(served: Served, lab: str) -> None:
    """Not what happened before, and not again after a reload of the page."""
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{lab}/lab?token={TOKEN}")
        page.wait_for_selector(".jp-LauncherCard", timeout=TIMEOUT_MS)
        run_job(served, "run-open")
        toast = page.locator(TOAST, has_text="run-open")
        expect(toast).to_contain_text("Job run-open has ended.", timeout=TIMEOUT_MS)
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=PICTURES / "notifications-lab.png")
        assert page.locator(TOAST, has_text="run-before").count() == 0
        page.reload()
        page.wait_for_selector(".jp-LauncherCard", timeout=TIMEOUT_MS)
        run_job(served, "run-later")
        expect(page.locator(TOAST, has_text="run-later")).to_be_visible(timeout=TIMEOUT_MS)
        assert page.locator(TOAST, has_text="run-open").count() == 0
        browser.close()
