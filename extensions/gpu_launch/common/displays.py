"""What a rank displays besides text: the form in which it travels from rank to notebook, its limits and its check.

A rank appends JSON lines to its file of displays, the agent sends each as a message, and the notebook checks it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from gpu_launch.errors import UsageError

#: Largest display, in bytes of its JSON.
MAX_BYTES = 8 * 1024**2
#: The variable with the path of this rank's file of displays, with `{rank}` for its number; set in ranks whose launch
#: is shown in a notebook.
VARIABLE = "GPU_LAUNCH_DISPLAYS"
#: A widget's model is in the rank, where a browser cannot reach it.
_DROPPED_TYPES = ("application/vnd.jupyter.widget-view+json",)
_MIME_TYPE = re.compile(r"[a-z]+/[A-Za-z0-9.+_-]{1,100}")
_MAX_TYPES, _MAX_ID = 32, 200


class DisplayKind(StrEnum):
    """What is to be done."""

    SHOW = "show"
    #: Replace the earlier display with the same id.
    UPDATE = "update"
    #: Remove the rank's output; with `wait` when the next display comes.
    CLEAR = "clear"


@dataclass(frozen=True, kw_only=True)
class Display:
    """One display of a rank."""

    kind: DisplayKind = DisplayKind.SHOW
    #: MIME type → text, or what JSON holds.
    data: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: The id by which `update_display` finds it; empty for none.
    display_id: str = ""
    wait: bool = False
    #: Bytes of stdout and stderr that the rank had written before.
    written: tuple[int, int] = (0, 0)


def dump_display(display: Display) -> bytes:
    """Return a display as one line; one that is too large as text with its size.

    Raises:
        TypeError, ValueError: JSON cannot hold its data.
    """
    data = {mime: value for mime, value in display.data.items() if mime not in _DROPPED_TYPES}
    fields = {
        "kind": display.kind,
        "id": display.display_id,
        "wait": display.wait,
        "written": display.written,
    }
    line = json.dumps({**fields, "data": data, "metadata": dict(display.metadata)}).encode()
    if len(line) > MAX_BYTES:
        line = json.dumps({**fields, "data": {"text/plain": describe_too_large(len(line))}, "metadata": {}}).encode()
    return line + b"\n"


def parse_display(value: object) -> Display:
    """Return the checked display of a line's JSON.

    Raises:
        UsageError: It is no display.
    """
    if not isinstance(value, dict):
        raise UsageError("a rank's display is not an object.")
    data, metadata = value.get("data"), value.get("metadata")
    written, display_id = value.get("written"), value.get("id")
    if (
        value.get("kind") not in tuple(DisplayKind)
        or not isinstance(data, dict)
        or len(data) > _MAX_TYPES
        or not all(_MIME_TYPE.fullmatch(mime) for mime in data)
        or not isinstance(metadata, dict)
        or not isinstance(display_id, str)
        or len(display_id) > _MAX_ID
        or not isinstance(written, list)
        or len(written) != 2
        or not all(isinstance(size, int) for size in written)
    ):
        raise UsageError("a rank's display has fields of another form.")
    return Display(
        kind=DisplayKind(value["kind"]),
        data={mime: content for mime, content in data.items() if mime not in _DROPPED_TYPES},
        metadata=metadata,
        display_id=display_id,
        wait=value.get("wait") is True,
        written=(written[0], written[1]),
    )


def describe_too_large(size: int) -> str:
    """Return what is shown in place of a display that is too large."""
    return f"[a display of {size / 1e6:.1f} MB is left out: more than {MAX_BYTES // 1024**2} MiB]"
