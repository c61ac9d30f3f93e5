"""What ranks display besides text, in a notebook's kernel as JupyterLab runs it, and with ipyparallel's `%%px`."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.launch.example_notebooks import read_cells
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


def test_example_shows_plots_and_bars_of_every_rank(kernel: LabKernel) -> None:
    """`03-rank-sessions.ipynb`, whose ranks draw different points."""
    shown = {}
    for cell in read_cells("03-rank-sessions.ipynb"):
        outputs = kernel.run(cell)
        if "tqdm" in cell:
            shown = read_tabs(outputs)
    assert list(shown) == ["rank 0", "rank 1"]
    assert all("41/41" in page and "width:100.0%" in page and "image/png" in page for page in shown.values()), shown


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


def test_bars_of_a_single_rank(cpu_kernel: LabKernel) -> None:
    """Those that are drawn as text are progress; those for notebooks are displays, which are updated in place."""
    outputs = cpu_kernel.run(
        "%%gpu\nimport time\nfrom tqdm.auto import tqdm\nfor _ in tqdm(range(30), desc='steps', mininterval=0): time.sleep(0.1)"
    )
    shown = [output["data"]["text/html"] for output in outputs if "data" in output]
    assert shown and "gpu-launch" in shown[0]
    assert not any("it/s" in output.get("text", "") for output in outputs)
    outputs = cpu_kernel.run(
        "%%gpu\nfrom tqdm.notebook import tqdm\nfor _ in tqdm(range(30), desc='steps'): pass\n"
        "for _ in tqdm(range(3), leave=False): pass\nprint('end')"
    )
    data = [output["data"] for output in outputs if "data" in output]
    (bar, closed) = [shown for shown in data if "gpu-launch" not in shown["text/html"]]
    assert "width:100.0%" in bar["text/html"] and bar["text/plain"].startswith("steps: 100% 30/30 ["), bar
    assert closed == {"text/html": "", "text/plain": ""}


def test_bars_of_ranks_are_in_their_tabs(kernel: LabKernel) -> None:
    """One of tqdm as text, one of tqdm and one of ipywidgets as widgets, with a table; equal ranks share the tab."""
    script = (
        f"import os, sys, time\nimport ipywidgets\nfrom tqdm import tqdm\nfrom tqdm.notebook import tqdm as widgets\n{TABLE}\n"
        "rank = int(os.environ['RANK'])\n"
        "for _ in tqdm(range(20 + rank), desc='text', mininterval=0): time.sleep(0.05)\n"
        "for _ in widgets(range(5), desc='bar'): pass\n"
        "bar = ipywidgets.FloatProgress(max=1000, description='own')\ndisplay(ipywidgets.VBox([bar, ipywidgets.Label('state')]))\n"
        "for step in range(500 + rank): bar.value = step\n"
        "display(Table('table'))\nprint('line')"
    )
    outputs = kernel.run(f"%%gpu_launch --nnodes 2\n{script}")
    pages = read_tabs(outputs)
    assert list(pages) == ["rank 0", "rank 1"]
    for rank, page in enumerate(pages.values()):
        assert f"{20 + rank} of {20 + rank} (100 %)" in page
        assert re.search(r"bar:\s100%.*width:100\.0%.*5/5\s\[", page, re.DOTALL), page
        assert f"width:{(499 + rank) / 10}%" in page and "<span>state</span>" in page and "<b>table</b>" in page
        assert [page.index(text) for text in ("text", "bar:", "own", "table")] == sorted(
            page.index(text) for text in ("text", "bar:", "own", "table")
        )
    assert not any("it/s" in output.get("text", "") for output in outputs)
    assert any("line" in output.get("text", "") for output in outputs)
    outputs = kernel.run(
        "%%gpu_ranks --nnodes 2\nimport time\nfrom tqdm import trange\nfor _ in trange(30, mininterval=0): time.sleep(0.02 + rank / 100)"
    )
    assert list(read_tabs(outputs)) == ["ranks 0-1"]


def test_a_burst_of_displays_is_bounded(kernel: LabKernel) -> None:
    """A rank that updates a display as fast as it can is shown with its last state, and little is sent."""
    updates = []
    kernel.observe = lambda message: updates.append(message["msg_type"] == "update_display_data")
    outputs = kernel.run(
        f"%%gpu_ranks --nnodes 2\n{TABLE}\nimport time\nend = time.monotonic() + 2\nhandle = display(Table('first'), display_id=True)\n"
        "number = 0\nwhile time.monotonic() < end:\n    number += 1\n    handle.update(Table(str(number)))\n"
        "handle.update(Table('last'))\ndisplay({'image/png': 'A' * 50_000_000}, raw=True)\nassert number > 1000"
    )
    ((label, page),) = read_tabs(outputs).items()
    assert (label, "<b>last</b>" in page, "a display of 50.0 MB is left out" in page) == ("ranks 0-1", True, True)
    assert sum(updates) < 60


@pytest.fixture
def px_kernel(kernel: LabKernel) -> Iterator[LabKernel]:
    """A kernel with a cluster of two engines."""
    kernel.run(
        "import ipyparallel as ipp\ncluster = ipp.Cluster(engines='gpuhub', n=2)\n"
        "view = cluster.start_and_connect_sync()[:]\nview.activate()"
    )
    yield kernel
    kernel.run("cluster.stop_cluster_sync()")


def texts_of(outputs: list[dict[str, Any]]) -> list[str]:
    """Return what is shown besides tabs."""
    shown = (output.get("data", {}).get("text/plain", output.get("text", "")) for output in outputs)
    return [text for text in shown if "display" not in text and text.strip()]


def test_engines_of_ipyparallel_display_in_tabs(px_kernel: LabKernel) -> None:
    """`%%px` shows displays, bars and widgets as `%%gpu_ranks` does, and text as ever."""
    outputs = px_kernel.run(
        f"%%px --block --progress-after -1\n{TABLE}\nimport os, sys, time\nimport ipywidgets\nfrom IPython.display import clear_output, display\n"
        "from tqdm import tqdm\nfrom tqdm.notebook import tqdm as widgets\n"
        "display(Table('gone'))\nclear_output(wait=True)\nhandle = display(Table('first'), display_id=True)\n"
        "for _ in widgets(range(5), desc='bar'):\n"
        "    for _ in tqdm(range(20), desc='text', mininterval=0): time.sleep(0.01)\nbar = ipywidgets.FloatProgress(max=1000)\ndisplay(bar)\n"
        "for step in range(1001): bar.value = step\n"
        "handle.update(Table('second'))\nprint('line')\nprint('error', file=sys.stderr)\nTable('value')"
    )
    assert list(read_tabs(outputs)) == ["engines 0-1"], outputs
    (page,) = read_tabs(outputs).values()
    assert re.search(r"20 of 20.*<b>second</b>.*bar:\s100%.*width:100\.0%.*<b>value</b>", page, re.DOTALL), page
    assert "gone" not in page
    texts = texts_of(outputs)
    assert sorted(texts) == sorted(
        text for engine in (0, 1) for text in (f"[stdout:{engine}] line\n", f"[stderr:{engine}] error\n")
    )


def test_options_of_px_stay(px_kernel: LabKernel) -> None:
    """Results that are shown later have tabs too, other groups and single values have ipyparallel's form."""
    rank = "import os\nrank = int(os.environ['GPUHUB_NODE'][-1])\n"
    outputs = px_kernel.run(f"%%px --noblock -o kept\n{TABLE}{rank}display(Table(rank))\nprint('line')\nTable('value')")
    assert not any("gl-tabs" in output.get("data", {}).get("text/html", "") for output in outputs)
    outputs = px_kernel.run("kept.get()\nkept.display_outputs()")
    assert len(read_tabs(outputs)) == 2
    assert "[stdout:0] \nline\n" in "".join(texts_of(outputs))
    outputs = px_kernel.run("print([output['data']['text/html'] for outputs in kept.outputs for output in outputs])")
    assert re.fullmatch(r"\['<b>\d</b>', '<b>\d</b>'\]\n", outputs[0]["text"])
    outputs = px_kernel.run("kept.display_outputs(groupby='engine')")
    shown = [output["data"] for output in outputs if "data" in output]
    assert sorted(data["text/html"] for data in shown if "text/html" in data)[2:] == ["<b>value</b>"] * 2
    assert {data["text/plain"] for data in shown} > {"[output:0]", "[output:1]"}
    outputs = px_kernel.run("%%px --block --no-stream\ndisplay(Table('late'))")
    assert read_tabs(outputs) == {"engines 0-1": '<div class="gl-item"><b>late</b></div>'}
    outputs = px_kernel.run("%%px --block\n6 * 7")
    assert ["42" in text for text in texts_of(outputs)] == [True, True]


def test_a_burst_of_an_engine_is_bounded(px_kernel: LabKernel) -> None:
    """Updates of a display and of a widget as fast as an engine can."""
    updates = []
    px_kernel.observe = lambda message: updates.append(message["msg_type"] in ("update_display_data", "comm_msg"))
    outputs = px_kernel.run(
        f"%%px --block\n{TABLE}\nimport time, ipywidgets\nfrom IPython.display import display\nhandle = display(Table('first'), display_id=True)\n"
        "label = ipywidgets.Label()\ndisplay(label)\nfor number in range(1001):\n    handle.update(Table(number))\n    label.value = str(number)\n"
        "display({'image/png': 'A' * 20_000_000}, raw=True)"
    )
    (page,) = read_tabs(outputs).values()
    assert "<b>1000</b>" in page and "<span>1000</span>" in page and "a display of" in page, page
    assert sum(updates) < 60
