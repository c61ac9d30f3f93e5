"""What ranks display besides text, in a notebook's kernel as JupyterLab runs it, and with ipyparallel's `%%px`."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.launch.lab_kernel import LabKernel
from tests.support.launch.local_cluster import Notebook

TABLE = """
class Table:
    def __init__(self, text): self.text = text
    def _repr_html_(self): return f"<b>{self.text}</b>"
    def __repr__(self): return f"Table({self.text})"
"""


@pytest.fixture
def kernel(notebook: Notebook) -> Iterator[LabKernel]:
    """A kernel of a notebook with one GPU."""
    started = LabKernel(notebook, gpus=("GPU-rig1",))
    yield started
    started.close()


@pytest.fixture
def cpu_kernel(notebook: Notebook) -> Iterator[LabKernel]:
    """A kernel of a notebook without a GPU, which keeps the worker of one cell for the next."""
    notebook.keep_s = 600
    started = LabKernel(notebook, gpus=())
    yield started
    started.close()


def read_tabs(outputs: list[dict[str, Any]]) -> dict[str, str]:
    """Return the pages of the one block of tabs, by label."""
    blocks = [
        output["data"]["text/html"] for output in outputs if "gl-tabs" in output.get("data", {}).get("text/html", "")
    ]
    assert len(blocks) == 1, outputs
    pages = re.findall(
        r'<label[^>]*>(.*?)</label><div class="gl-page">(.*?)</div>(?=<input|</div><script)', blocks[0], re.DOTALL
    )
    return dict(pages)


def test_ranks_display_in_tabs(kernel: LabKernel) -> None:
    """Each rank has a tab with its displays; those of ranks with the same are one, and text stays text."""
    outputs = kernel.run(
        f"%%gpu_launch --nnodes 2\nimport os\nfrom IPython.display import HTML, clear_output, update_display\n{TABLE}\n"
        "rank = os.environ['RANK']\nprint('line of', rank)\ndisplay(Table('gone'))\nclear_output(wait=True)\n"
        "display(Table('equal'))\nhandle = display(Table('first'), display_id=True)\nhandle.update(Table(f'mine {rank}'))"
    )
    item = '<div class="gl-item"><b>{}</b></div>'
    assert read_tabs(outputs) == {f"rank {rank}": item.format("equal") + item.format(f"mine {rank}") for rank in (0, 1)}
    assert any("] line of 1\n" in output.get("text", "") for output in outputs)
    outputs = kernel.run(f"%%gpu_ranks --nnodes 2\n{TABLE}\nTable('both')")
    assert read_tabs(outputs) == {"ranks 0-1": item.format("both")}
    outputs = kernel.run("%%gpu_ranks\nTable(rank) if rank else print('only text')")
    assert read_tabs(outputs) == {"rank 1": item.format(1)}


def test_figures_and_data_frames_of_ranks(kernel: LabKernel) -> None:
    """A figure of matplotlib is a picture and a data frame of pandas a table, in the order of the cell."""
    outputs = kernel.run(
        "%%gpu_ranks --nnodes 2\nimport matplotlib.pyplot as plt, pandas\nplt.plot([0, rank + 1])\nplt.show()\n"
        "pandas.DataFrame({'loss': [rank + 0.5]})"
    )
    pages = read_tabs(outputs)
    assert list(pages) == ["rank 0", "rank 1"]
    pictures = set()
    for rank, page in enumerate(pages.values()):
        picture, table = page.split('<div class="gl-item">')[1:]
        pictures.add(picture)
        encoded = re.match(r'<img [^>]*src="data:image/png;base64,([^"]+)"', picture)
        assert encoded, picture[:200]
        assert base64.b64decode(encoded[1]).startswith(b"\x89PNG")
        assert re.search(rf'class="dataframe">.*<th>loss</th>.*<td>{rank}\.5</td>', table, re.DOTALL), table
    assert len(pictures) == 2, "both ranks show the same picture"


def test_a_single_rank_displays_as_a_notebook_does(cpu_kernel: LabKernel) -> None:
    """In order with its lines; an update finds its display, and a widget leaves its text."""
    cpu_kernel.run("%%gpu\n1;")
    outputs = cpu_kernel.run(
        f"%%gpu\n{TABLE}\nprint('one')\nh = display(Table('first'), display_id='x')\nprint('two')\nh.update(Table('second'))\n"
        "display({'text/plain': 'widget', 'application/vnd.jupyter.widget-view+json': {}}, raw=True)\nTable('last')"
    )
    assert [output.get("text") or output["data"] for output in outputs] == [
        "one\n",
        {"text/html": "<b>second</b>", "text/plain": "Table(second)"},
        "two\n",
        {"text/plain": "widget"},
        {"text/html": "<b>last</b>", "text/plain": "Table(last)"},
    ]
    outputs = cpu_kernel.run("%%gpu\nprint('gone')\nfrom IPython.display import clear_output\nclear_output()\n{'a': 1}")
    assert [output["text"] for output in outputs] == ["{'a': 1}\n"]
    (output,) = cpu_kernel.run("%%gpu\ndisplay({'image/png': 'A' * 9_000_000}, raw=True)")
    assert output["data"] == {"text/plain": "[a display of 9.0 MB is left out: more than 8 MiB]"}


def test_bars_of_a_rank_are_progress(cpu_kernel: LabKernel) -> None:
    """Those for notebooks too, which would need widgets."""
    outputs = cpu_kernel.run(
        "%%gpu\nimport time\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(30), desc='steps', mininterval=0): time.sleep(0.1)"
    )
    shown = [output["data"]["text/html"] for output in outputs if "data" in output]
    assert shown and "gpu-launch" in shown[0]
    assert not any("it/s" in output.get("text", "") for output in outputs)


def test_engines_of_ipyparallel_display_by_themselves(kernel: LabKernel) -> None:
    """`%%px` shows each engine's displays below its name."""
    kernel.run(
        "import ipyparallel as ipp\ncluster = ipp.Cluster(engines='gpuhub', n=2)\n"
        "view = cluster.start_and_connect_sync()[:]\nview.activate()"
    )
    outputs = kernel.run(
        f"%%px --block\n{TABLE}\nfrom IPython.display import display\ndisplay(Table('shown'))\nTable('value')"
    )
    shown = [output["data"] for output in outputs]
    tables = [data["text/html"] for data in shown if "text/html" in data]
    assert sorted(tables) == ["<b>shown</b>"] * 2 + ["<b>value</b>"] * 2
    assert {data["text/plain"] for data in shown} > {"[output:0]", "[output:1]"}
    kernel.run("cluster.stop_cluster_sync()")
