"""What the magics read of the notebook: its environment, its cells and its variables."""

from __future__ import annotations

import difflib
import linecache
import os
from collections.abc import Callable, Mapping
from typing import Any

from IPython import get_ipython

from gpu_launch.common import exchange
from gpu_launch.errors import UsageError
from gpu_launch.launch import request

#: The environment when the extension was loaded: the user has set what differs later, for the ranks too.
BEFORE = dict(os.environ)


def labels(shell: Any) -> Callable[[str], str | None]:
    """Return what names a cell by its code's file name, such as `Cell In[7]`; None for other code."""

    def label(filename: str) -> str | None:
        found = shell.compile.format_code_name(filename)
        return None if found is None else " ".join(found)

    return label


def labels_here() -> Callable[[str], str | None]:
    """Return the same for this process: a notebook, or a plain script, which has no cells."""
    shell = get_ipython()
    return (lambda filename: None) if shell is None else labels(shell)


def cell_text(shell: Any, line: str, cell: str) -> exchange.CellSource:
    """Return the running cell as the notebook shows it."""
    inputs = shell.history_manager.input_hist_raw if shell.history_manager is not None else [""]
    # Versions of IPython count up before a cell runs or after it: the place among the inputs is the number shown.
    shown, number, body = inputs[-1], len(inputs) - 1, cell.rstrip("\n")
    if not body or not shown.rstrip("\n").endswith(body):
        # A program ran it, without adding it to the inputs.
        shown, number = f"%%gpu_launch {line}\n{cell}", shell.execution_count
    before = shown.rstrip("\n").removesuffix(body)
    return exchange.CellSource(label=f"Cell In[{number}]", source=shown, skipped=before.count("\n"))


def check_syntax(cell: str, text: exchange.CellSource) -> None:
    """Refuse a cell that is not Python before any GPU is requested."""
    lines = text.source.splitlines(keepends=True)
    linecache.cache[text.label] = (len(text.source), None, lines, text.label)
    request.check_syntax("\n" * text.skipped + cell, text.label, shown=text.label)


def variables(names: tuple[str, ...], namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notebook's variables of these names.

    Raises:
        UsageError: for a name that the notebook does not have, with one that is close.
    """
    for name in exchange.find_missing(names, namespace):
        close = difflib.get_close_matches(name, [other for other in namespace if not other.startswith("_")], n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UsageError(f"--send {name}: the notebook has no variable {name}.{hint}")
    return {name: namespace[name] for name in names}
