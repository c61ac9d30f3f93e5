"""Widgets (ipywidgets) of another process as HTML that cannot be operated: their states come with the messages of
their comms, and a browser reaches the comms of the notebook's kernel alone.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gpu_launch.common.display_html import render_data

#: The MIME type with which a widget is displayed.
VIEW_TYPE = "application/vnd.jupyter.widget-view+json"
_REFERENCE = "IPY_MODEL_"
_WIDTH = re.compile(r"\d{1,5}(?:\.\d{1,3})?(?:px|%|em)")
_COLORS = {
    "success": "var(--jp-success-color1,#388e3c)",
    "info": "var(--jp-info-color1,#0097a7)",
    "warning": "var(--jp-warn-color1,#f57c00)",
    "danger": "var(--jp-error-color1,#d32f2f)",
}
_BAR_COLOR = "var(--jp-brand-color1,#1976d2)"
_ROW = "display:flex;flex:1 1 auto;flex-wrap:wrap;gap:4px 8px;align-items:center"
_COLUMN = "display:flex;flex:1 1 auto;flex-direction:column;gap:4px"
_COLUMNS = ("VBoxModel", "TabModel", "AccordionModel", "StackModel")


class WidgetStates:
    """The states of the widgets of one process."""

    def __init__(self) -> None:
        self._states: dict[str, dict[str, Any]] = {}

    def handle(self, kind: str, model_id: str, data: Mapping[str, Any], buffers: Sequence[Any] | None = None) -> None:
        """Take a message of a comm: its type, the comm's id and its content; those of other comms change nothing."""
        if kind == "comm_close":
            self._states.pop(model_id, None)
        elif isinstance(state := data.get("state"), Mapping):
            known = self._states.setdefault(model_id, {})
            known.update(state)
            for path, buffer in zip(data.get("buffer_paths") or (), buffers or (), strict=False):
                if len(path) == 1:
                    known[path[0]] = bytes(buffer)

    def contains(self, root: str, model_id: str) -> bool:
        """Return whether a widget is `root`, or a part of it."""
        seen, pending = set(), [root]
        while pending:
            if (current := pending.pop()) == model_id:
                return True
            if current not in seen:
                seen.add(current)
                pending += _find_references(self._states.get(current, {}))
        return False

    def render(self, model_id: str) -> str:
        """Return a widget as HTML; empty for one that is closed, hidden or not known."""
        shown = self._render(model_id, frozenset())
        return render_row(shown) if shown else ""

    def _render(self, model_id: str, above: Collection[str]) -> str:
        state = self._states.get(model_id)
        if state is None or model_id in above or self._is_hidden(state):
            return ""
        name = str(state.get("_model_name"))
        within = {*above, model_id}
        if "children" in state:
            parts = [self._render(child, within) for child in _list_ids(state["children"])]
            titles = [f"<b>{html.escape(str(title))}</b>" for title in state.get("titles") or ()]
            parts = [f"{title}{part}" for title, part in zip(titles, parts, strict=False)] or parts
            return _render_column(parts) if name in _COLUMNS else render_row(*parts)
        if name == "OutputModel":
            return _render_column([self._render_output(output, within) for output in state.get("outputs") or ()])
        if name.endswith("ProgressModel"):
            return self._render_progress(state)
        label = f"<span>{html.escape(str(state['description']))}</span> " if state.get("description") else ""
        return label + _render_value(name, state)

    def _render_output(self, output: Mapping[str, Any], above: Collection[str]) -> str:
        data = output.get("data")
        if not isinstance(data, Mapping):
            text = output.get("text") or "\n".join(output.get("traceback") or ())
            return f"<pre>{html.escape(str(text))}</pre>"
        if (model_id := find_model(data)) in self._states:
            return self._render(model_id, above)
        return render_data(data)

    def _render_progress(self, state: Mapping[str, Any]) -> str:
        least, most = float(state.get("min") or 0), float(state.get("max") or 0)
        part = (float(state.get("value") or 0) - least) / (most - least) if most > least else 0.0
        color = self._find(state, "style").get("bar_color") or _COLORS.get(str(state.get("bar_style")), _BAR_COLOR)
        width = str(self._find(state, "layout").get("width"))
        return render_bar(
            str(state.get("description") or ""),
            part,
            color=str(color),
            width=width if _WIDTH.fullmatch(width) else "",
        )

    def _is_hidden(self, state: Mapping[str, Any]) -> bool:
        layout = self._find(state, "layout")
        return layout.get("display") == "none" or layout.get("visibility") == "hidden"

    def _find(self, state: Mapping[str, Any], field: str) -> Mapping[str, Any]:
        """Return the state of another model that a field names."""
        return self._states.get(str(state.get(field)).removeprefix(_REFERENCE), {})


def find_model(data: Mapping[str, Any]) -> str:
    """Return the id of the widget that a MIME bundle displays; empty for none."""
    view = data.get(VIEW_TYPE)
    return str(view.get("model_id") or "") if isinstance(view, Mapping) else ""


def render_bar(label: str, part: float, text: str = "", *, color: str = _BAR_COLOR, width: str = "") -> str:
    """Return a progress bar, filled to `part` from 0 to 1, between a label and a text, which are escaped.

    They are in a row where what is around them is one, see `render_row`.
    """
    percent = 100 * min(1.0, max(0.0, part))
    size = f"flex:none;width:{width}" if width else "flex:1 1 120px;max-width:480px"
    bar = (
        f'<div role="meter" aria-label="{html.escape(label or "progress")}" aria-valuemin="0" aria-valuemax="100" '
        f'aria-valuenow="{percent:.0f}" style="{size};height:10px;border-radius:3px;overflow:hidden;'
        f'background:var(--jp-layout-color2,#8883)"><div style="width:{percent:.1f}%;height:100%;'
        f'background:{html.escape(color)}"></div></div>'
    )
    before, after = (f"<span>{html.escape(part)}</span>" if part else "" for part in (label, text))
    return f"{before}{bar}{after}"


def render_row(*parts: str) -> str:
    """Return parts next to each other."""
    return f'<div style="{_ROW}">{"".join(parts)}</div>'


def _render_column(parts: Sequence[str]) -> str:
    return f'<div style="{_COLUMN}">{"".join(map(render_row, parts))}</div>'


def _render_value(name: str, state: Mapping[str, Any]) -> str:
    """Return the value of a widget that has no parts; its model's name if it has none."""
    value = state.get("value")
    if name.startswith("HTML"):
        return f"<span>{value}</span>"
    if name == "ImageModel":
        content = base64.b64encode(value if isinstance(value, bytes) else b"").decode()
        return f'<img alt="" src="data:image/{html.escape(str(state.get("format")))};base64,{content}">'
    labels, index = state.get("_options_labels"), state.get("index")
    if isinstance(labels, list | tuple):
        chosen = index if isinstance(index, list | tuple) else [index]
        value = ", ".join(str(labels[number]) for number in chosen if isinstance(number, int))
    if isinstance(value, bool):
        value = "☑" if value else "☐"
    if value is None and not state.get("description"):
        value = f"[{name.removesuffix('Model')}]"
    return f"<span>{html.escape('' if value is None else str(value))}</span>"


def _find_references(value: Any) -> list[str]:
    """Return the ids of all models that a state names."""
    if isinstance(value, str):
        return [value.removeprefix(_REFERENCE)] if value.startswith(_REFERENCE) else []
    if isinstance(value, Mapping):
        own = [find_model(value)] if VIEW_TYPE in value else []
        return own + [found for part in value.values() for found in _find_references(part)]
    if isinstance(value, list | tuple):
        return [found for part in value for found in _find_references(part)]
    return []


def _list_ids(children: Any) -> list[str]:
    return [str(child).removeprefix(_REFERENCE) for child in children]
