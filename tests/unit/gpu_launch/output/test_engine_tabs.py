"""What ipyparallel's engines show: after updates and clears, and without drawn bars."""

from __future__ import annotations

from gpu_launch.output.engine_tabs import EngineOutputs, has_bars, is_rich, split_bars


def content(text, display_id=""):
    return {"data": {"text/html": text}, "metadata": {}, "transient": {"display_id": display_id} if display_id else {}}


def test_what_is_kept_stays_and_what_is_shown_follows():
    """An update finds its display; a clear that waits takes effect with the next display."""
    outputs = EngineOutputs([content("a", "x")])
    outputs.handle("display_data", content("b"))
    outputs.handle("update_display_data", content("c", "x"))
    assert [item["data"]["text/html"] for item in outputs.shown] == ["c", "b"]
    assert [item["data"]["text/html"] for item in outputs] == ["a"]
    outputs.handle("clear_output", {"wait": True})
    assert len(outputs.shown) == 2
    outputs.handle("display_data", content("d"))
    assert [item["data"]["text/html"] for item in outputs.shown] == ["d"]
    outputs.handle("clear_output", {"wait": False})
    assert outputs.shown == []


def test_bars_are_taken_out_of_a_stream():
    """A line that draws none stays, and so does all of a stream without a bar."""
    drawn = "in:  50%|#  | 1/2 [00:01<00:01, 1.00it/s]"
    bars, rest = split_bars(f"first\n{drawn}warning\n{drawn.replace('1/2', '2/2')}\nlast\n")
    assert [(bar.text, bar.step, bar.total) for bar in bars] == [("in", 2.0, 2.0)]
    assert rest == "first\nwarning\nlast\n"
    assert split_bars(f"\n{drawn}\x1b[A\nlast\n")[1] == "last\n"
    assert split_bars("10 MB/s\n") == ((), "10 MB/s\n")
    assert [has_bars(text) for text in ("\n", drawn, "a\n")] == [True, True, False]
    assert (is_rich(content("a")), is_rich({"data": {"text/plain": "a"}})) == (True, False)
