"""Lets a rank display plots, tables and HTML as a notebook's kernel does: they go to its file of displays.

Nothing is imported before the script itself imports IPython, or matplotlib draws.
"""

from __future__ import annotations

import builtins
import fcntl
import importlib.util
import os
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from gpu_launch.common import displays
from gpu_launch.common.displays import Display, DisplayKind
from gpu_launch.worker.rank_widgets import RankWidgets, flush_output

_BACKEND = "module://matplotlib_inline.backend_inline"
#: Methods by which an object displays more than text.
_RICH_METHODS = ("_repr_html_", "_repr_mimebundle_", "_repr_png_", "_repr_svg_", "_repr_jpeg_", "_repr_latex_",
                 "_repr_markdown_", "_repr_json_", "_ipython_display_")  # fmt: skip


class DisplayWriter:
    """Appends to this rank's file."""

    def __init__(self, path: str) -> None:
        self._path = path
        #: Displays that this process has written.
        self.count = 0

    def write(self, display: Display) -> None:
        """Append a display; one that JSON cannot hold is left out, and so are all when the file cannot be written."""
        try:
            line = displays.dump_display(display)
        except (TypeError, ValueError):
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            # The launch is over.
            return
        try:
            # The agent empties the file when it has read everything.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            return
        finally:
            os.close(descriptor)
        self.count += 1


class _RankDisplays:
    """The displays of this process."""

    def __init__(self) -> None:
        self.writer: DisplayWriter | None = None
        self.shell: Any = None
        #: Figures that are open at the end of a cell are displayed.
        self.runs_cells = False
        self.widgets = RankWidgets(self.write)

    def write(self, display: Display) -> None:
        if self.writer is not None:
            self.writer.write(display)


_state = _RankDisplays()


def install(*, is_cell: bool) -> None:
    """Send what this process displays to the notebook, if the launch is shown in one; `is_cell` if it runs a cell."""
    if is_cell:
        expect_cells()
    path = os.environ.get(displays.VARIABLE, "").replace("{rank}", os.environ.get("RANK", "0"))
    if not path or importlib.util.find_spec("IPython") is None:
        return
    _state.writer = DisplayWriter(path)
    builtins.display = _display  # type: ignore[attr-defined]
    if importlib.util.find_spec("matplotlib_inline") is not None and "MPLBACKEND" not in os.environ:
        os.environ["MPLBACKEND"] = _BACKEND
        if (matplotlib := sys.modules.get("matplotlib")) is not None:
            matplotlib.rcParams["backend"] = _BACKEND
    if "comm" in sys.modules:
        _state.widgets.follow(sys.modules["comm"])
    sys.meta_path.insert(0, _ImportWatch(_WATCHED))


def expect_cells() -> None:
    """Note that this process runs cells, each of which ends with `end_cell` and may use `display`."""
    _state.runs_cells = True
    # With a writer it is there, and the watch would take the search for an import.
    if _state.writer is None and importlib.util.find_spec("IPython") is not None:
        builtins.display = _display  # type: ignore[attr-defined]


def count_displays() -> int:
    """Return how many displays this process has written."""
    return 0 if _state.writer is None else _state.writer.count


def end_cell() -> None:
    """Display the figures that a cell has left open, as a notebook does at its end."""
    if _state.shell is not None:
        _state.shell.events.trigger("post_execute")


def show_value(value: Any) -> bool:
    """Display the value of a cell's last line; return False for one that is only text, which is left to the caller."""
    is_figure = "matplotlib.figure" in sys.modules and isinstance(value, sys.modules["matplotlib.figure"].Figure)
    if _state.writer is None or not (is_figure or any(hasattr(type(value), name) for name in _RICH_METHODS)):
        return False
    shell = _find_shell()
    data, metadata = shell.display_formatter.format(value)
    if data.keys() <= {"text/plain"} and data:
        return False
    if data:
        shell.display_pub.publish(data, metadata)
    return True


def _display(*objects: Any, **options: Any) -> Any:
    """Display objects, as in a notebook, or as text where none shows them; see IPython.display.display."""
    if _state.writer is not None:
        _find_shell()
    from IPython.display import display

    return display(*objects, **options)


def _find_shell() -> Any:
    if _state.shell is None:
        # The watch makes the shell, unless IPython was imported before the ranks were forked.
        import IPython

        if _state.shell is None:
            _create_shell(IPython)
    return _state.shell


def _create_shell(_module: types.ModuleType) -> None:
    """Make IPython's shell for displays alone: it runs no cells, and its names are not the script's."""
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell

    class Publisher(DisplayPublisher):  # type: ignore[misc]
        def publish(
            self, data: Any, metadata: Any = None, *_: Any, transient: Any = None, update: bool = False, **__: Any
        ) -> None:
            data, display_id = _state.widgets.show(data, str((transient or {}).get("display_id", "")))
            _state.write(
                Display(
                    kind=DisplayKind.UPDATE if update else DisplayKind.SHOW,
                    data=data,
                    metadata=metadata or {},
                    display_id=display_id,
                    written=flush_output(),
                )
            )

        def clear_output(self, wait: bool = False) -> None:
            _state.write(Display(kind=DisplayKind.CLEAR, wait=bool(wait), written=flush_output()))

    class Shell(InteractiveShell):  # type: ignore[misc]
        def init_history(self) -> None:
            self.history_manager = None

        def init_sys_modules(self) -> None:
            """Leave the main module as it is."""

    if InteractiveShell.initialized():
        return
    _state.shell = Shell.instance(
        user_module=types.ModuleType("gpu_launch_displays"), user_ns={}, display_pub_class=Publisher
    )


def _use_text_bars(module: types.ModuleType) -> None:
    """Draw tqdm's bars as text, which the notebook shows as progress, where there are no widgets."""
    if importlib.util.find_spec("ipywidgets") is not None:
        return
    from tqdm import std  # type: ignore[import-untyped]

    for name in ("tqdm", "tqdm_notebook"):
        setattr(module, name, std.tqdm)
    for name in ("trange", "tnrange"):
        setattr(module, name, std.trange)


def _set_interactive(_module: types.ModuleType) -> None:
    """Let a script display its figures with `show` alone: there is no end of a cell, and others would be kept."""
    if not _state.runs_cells:
        sys.modules["matplotlib"].interactive(False)


#: What follows the first import of a module.
_WATCHED = {
    "IPython": _create_shell,
    "comm": _state.widgets.follow,
    "tqdm.notebook": _use_text_bars,
    _BACKEND.removeprefix("module://"): _set_interactive,
}


class _ImportWatch(MetaPathFinder):
    """Calls a function after the first import of a module."""

    def __init__(self, actions: Mapping[str, Any]) -> None:
        self._actions = dict(actions)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        action = self._actions.pop(fullname, None)
        if action is None:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _WatchedLoader(spec.loader, action)
                return spec
        return None


class _WatchedLoader(Loader):
    """Loads a module as `loader` does, then calls `action` with it."""

    def __init__(self, loader: Any, action: Any) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)
