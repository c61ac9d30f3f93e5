"""Displays of ipyparallel's engines as tabs: `%%px` of a cluster with several engines of gpuhub shows them as
`%%gpu_ranks` does. Everything else that ipyparallel shows, and all that it keeps, stays as it is.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from gpu_launch.common.display_html import render_data
from gpu_launch.common.widget_html import WidgetStates, find_model
from gpu_launch.output.display_tabs import MAX_ITEMS, DisplayTabs
from gpu_launch.output.formatter import strip_controls
from gpu_launch.output.progress_bars import ProgressBar, ProgressTracker, parse_bar
from gpu_launch.output.screens import TabsOutput, is_in_notebook

_COMM = ("comm_open", "comm_msg", "comm_close")
#: Messages of an engine whose effect is in a tab.
_SHOWN = ("display_data", "update_display_data", "clear_output", *_COMM)
#: Seconds without new output after which missing output is given up.
_QUIET_S = 1.0
#: Characters at the end of a stream in which a new bar is looked for.
_TAIL = 4096
#: The key with what `_render` has made of a display.
_HTML = "gpuhub html"
#: Prefix of the names of gpuhub's engines, which begin with the id of their run.
_RUN = "run-"
#: The widgets of all engines of a client.
_widgets: WeakKeyDictionary[Any, WidgetStates] = WeakKeyDictionary()
#: The tabs of a result that is being shown.
_tabs: WeakKeyDictionary[Any, _ResultTabs] = WeakKeyDictionary()


class EngineOutputs(list[dict[str, Any]]):
    """The displays of one call on one engine, as ipyparallel keeps them."""

    def __init__(self, kept: list[dict[str, Any]]) -> None:
        super().__init__(kept)
        #: Displays that are on the screen: updated, and without those that were cleared.
        self.shown = [dict(content) for content in kept]
        self._clears_next = False

    def handle(self, kind: str, content: Mapping[str, Any]) -> None:
        """Take a message of the engine."""
        display_id = (content.get("transient") or {}).get("display_id")
        if kind == "clear_output":
            self._clears_next = bool(content.get("wait"))
        if (kind == "clear_output" and not self._clears_next) or (kind == "display_data" and self._clears_next):
            self.shown.clear()
            self._clears_next = False
        if kind == "display_data":
            self.shown.append(dict(content))
        elif kind == "update_display_data":
            for item in self.shown:
                if (item.get("transient") or {}).get("display_id") == display_id:
                    item.update(data=content["data"], metadata=content["metadata"])
                    item.pop(_HTML, None)


class _ResultTabs:
    """The tabs of one result; the thread that receives messages shows them, at the end the main one."""

    def __init__(self, result: Any) -> None:
        from IPython.display import DisplayHandle

        self._result, self._loop = result, result._client._io_loop
        self._tabs = DisplayTabs(f"gl-{secrets.token_hex(4)}", noun="engine")
        self._output = TabsOutput(self._tabs, DisplayHandle)
        self._lock = threading.Lock()
        self._is_due = False
        self._received = 0
        self._errors: dict[int, str] = {}
        #: The engines that have drawn a bar.
        self._drawing: set[int] = set()

    def take(self, engine: int, future: Any, message: Mapping[str, Any]) -> bool:
        """Take a message; return False for one that ipyparallel shows."""
        kind, content = message["header"]["msg_type"], message["content"]
        is_shown = kind in _SHOWN or (kind == "execute_result" and is_rich(content))
        if kind == "stream" and content["name"] == "stderr":
            if has_bars(future.output.metadata["stderr"][-_TAIL:]):
                self._drawing.add(engine)
            is_shown = engine in self._drawing
        self._received += 1
        if is_shown and not self._is_due:
            self._is_due = True
            self._loop.call_later(self._output.due_in_s(), self.show)
        return is_shown

    def wait_for_output(self) -> None:
        """Wait for output that engines which have ended sent before; give up when none arrives."""
        received = -1
        while self._result.ready() and received != self._received and not self._result.wait_for_output(0):
            received = self._received
            self._result.wait_for_output(_QUIET_S)

    def show(self, *, is_last: bool = False) -> None:
        """Show the current state."""
        with self._lock:
            self._is_due = False
            for engine, future in zip(self._result._targets, self._result._children, strict=True):
                self._update_page(engine, future.msg_id, future.output.metadata)
            self._output.show(is_last=is_last)

    def _show_errors(self, engine: int, call: str, text: str) -> None:
        """Show what an engine has written to stderr besides bars, in ipyparallel's form."""
        from IPython.display import publish_display_data

        if not text.strip() or self._errors.get(engine) == text:
            return
        self._errors[engine] = text
        known, display_id = self._result._already_streamed, f"{call}-stderr"
        publish_display_data(
            {"text/plain": f"[stderr:{engine}] {text}"},
            transient={"display_id": display_id},
            update=known.get(display_id, False),
        )
        known[display_id] = True

    def _update_page(self, engine: int, call: str, metadata: Mapping[str, Any]) -> None:
        bars, text = split_bars(metadata["stderr"])
        shown = list(getattr(metadata["outputs"], "shown", ()))[-MAX_ITEMS:]
        if (result := metadata["execute_result"]) and is_rich(result):
            shown.append(dict(result))
        widgets = _find_widgets(self._result._client)
        self._tabs.replace(engine, [_render(content, widgets) for content in shown], bars)
        if engine in self._drawing:
            self._show_errors(engine, call, text)


@functools.cache
def install() -> None:
    """Show the displays of gpuhub's engines in tabs from now on."""
    from ipyparallel.client.asyncresult import AsyncResult
    from ipyparallel.client.client import Client, unpack_message

    handle = Client._dispatch_iopub.__wrapped__

    def dispatch(self: Any, message: Mapping[str, Any]) -> None:
        _dispatch(handle, self, message)

    Client._dispatch_iopub = unpack_message(dispatch)
    _wrap(AsyncResult, "_iopub_streaming_output_callback", _show_message)
    _wrap(AsyncResult, "stream_output", _stream_output)
    _wrap(AsyncResult, "display_outputs", _display_outputs)


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method; `wrapper` gets the original one before its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return wrapper(original, *args, **options)

    setattr(owner, name, wrapped)


def _dispatch(original: Callable[..., None], client: Any, message: Mapping[str, Any]) -> None:
    """Keep what a message of an engine does to its displays, before ipyparallel keeps the message."""
    kind, parent = message["header"]["msg_type"], message["parent_header"]
    if kind not in _SHOWN or not parent or parent["session"] != client.session.session or not has_tabs(client):
        original(client, message)
        return
    content, future = message["content"], client._futures.get(parent["msg_id"])
    if kind in _COMM:
        _find_widgets(client).handle(kind, content["comm_id"], content.get("data") or {}, message["buffers"])
        # ipyparallel would send them to the browser, which shows the widget nowhere.
        for callback in future.iopub_callbacks if future else ():
            callback(message)
        return
    metadata = client.metadata[parent["msg_id"]]
    if not isinstance(metadata["outputs"], EngineOutputs):
        metadata["outputs"] = EngineOutputs(metadata["outputs"])
    metadata["outputs"].handle(kind, content)
    original(client, message)


def _show_message(
    original: Callable[..., None], result: Any, engine: int, future: Any, message: Mapping[str, Any]
) -> None:
    tabs = _tabs.get(result)
    if tabs is None or not tabs.take(engine, future, message):
        original(result, engine, future, message)


@contextmanager
def _stream_output(original: Callable[..., Any], result: Any) -> Iterator[None]:
    if not has_tabs(result._client):
        with original(result):
            yield
        return
    tabs = _tabs[result] = _ResultTabs(result)
    with original(result):
        try:
            yield
        finally:
            tabs.wait_for_output()
            del _tabs[result]
            tabs.show(is_last=True)


def _display_outputs(
    original: Callable[..., None], result: Any, groupby: str = "type", result_only: bool = False
) -> None:
    if groupby != "type" or result_only or not result.ready() or not has_tabs(result._client):
        original(result, groupby=groupby, result_only=result_only)
        return
    result.wait_for_output()
    with _without_displays([future.output.metadata for future in result._children]):
        original(result)
    _ResultTabs(result).show(is_last=True)


@contextmanager
def _without_displays(calls: list[Any]) -> Iterator[None]:
    """Take what tabs show out of the metadata of calls for a while."""
    kept = [{name: call[name] for name in ("outputs", "stderr", "execute_result")} for call in calls]
    for call in calls:
        call["outputs"], call["stderr"] = [], split_bars(call["stderr"])[1]
        if call["execute_result"] and is_rich(call["execute_result"]):
            call["execute_result"] = None
    try:
        yield
    finally:
        for call, values in zip(calls, kept, strict=True):
            call.update(values)


def has_tabs(client: Any) -> bool:
    """Return whether a client's results are shown in tabs: it has several engines of gpuhub, in a notebook."""
    names = {name for name in client._engines.values() if isinstance(name, str) and name.startswith(_RUN)}
    return len(names) > 1 and is_in_notebook()


def is_rich(content: Mapping[str, Any]) -> bool:
    """Return whether a display is more than text."""
    return not content["data"].keys() <= {"text/plain"}


def has_bars(text: str) -> bool:
    """Return whether a stream has drawn bars, or the empty line with which one below others begins."""
    return not text.strip() or bool(split_bars(text)[0])


def split_bars(text: str) -> tuple[tuple[ProgressBar, ...], str]:
    """Return the bars that a stream has drawn, and its other lines."""
    progress, rest = ProgressTracker(), []
    for line in text.split("\n") if "/s" in text or "s/" in text else ():
        drawn = parse_bar(strip_controls(line.rpartition("\r")[2]))
        if drawn is None:
            rest.append(line)
            continue
        progress.record_bar(0, drawn[0])
        if rest[-1:] == [""]:
            # A bar below others begins with a newline.
            rest.pop()
        rest += [left] if (left := drawn[1].strip()) else []
    bars = progress.pop_redrawn().get(0, ())
    return bars, "\n".join(rest) if bars else text


def _find_widgets(client: Any) -> WidgetStates:
    return _widgets.setdefault(client, WidgetStates())


def _render(content: dict[str, Any], widgets: WidgetStates) -> str:
    if model_id := find_model(content["data"]):
        return widgets.render(model_id)
    if _HTML not in content:
        content[_HTML] = render_data(content["data"], content["metadata"])
    return str(content[_HTML])
