"""The program that renders a notebook from its input as one page of HTML, with limits of time and memory.

It ends with `REFUSED` and a line about the reason where the input is no notebook.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import warnings
from typing import Any

#: Time of a processor and memory that rendering may take: seconds, bytes. The courier's container has 512 MiB.
MAX_CPU_S, MAX_MEMORY = 25, 400 * 1024**2
_PR_SET_PDEATHSIG = 1
REFUSED = 3


class NotShown(Exception):
    """The text cannot be rendered."""


def render(text: str, name: str) -> str:
    """Render the content of a notebook's file as one HTML page that needs no other file; `name` is its title.

    Raises:
        NotShown: It is no notebook.
        MemoryError: It is too large.
    """
    import nbformat
    from jinja2 import TemplateError
    from nbconvert import HTMLExporter

    exporter: Any = HTMLExporter(template_name="lab")  # type: ignore[no-untyped-call] # nbconvert has no types
    # Scripts of other servers, which the page could not load.
    for name_of_url in (
        "mathjax_url",
        "mermaid_js_url",
        "mermaid_layout_elk_js_url",
        "jquery_url",
        "require_js_url",
        "jupyter_widgets_base_url",
    ):
        setattr(exporter, name_of_url, "")
    try:
        # nbformat warns of cells without the id that its version 4.5 asks for, and adds it.
        with warnings.catch_warnings(action="ignore"):
            notebook: Any = nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call] # nbformat has no types
            nbformat.validate(notebook)
            html, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": name}})
    except (nbformat.ValidationError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise NotShown(f"is no notebook of Jupyter: {_describe(error)}") from None
    except TemplateError as error:
        raise NotShown(f"cannot be shown: {_describe(error)}") from None
    return str(html)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def main() -> int:
    """Render standard input to standard output; the arguments are the title and the id of the parent process."""
    # A courier whose viewer has gone ends at once, and rendering with it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        return 1
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    try:
        page = render(sys.stdin.buffer.read().decode(errors="replace"), sys.argv[1])
    except NotShown as refusal:
        sys.stderr.write(f"{refusal}\n")
        return REFUSED
    sys.stdout.buffer.write(page.encode(errors="replace"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
