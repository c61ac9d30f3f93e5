"""Shows the widgets (ipywidgets) of a rank as HTML, which is updated when a widget's state changes."""

from __future__ import annotations

import html
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_launch.common.displays import Display, DisplayKind
from gpu_launch.common.widget_html import WidgetStates, find_model

#: Displays of widgets that are updated: those that were shown or changed last.
_MAX_SHOWN = 50
_CLOSED = {"text/plain": "", "text/html": ""}


class RankWidgets:
    """The widgets of this process."""

    def __init__(self, write: Callable[[Display], None]) -> None:
        self._write = write
        self._states = WidgetStates()
        #: The widget by the id of its display, the one that changed last at the end.
        self._shown: dict[str, str] = {}

    def follow(self, module: types.ModuleType) -> None:
        """Let the comms of the module `comm` send their messages here: there is no kernel that has them."""
        widgets = self

        class RankComm(module.BaseComm):  # type: ignore[misc, name-defined]
            def publish_msg(
                self, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **_: Any
            ) -> None:
                # At Python's end widgets are closed that stay as they were.
                if not sys.is_finalizing():
                    widgets.handle(msg_type, self.comm_id, data or {}, buffers)

        module.create_comm = RankComm  # type: ignore[attr-defined]

    def show(self, data: Mapping[str, Any], display_id: str) -> tuple[Mapping[str, Any], str]:
        """Return a display's data, with HTML for a widget, and its id, which a widget needs."""
        self._shown.pop(display_id, None)
        if not (model_id := find_model(data)):
            return data, display_id
        display_id = display_id or f"widget-{model_id}"
        self._shown[display_id] = model_id
        if len(self._shown) > _MAX_SHOWN:
            del self._shown[next(iter(self._shown))]
        return self._render(model_id) or data, display_id

    def handle(self, kind: str, model_id: str, data: Mapping[str, Any], buffers: Sequence[Any] | None) -> None:
        """Take a message of a widget's comm: its type, the widget's id and the content."""
        changed = [item for item in list(self._shown.items()) if self._states.contains(item[1], model_id)]
        self._states.handle(kind, model_id, data, buffers)
        for display_id, root in changed:
            self._shown[display_id] = self._shown.pop(display_id, root)
            shown = self._render(root) or _CLOSED
            self._write(Display(kind=DisplayKind.UPDATE, data=shown, display_id=display_id, written=flush_output()))

    def _render(self, model_id: str) -> Mapping[str, Any]:
        """Return the MIME bundle of a widget; empty for one that is closed, or was made before `follow`."""
        if not (shown := self._states.render(model_id)):
            return {}
        text = html.unescape(re.sub(r"<[^>]*>", " ", shown))
        return {"text/plain": " ".join(text.split()), "text/html": shown}


def flush_output() -> tuple[int, int]:
    """Flush the output, so that its order with displays is known; return its size by stream."""
    sizes = []
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
            sizes.append(os.fstat(number).st_size)
        except (OSError, ValueError, AttributeError):
            sizes.append(0)
    return sizes[0], sizes[1]
