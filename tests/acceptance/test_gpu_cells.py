"""`%%gpu` in a notebook without a GPU: used twice, and released for another user."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

from tests.acceptance.notebook_container import Notebook
from tests.acceptance.process_output import ProcessOutput
from tests.support.hub.browser import Product, User
from tests.support.product import wait_for

WHERE = "import os\ncount += 1\nprint('cell', count, 'in', os.environ['GPUHUB_NODE'], os.getpid())"


@pytest.fixture(scope="module")
def notebook(product: Product, make_user: Callable[[str], User]) -> Iterator[Notebook]:
    """ada's notebook without a GPU."""
    started = Notebook(product, make_user("ada"), "cpu")
    yield started
    started.stop()


def test_example_runs_to_its_end(notebook: Notebook) -> None:
    """`05-a-gpu-for-one-cell.ipynb` trains in two cells on the same GPU, and gives it back."""
    output = notebook.execute("05-a-gpu-for-one-cell")
    assert re.search(r"the cell runs on rig\d RTX \d+\. Released when others wait", output), output
    assert output.count("the cell runs on") == 1
    assert re.search(r"from \d\.\d{3} to 0\.\d{3}, \d+% right", output), output
    assert "stays on the worker, and is lost when its GPU is released: lock (" in output
    assert "the lock is still there, and the answer is 42" in output
    assert re.search(r"rig\d RTX \d+ is released", output)
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
        output.wait("is released, because others wait for GPUs")
        notebook.write("ben", "")
        output.wait("A GPU is taken again")
        ben.stop()
        text = output.rest()
    assert "RTX 5060 was released, because others wait for GPUs. A GPU is taken again." in text
    places = re.findall(r"cell (\d) in (rig\d) (\d+)", text)
    assert [place[0] for place in places] == ["1", "2", "3"]
    assert places[0][1:] == places[1][1:]
    wait_for(lambda: notebook.user.holders() == {}, "the GPU is free")
