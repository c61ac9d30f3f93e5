"""Displays as lines: what travels, what is too large, and what is refused."""

from __future__ import annotations

import json

import pytest

from gpu_launch.common.displays import MAX_BYTES, Display, DisplayKind, dump_display, parse_display
from gpu_launch.errors import UsageError

VALID = {"kind": "show", "data": {"text/plain": "x"}, "metadata": {}, "id": "", "wait": False, "written": [0, 0]}


def test_a_display_survives_its_journey():
    """Without a widget's own type, whose model no browser reaches."""
    display = Display(
        kind=DisplayKind.UPDATE,
        data={"text/html": "<b>é</b>", "application/json": {"a": [1]}, "application/vnd.jupyter.widget-view+json": {}},
        metadata={"text/html": {"isolated": True}},
        display_id="x",
        written=(3, 4),
    )
    line = dump_display(display)
    assert line.count(b"\n") == 1
    found = parse_display(json.loads(line))
    assert found.data == {"text/html": "<b>é</b>", "application/json": {"a": [1]}}
    assert (found.kind, found.display_id, found.written) == (DisplayKind.UPDATE, "x", (3, 4))
    assert found.metadata == display.metadata


def test_a_display_that_is_too_large_says_its_size():
    """And is dropped."""
    line = dump_display(Display(data={"image/png": "A" * (MAX_BYTES + 1)}))
    assert parse_display(json.loads(line)).data == {"text/plain": "[a display of 8.4 MB is left out: more than 8 MiB]"}


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "run"}, {"data": []}, {"data": {"no type": ""}}, {"data": {f"a/b{i}": "" for i in range(33)}},
        {"metadata": None}, {"id": 1}, {"id": "x" * 201}, {"written": [0]}, {"written": ["0", 0]}, {"written": None},
    ],
)  # fmt: skip
def test_lines_of_another_form_are_refused(change):
    """Whatever a rank wrote into its file."""
    assert parse_display(VALID).data == VALID["data"]
    with pytest.raises(UsageError, match="display"):
        parse_display(VALID | change)
    with pytest.raises(UsageError, match="not an object"):
        parse_display([])
