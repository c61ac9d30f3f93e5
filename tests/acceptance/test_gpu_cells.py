"""`%%gpu` in a notebook without a GPU: used twice, given back for another user, with what ranks display in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import expect

from tests.acceptance.notebook_container import Notebook
from tests.acceptance.process_output import ProcessOutput
from tests.support.hub.browser import Product, User
from tests.support.product import wait_for

WHERE = "import os\ncount += 1\nprint('cell', count, 'in', os.environ['GPUHUB_NODE'], os.getpid())"
DISPLAYING = """
    import json
    cells = [
        "%%gpu --model 'RTX 5070'\\nimport matplotlib.pyplot as plt\\nprint('above')\\n_ = plt.plot([1, 3, 2])\\nplt.show()\\n"
        "print('below')",
        "%%gpu_launch --nnodes 2\\nimport os\\nimport matplotlib.pyplot as plt\\nfrom IPython.display import HTML, display\\n"
        "rank = int(os.environ['RANK'])\\nprint('line of a rank')\\n"
        "plt.figure(figsize=(4, 2)); plt.plot([1, 2 + rank, 3]); plt.title(f'rank {rank}'); plt.show()\\n"
        "display(HTML(f'<table><tr><th>rank</th></tr><tr><td>{rank}</td></tr></table>'))",
        "%%gpu_launch --nnodes 2\\nfrom IPython.display import HTML, display\\ndisplay(HTML('<b>the same on all</b>'))\\n"
        "import matplotlib.pyplot as plt\\nplt.figure(figsize=(4, 2)); plt.plot([3, 1, 2]); plt.show()",
    ]
    code = [dict(cell_type="code", execution_count=None, id=f"c{i}", metadata={}, outputs=[], source=text)
            for i, text in enumerate(cells)]
    kernel = dict(display_name="Python 3 (ipykernel)", language="python", name="python3")
    notebook = dict(cells=code, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)
    open("displays.ipynb", "w").write(json.dumps(notebook))
"""


@pytest.fixture(scope="module")
def notebook(product: Product, make_user: Callable[[str], User]) -> Iterator[Notebook]:
    """ada's notebook without a GPU."""
    started = Notebook(product, make_user("ada"), "cpu")
    yield started
    started.stop()


def test_example_runs_to_its_end(notebook: Notebook) -> None:
    """`05-a-gpu-for-one-cell.ipynb` trains in two cells on the same GPU, and gives it back."""
    output = notebook.execute("05-a-gpu-for-one-cell")
    assert re.search(r"the cell runs on rig\d RTX \d+\. Given back when others wait", output), output
    assert output.count("the cell runs on") == 1
    assert re.search(r"from \d\.\d{3} to 0\.\d{3}, \d+% right", output), output
    assert "stays on the worker, for the next %%gpu cell: lock (" in output
    assert "the lock is still there, and the answer is 42" in output
    assert re.search(r"rig\d RTX \d+ is given back", output)
    wait_for(lambda: notebook.user.holders() == {}, "the GPU is free")


def test_gpu_goes_to_another_user_and_is_taken_again(
    product: Product, make_user: Callable[[str], User], notebook: Notebook
) -> None:
    """Two cells use one worker; ben waits for that GPU and gets it; ada's next cell says so and takes it after him."""
    with notebook.start_cells(
        "count = 0",
        f"%%gpu --model 'RTX 5060'\n{WHERE}",
        f"%%gpu\n{WHERE}",
        "import time, pathlib\nwhile not pathlib.Path('ben').exists(): time.sleep(0.2)",
        f"%%gpu\n{WHERE}",
        "%gpu --stop",
    ) as process:
        output = ProcessOutput(process)
        output.wait("cell 2 in")
        assert notebook.user.holders() == {"RTX 5060": "ada"}
        ben = Notebook(product, make_user("ben"), "rtx5060")
        assert ben.user.holders() == {"RTX 5060": "ben"}
        output.wait("is given back, because others wait for GPUs")
        notebook.write("ben", "")
        output.wait("A GPU is taken again")
        ben.stop()
        text = output.rest()
    assert "RTX 5060 was given back, because others wait for GPUs. A GPU is taken again." in text
    places = re.findall(r"cell (\d) in (rig\d) (\d+)", text)
    assert [place[0] for place in places] == ["1", "2", "3"]
    assert places[0][1:] == places[1][1:]
    wait_for(lambda: notebook.user.holders() == {}, "the GPU is free")


def test_displays_are_shown_in_jupyterlab(notebook: Notebook) -> None:
    """A single rank's plot is between its lines; two ranks have a tab each, or one where they show the same."""
    notebook.run(DISPLAYING)
    page = notebook.user.page
    # JupyterLab renders only the cells that are in view.
    page.set_viewport_size({"width": 1280, "height": 2400})
    page.goto(f"{notebook.user.address}/user/{notebook.user.name}/lab/tree/displays.ipynb")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
    wait_for(lambda: notebook.user.fetch("/user/ada/api/kernels"), "a kernel for the notebook", deadline_s=60)
    page.click("text=Run >> nth=0")
    page.click("text=Run All Cells >> nth=0")
    cells = page.locator(".jp-CodeCell")
    last = cells.nth(2).locator(".gl-tabs")
    expect(last.locator("img")).to_have_count(1, timeout=120_000)
    expect(last.locator("label")).to_have_text(["ranks 0-1"], timeout=30_000)
    parts = cells.nth(0).locator(".jp-OutputArea-child")
    shown = ["plot" if part.locator("img").count() else part.inner_text().strip() for part in parts.all()]
    assert shown[-3:] == ["above", "plot", "below"]
    tabs = cells.nth(1).locator(".gl-tabs")
    assert tabs.locator("label").all_inner_texts() == ["rank 0", "rank 1"]
    assert tabs.locator("img").count() == 2
    tabs.locator("label").nth(1).click()
    assert tabs.locator(".gl-page").nth(1).is_visible()
    assert not tabs.locator(".gl-page").nth(0).is_visible()
    assert "line of a rank" in cells.nth(1).inner_text()
    notebook.user.picture("displays")
    assert not notebook.user.errors
