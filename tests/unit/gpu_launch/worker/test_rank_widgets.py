"""A widget of a rank is a display with HTML, which its comm's messages update."""

from __future__ import annotations

import types

import comm
import pytest

from gpu_launch.common.displays import Display, DisplayKind
from gpu_launch.common.widget_html import VIEW_TYPE
from gpu_launch.worker import rank_widgets
from gpu_launch.worker.rank_widgets import RankWidgets


@pytest.fixture
def written() -> list[Display]:
    return []


@pytest.fixture
def widgets(written: list[Display]) -> RankWidgets:
    return RankWidgets(written.append)


@pytest.fixture
def package(widgets: RankWidgets) -> types.SimpleNamespace:
    """The package `comm`, of which other tests keep their own."""
    package = types.SimpleNamespace(BaseComm=comm.BaseComm)
    widgets.follow(package)
    return package


def open_label(package, value):
    return package.create_comm(
        target_name="jupyter.widget", data={"state": {"_model_name": "LabelModel", "value": value}, "buffer_paths": []}
    )


def show(widgets, label, display_id=""):
    return widgets.show({"text/plain": "Label()", VIEW_TYPE: {"model_id": label.comm_id}}, display_id)


def test_a_shown_widget_is_updated(package, widgets, written):
    """Also under an id that the user chose; no longer where something else was shown in its place."""
    label = open_label(package, "first")
    data, display_id = show(widgets, label)
    assert (data["text/plain"], display_id) == ("first", f"widget-{label.comm_id}")
    assert "<span>first</span>" in data["text/html"]
    assert show(widgets, label, "mine")[1] == "mine"
    label.send({"method": "update", "state": {"value": "a&b"}})
    assert [(item.kind, item.display_id, item.data["text/plain"]) for item in written] == [
        (DisplayKind.UPDATE, display_id, "a&b"),
        (DisplayKind.UPDATE, "mine", "a&b"),
    ]
    assert widgets.show({"text/html": "else"}, "mine") == ({"text/html": "else"}, "mine")
    label.close()
    assert [(item.display_id, dict(item.data)) for item in written[2:]] == [
        (display_id, {"text/html": "", "text/plain": ""})
    ]


def test_a_widget_that_is_not_known_keeps_its_text(widgets):
    """One that was made before the rank began to follow them."""
    data, _ = widgets.show({"text/plain": "Label()", VIEW_TYPE: {"model_id": "old"}}, "")
    assert data["text/plain"] == "Label()"


def test_the_widgets_that_changed_last_are_updated(package, widgets, written, monkeypatch):
    """However many were shown, so that an outer loop's bar moves on."""
    monkeypatch.setattr(rank_widgets, "_MAX_SHOWN", 2)
    first, second, third = (open_label(package, "0") for _ in range(3))
    show(widgets, first)
    show(widgets, second)
    first.send({"method": "update", "state": {"value": "1"}})
    show(widgets, third)
    for label in (first, second, third):
        label.send({"method": "update", "state": {"value": "2"}})
    assert [item.display_id for item in written[1:]] == [f"widget-{label.comm_id}" for label in (first, third)]
