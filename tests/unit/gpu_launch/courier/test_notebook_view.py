"""The view of a saved notebook: what is opened, and what is rendered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_launch.courier import notebook_page, notebook_view
from gpu_launch.courier.protocol import BEGIN, HEADER, CourierError


def save(home: Path, path: str, *cells: Any) -> Path:
    file = home / path
    file.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=list(cells)), file)
    return file


def refuse(home: Path, path: str) -> CourierError:
    with pytest.raises(CourierError) as caught, notebook_view.open_notebook(home, path):
        pass
    return caught.value


def render(home: Path, path: str) -> str:
    with notebook_view.open_notebook(home, path) as file:
        return notebook_view.render(file, path).decode()


@pytest.mark.process
def test_notebook_becomes_one_page(tmp_path: Path) -> None:
    """Cells and outputs are in it; it names no file of another server."""
    output = nbformat.v4.new_output("stream", text="loss 4.2\n")
    file = save(
        tmp_path,
        "work/train.ipynb",
        nbformat.v4.new_markdown_cell("# Results"),
        nbformat.v4.new_code_cell("train()", outputs=[output]),
    )
    with notebook_view.open_notebook(tmp_path, "work/train.ipynb") as opened:
        found = notebook_view.describe(opened)
    assert found == {"saved_ms": file.stat().st_mtime_ns // 1_000_000, "bytes": file.stat().st_size}
    page = render(tmp_path, "work/train.ipynb")
    assert page.startswith("<!DOCTYPE html>")
    assert ">Results<" in page
    assert "loss 4.2" in page
    assert "<title>train</title>" in page
    assert [word for word in ('src="http', "cdnjs", "unpkg") if word in page] == []


@pytest.mark.parametrize(
    ("path", "code", "text"),
    [
        ("missing.ipynb", "not-found", "there is no 'missing.ipynb' in the home"),
        ("missing/x.ipynb", "not-found", "there is no"),
        ("../x.ipynb", "invalid", "not below the home"),
        ("a/../../x.ipynb", "invalid", "not below the home"),
        ("/etc/x.ipynb", "invalid", "not below the home"),
        ("a\0.ipynb", "invalid", "not below the home"),
        ("", "invalid", "not below the home"),
        (".ssh/id_ed25519", "invalid", "must end with .ipynb"),
        ("folder.ipynb", "invalid", "no regular file"),
        ("pipe.ipynb", "invalid", "no regular file"),
        ("link.ipynb", "invalid", "without following a symbolic link"),
        ("linked/x.ipynb", "invalid", "without following a symbolic link"),
    ],
)
def test_only_regular_notebooks_of_the_home_are_opened(tmp_path: Path, path: str, code: str, text: str) -> None:
    """No link is followed, also none of a folder, and a pipe does not block."""
    home = tmp_path / "home"
    (home / "folder.ipynb").mkdir(parents=True)
    os.mkfifo(home / "pipe.ipynb")
    (tmp_path / "x.ipynb").write_text("{}")
    (home / "link.ipynb").symlink_to(tmp_path / "x.ipynb")
    (home / "linked").symlink_to(tmp_path)
    refusal = refuse(home, path)
    assert (refusal.code, text in str(refusal)) == (code, True), refusal


def test_large_notebook_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_view, "MAX_BYTES", 2**20)
    (tmp_path / "x.ipynb").write_bytes(bytes(2**20 + 1))
    refusal = refuse(tmp_path, "x.ipynb")
    assert refusal.code == "too-large"
    assert "the most that is shown is 1 MiB: clear outputs" in str(refusal)


@pytest.mark.process
@pytest.mark.parametrize(
    ("content", "text"), [("{", "x.ipynb is no notebook of Jupyter: NotJSONError"), ("{}", "x.ipynb")]
)
def test_other_files_are_refused(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "x.ipynb").write_text(content)
    with pytest.raises(CourierError, match=text) as caught:
        render(tmp_path, "x.ipynb")
    assert caught.value.code == "invalid"


@pytest.mark.process
@pytest.mark.parametrize("limit", ["MAX_CPU_S = 1", "MAX_MEMORY = 2 ** 27"])
def test_costly_notebook_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Nested markup takes a processor's time, and long outputs memory."""
    large = nbformat.v4.new_output("stream", text="x" * 2**23)
    cells = (
        [nbformat.v4.new_markdown_cell("> " * 200 + "[" * 20_000) for _ in range(20)]
        if "CPU" in limit
        else [nbformat.v4.new_code_cell("1", outputs=[large, large])]
    )
    save(tmp_path, "x.ipynb", *cells)
    program = tmp_path / "page.py"
    program.write_text(
        f"import sys\nfrom gpu_launch.courier import notebook_page as page\npage.{limit}\nsys.exit(page.main())\n"
    )
    started = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        return started([command[0], str(program), *command[3:]], **options)

    monkeypatch.setattr(notebook_view.subprocess, "run", run)
    with pytest.raises(CourierError, match="takes too much time or memory to be shown") as caught:
        render(tmp_path, "x.ipynb")
    assert caught.value.code == "too-large"


@pytest.mark.process
def test_rendering_ends_with_its_courier(tmp_path: Path) -> None:
    """A viewer who has gone leaves no process behind that uses the owner's processor and memory."""
    large = nbformat.v4.new_output("stream", text="text\n" * 2**19)
    save(tmp_path, "x.ipynb", nbformat.v4.new_code_cell("1", outputs=[large]))
    courier = subprocess.Popen(
        [sys.executable, "-m", "gpu_launch.courier", "notebook", "--", "x.ipynb"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(tmp_path)},
    )
    with courier:
        assert courier.stdin is not None
        courier.stdin.write(HEADER.pack(BEGIN, 0))
        courier.stdin.flush()
        renderers: list[psutil.Process] = []
        while not renderers:
            assert courier.poll() is None
            renderers = [one for one in psutil.Process(courier.pid).children() if one.memory_info().rss > 60 * 2**20]
            time.sleep(0.02)
        courier.stdin.close()
    assert psutil.wait_procs(renderers, timeout=5)[1] == []


def _notebook(cell: Any) -> str:
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]})


#: Also outputs of types that Jupyter does not have, and cells without what they need.
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
CELLS = st.fixed_dictionaries(
    {"cell_type": st.sampled_from(["code", "markdown", "raw", "x"]), "metadata": JSON_VALUES, "source": JSON_VALUES},
    optional={"outputs": st.lists(JSON_VALUES, max_size=2), "execution_count": JSON_VALUES, "attachments": JSON_VALUES},
)


@settings(max_examples=60)
@given(content=st.text(max_size=50) | JSON_VALUES.map(json.dumps) | CELLS.map(_notebook))
def test_any_content_is_rendered_or_refused(content: str) -> None:
    """No other error leaves the function."""
    try:
        page = notebook_page.render(content, "x")
    except notebook_page.NotShown as refusal:
        assert str(refusal).startswith(("is no notebook of Jupyter: ", "cannot be shown: "))
    else:
        assert page.startswith("<!DOCTYPE html>")
