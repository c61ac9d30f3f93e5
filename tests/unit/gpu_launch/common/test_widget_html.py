"""Widgets as HTML, from the messages of their comms."""

from __future__ import annotations

from gpu_launch.common.widget_html import VIEW_TYPE, WidgetStates, find_model, render_row


def open_widgets(**states):
    """Return the states of widgets by id."""
    widgets = WidgetStates()
    for model_id, state in states.items():
        widgets.handle("comm_open", model_id, {"state": state, "buffer_paths": []})
    return widgets


def test_a_bar_follows_its_state():
    """As tqdm makes it: a box with two texts and a bar, whose values change one by one."""
    widgets = open_widgets(
        look={"width": "20px"},
        style={"bar_color": None},
        text={"_model_name": "HTMLModel", "value": " 5%"},
        bar={
            "_model_name": "FloatProgressModel",
            "min": 0.0,
            "max": 4.0,
            "value": 1.0,
            "bar_style": "danger",
            "layout": "IPY_MODEL_look",
            "style": "IPY_MODEL_style",
        },
        box={"_model_name": "HBoxModel", "children": ["IPY_MODEL_text", "IPY_MODEL_bar"]},
    )
    shown = widgets.render("box")
    assert "<span> 5%</span>" in shown and "width:25.0%" in shown and "--jp-error-color1" in shown and "20px" in shown
    widgets.handle("comm_msg", "bar", {"method": "update", "state": {"value": 9.0}})
    widgets.handle("comm_msg", "style", {"method": "update", "state": {"bar_color": '"red'}})
    widgets.handle("comm_msg", "bar", {"method": "custom", "content": {}})
    shown = widgets.render("box")
    assert "width:100.0%" in shown and "background:&quot;red" in shown
    assert [widgets.contains("box", part) for part in ("box", "look", "text", "other")] == [True, True, True, False]
    widgets.handle("comm_msg", "look", {"method": "update", "state": {"visibility": "hidden"}})
    assert "meter" not in widgets.render("box")
    widgets.handle("comm_close", "box", {})
    assert widgets.render("box") == ""


def test_each_widget_shows_its_value():
    """Those without a form of their own with description and value, or with their name."""
    widgets = open_widgets(
        label={"_model_name": "LabelModel", "value": "<a>"},
        slider={"_model_name": "IntSliderModel", "value": 3, "description": "rate"},
        choice={"_model_name": "DropdownModel", "_options_labels": ["a", "b"], "index": 1},
        several={"_model_name": "SelectMultipleModel", "_options_labels": ["a", "b"], "index": [0, 1]},
        none={"_model_name": "DropdownModel", "_options_labels": [], "index": None},
        box={"_model_name": "CheckboxModel", "value": True},
        button={"_model_name": "ButtonModel", "description": "run"},
        figure={"_model_name": "FigureModel"},
        tab={"_model_name": "TabModel", "children": ["IPY_MODEL_label"], "titles": ["one"]},
        loop={"_model_name": "VBoxModel", "children": ["IPY_MODEL_loop"]},
        out={
            "_model_name": "OutputModel",
            "outputs": [
                {"output_type": "stream", "text": "<hi>"},
                {"output_type": "display_data", "data": {"text/html": "<i>h</i>"}},
                {"output_type": "display_data", "data": {"text/plain": "w", VIEW_TYPE: {"model_id": "label"}}},
            ],
        },
    )
    widgets.handle(
        "comm_open",
        "image",
        {"state": {"_model_name": "ImageModel", "format": "png"}, "buffer_paths": [["value"]]},
        [memoryview(b"abc")],
    )
    expected = {
        "label": "<span>&lt;a&gt;</span>",
        "slider": "<span>rate</span> <span>3</span>",
        "choice": "<span>b</span>",
        "several": "<span>a, b</span>",
        "none": "<span></span>",
        "box": "<span>☑</span>",
        "button": "<span>run</span> <span></span>",
        "figure": "<span>[Figure]</span>",
        "image": '<img alt="" src="data:image/png;base64,YWJj">',
    }
    assert {name: widgets.render(name) for name in expected} == {
        name: render_row(shown) for name, shown in expected.items()
    }
    parts = "".join(map(render_row, ["<pre>&lt;hi&gt;</pre>", "<i>h</i>", "<span>&lt;a&gt;</span>"]))
    assert parts in widgets.render("out")
    assert widgets.render("unknown") == ""
    assert "<b>one</b><span>&lt;a&gt;</span>" in widgets.render("tab")
    assert "loop" not in widgets.render("loop")
    assert widgets.contains("out", "label")
    assert (find_model({VIEW_TYPE: {"model_id": "x"}}), find_model({"text/plain": "x"})) == ("x", "")
