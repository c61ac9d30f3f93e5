"""A MIME bundle as HTML."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from typing import Any

#: Types of images in the order in which a bundle is searched for them.
_IMAGES = ("image/png", "image/jpeg", "image/gif", "image/webp")


def render_data(data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> str:
    """Return a MIME bundle as HTML: its own, else an image, else its text. Text from outside is escaped."""
    if isinstance(text := data.get("text/html"), str):
        return text
    for mime in _IMAGES:
        if isinstance(text := data.get(mime), str):
            return _render_image(mime, text, (metadata or {}).get(mime))
    if isinstance(text := data.get("image/svg+xml"), str):
        return _render_image("image/svg+xml", base64.b64encode(text.encode()).decode(), None)
    if isinstance(text := data.get("text/latex"), str):
        return html.escape(text)
    for mime in ("text/markdown", "text/plain"):
        if isinstance(text := data.get(mime), str):
            return f"<pre>{html.escape(text)}</pre>"
    return f"<pre>{html.escape(json.dumps(dict(data))[:10_000])}</pre>"


def _render_image(mime: str, content: str, metadata: object) -> str:
    sizes = ""
    if isinstance(metadata, Mapping):
        for name in ("width", "height"):
            if isinstance(pixels := metadata.get(name), int):
                sizes += f' {name}="{pixels}"'
    return f'<img alt="" src="data:{mime};base64,{html.escape("".join(content.split()))}"{sizes}>'
