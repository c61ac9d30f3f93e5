"""The tabs of what ranks display, in a real JupyterLab in Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.support.browser.chromium import chromium
from tests.support.hub.browser import PICTURES
from tests.support.hub.jupyter_lab import TOKEN, JupyterLab, serve_lab, write_notebook
from tests.support.launch.local_cluster import Notebook

pytestmark = pytest.mark.browser
NOTEBOOK = "bars.ipynb"
#: Longest wait for JupyterLab and the start of four ranks, ms.
TIMEOUT_MS = 120_000
CELL = """%%gpu_ranks --nproc-per-node 4
import time
import matplotlib.pyplot as plt
import pandas
from IPython.display import HTML
from tqdm import tqdm
from tqdm.notebook import tqdm as widget_bar
display(HTML(f"<b>training on rank {rank}</b>"))
handle = display(pandas.DataFrame({"step": [0], "loss": [1.0]}), display_id=True)
losses = []
for epoch in widget_bar(range(4), desc="epochs"):
    for step in tqdm(range(10), desc=f"epoch {epoch}", mininterval=0):
        time.sleep(0.12 + 0.02 * rank)
        losses.append(1 / (len(losses) + 1 + rank))
    handle.update(pandas.DataFrame({"step": [len(losses)], "loss": [losses[-1]]}))
plt.figure(figsize=(5, 2))
plt.plot(losses)
plt.title(f"loss of rank {rank}")
plt.show()
print("done")
"""


@pytest.fixture
def lab(notebook: Notebook, tmp_path: Path) -> Iterator[JupyterLab]:
    """The JupyterLab of a notebook with four GPUs."""
    environ = notebook.environment(tuple(f"GPU-{number}" for number in range(4)))
    names = ("GPUHUB_BROKER_URL", "GPUHUB_NETWORK_SUBNET", "GPUHUB_NODE", "GPUHUB_GPU_UUIDS", "JUPYTERHUB_API_TOKEN")
    with serve_lab(tmp_path / "lab", tmp_path, {name: environ[name] for name in names}) as lab:
        write_notebook(lab, NOTEBOOK, CELL)
        yield lab


@pytest.fixture
def page(lab: JupyterLab) -> Iterator[Page]:
    """Its notebook in a browser, which reports no error."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{lab.url}/lab/tree/{NOTEBOOK}?token={TOKEN}")
        page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell", timeout=TIMEOUT_MS)
        expect(page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible(timeout=TIMEOUT_MS)
        yield page
        assert errors == []


def picture(page: Page, name: str) -> None:
    """Save a screenshot for inspection."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png")


def test_bars_of_four_ranks_in_tabs(page: Page) -> None:
    """Bars move in the tab of their rank; a tab that was chosen stays chosen, and afterwards all is there."""
    page.locator(".jp-CodeCell .cm-content").click()
    page.keyboard.press("Control+Enter")
    tabs = page.locator(".gl-tabs > label")
    expect(tabs).to_have_text(["rank 0", "rank 1", "rank 2", "rank 3"], timeout=TIMEOUT_MS)
    tabs.nth(2).click()
    shown = page.locator(".gl-page:visible")
    expect(shown).to_contain_text("training on rank 2")
    expect(shown.get_by_role("meter", name="epoch 1")).to_be_visible(timeout=TIMEOUT_MS)
    picture(page, "rank-tabs-running")
    expect(shown.locator("img")).to_be_visible(timeout=TIMEOUT_MS)
    expect(shown.get_by_role("meter").first).to_have_attribute("aria-valuenow", "100")
    expect(shown).to_contain_text("4/4")
    expect(shown.locator("table")).to_contain_text("40")
    picture(page, "rank-tabs-ended")
    text = page.locator(".jp-OutputArea-output pre")
    lines = re.compile(r"^(\[ranks? [\d, -]+( · rig1)?\] done\n?){1,4}$")
    expect(text).to_have_text([re.compile("gpu_launch: 4 ranks run"), lines], timeout=TIMEOUT_MS)
