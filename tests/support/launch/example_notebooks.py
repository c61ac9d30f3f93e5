"""Notebooks of `notebooks/`, executed by a kernel of this machine whose launches run on the test's broker."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.launch.local_cluster import Notebook

_FOLDER = Path(__file__).parents[3] / "notebooks"
_WRITES = re.compile(r"%%writefile (\S+)\n")


def read_cells(name: str) -> list[str]:
    """Return the code cells of a notebook."""
    cells: list[dict[str, Any]] = json.loads((_FOLDER / name).read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def write_scripts(name: str, folder: Path) -> list[Path]:
    """Write the scripts that a notebook writes, and return their paths."""
    written = []
    for cell in read_cells(name):
        if match := _WRITES.match(cell):
            path = folder / Path(match[1]).name
            path.write_text(cell[match.end() :] + "\n", encoding="utf-8")
            written.append(path)
    return written


def execute(notebook: Notebook, name: str, *, limit_s: float, changes: Mapping[str, str] | None = None) -> str:
    """Run all cells of a notebook in one kernel, and return their output; a failing cell fails the test.

    Args:
        notebook: The home, and the broker of its launches.
        name: The notebook's file.
        limit_s: The longest time that it may take.
        changes: Lines of the cells that are replaced, such as a number of nodes.
    """
    text = "\0".join(read_cells(name))
    for line, other in (changes or {}).items():
        assert text.count(f"\n{line}") == 1, line
        text = text.replace(f"\n{line}", f"\n{other}")
    (notebook.home / "cells.json").write_text(json.dumps(text.split("\0")), encoding="utf-8")
    notebook.keep_s = int(limit_s)
    code, out, err = notebook.run(
        """
        import json, os
        os.environ["MPLBACKEND"] = "agg"
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "gpu_launch")
        for cell in json.load(open("cells.json")):
            done = shell.run_cell(cell, store_history=True)
            if not done.success:
                raise SystemExit(f"this cell failed: {cell[:300]}")
        """,
        limit_s=limit_s,
    )
    assert code == 0, out[-6000:] + err[-4000:]
    return out
