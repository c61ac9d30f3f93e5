"""Displays of several ranks as tabs, and of one rank in order with its lines."""

from __future__ import annotations

import re

from gpu_launch.common.displays import Display, DisplayKind
from gpu_launch.output import display_tabs
from gpu_launch.output.display_order import DisplayOrder
from gpu_launch.output.display_tabs import DisplayTabs, RankDisplay
from gpu_launch.output.progress_bars import parse_bar


def show(rank, text, **parts):
    return RankDisplay(
        rank=rank, node=f"rig{rank + 1}", display=Display(data={"text/html": text} if text else {}, **parts)
    )


def pages(tabs, **options):
    """Return the items of each tab by label."""
    found = {}
    for part in tabs.render(**options).split("<label")[1:]:
        label, _, page = part.partition("</label>")
        found[label.partition(">")[2]] = re.findall(
            r'<div class="gl-item">(.*?)</div>(?=<div class="gl-item">|</div>(?:<input|</div>))', page
        )
    return found


def draw(rank, *lines):
    return RankDisplay(rank=rank, node=f"rig{rank + 1}", bars=tuple(parse_bar(line)[0] for line in lines))


def test_equal_ranks_share_a_tab():
    """As long as they display the same, and again at the end."""
    tabs = DisplayTabs("x")
    assert (tabs.render(), tabs.describe()) == ("", "")
    for rank in (2, 0, 1):
        tabs.add(show(rank, "a"))
    assert pages(tabs) == {"ranks 0-2": ["a"]}
    tabs.add(show(1, "b"))
    assert pages(tabs) == {"ranks 0, 2": ["a"], "rank 1": ["a", "b"]}
    assert tabs.describe() == "ranks 0, 2: 1 display, rank 1: 2 displays"
    assert tabs.render().count(" checked") == 1
    for rank in (0, 2):
        tabs.add(show(rank, "b"))
    assert list(pages(tabs)) == ["ranks 0, 2", "rank 1"]
    assert pages(tabs, is_final=True) == {"ranks 0-2": ["a", "b"]}


def test_bars_are_above_the_displays_of_their_rank():
    """A drawing replaces the one before; times alone make no difference at the end, other figures do."""
    tabs = DisplayTabs("x")
    tabs.add(show(0, "a"))
    tabs.add(draw(0, "train:  50%|#  | 1/2 [00:01<00:01, 1.00it/s, loss=2]"))
    tabs.add(draw(1, "<b>: 3it [00:01, 3.00it/s]"))
    (bar, shown), (counter,) = pages(tabs).values()
    assert "<span>1 of 2 (50 %) [1 s left, 1.00it/s, loss=2]</span>" in bar
    assert shown == "a"
    assert "width:50.0%" in bar
    assert counter == "<span>&lt;b&gt; 3 [3.00it/s]</span>"
    ends = [draw(rank, f"100%|##| 2/2 [00:0{rank}<00:00, {rank}.2s/it, loss={rank // 2}]") for rank in range(4)]
    tabs = DisplayTabs("x")
    for end in ends:
        tabs.add(end)
    assert list(pages(tabs)) == ["ranks 0-1", "ranks 2-3"]
    tabs.add(show(0, "", kind=DisplayKind.CLEAR))
    assert list(pages(tabs)) == ["rank 1", "ranks 2-3"]


def test_updates_and_clears_are_the_ranks_own():
    """An update replaces the display with its id; a clear that waits takes effect with the next display."""
    tabs = DisplayTabs("x")
    tabs.add(show(0, "a", display_id="d"))
    tabs.add(show(1, "a", display_id="d"))
    tabs.add(show(1, "b", display_id="d", kind=DisplayKind.UPDATE))
    assert pages(tabs) == {"rank 0": ["a"], "rank 1": ["b"]}
    tabs.add(show(1, "", kind=DisplayKind.CLEAR, wait=True))
    assert pages(tabs)["rank 1"] == ["b"]
    tabs.add(show(1, "c"))
    assert pages(tabs)["rank 1"] == ["c"]
    tabs.add(show(1, "", kind=DisplayKind.CLEAR))
    assert pages(tabs) == {"rank 0": ["a"]}


def test_the_number_and_the_size_are_bounded(monkeypatch):
    """The oldest give way, and a note says how many."""
    monkeypatch.setattr(display_tabs, "MAX_ITEMS", 2)
    monkeypatch.setattr(display_tabs, "MAX_CHARACTERS", 100)
    tabs = DisplayTabs("x")
    for text in "abc":
        tabs.add(show(0, text))
    assert pages(tabs) == {"rank 0": ["b", "c"]}
    assert "1 earlier display not shown" in tabs.render()
    tabs.add(show(0, "d" * 100))
    assert pages(tabs)["rank 0"] == ["d" * 100]
    tabs.add(show(0, "e" * 101))
    assert pages(tabs)["rank 0"][-1] == "<pre>[a display of 101 bytes is left out]</pre>"
    tabs.add(show(1, "small", display_id="d"))
    tabs.add(show(1, "f" * 200, display_id="d", kind=DisplayKind.UPDATE))
    assert pages(tabs)["rank 1"] == ["<pre>[a display of 200 bytes is left out]</pre>"]


def alone(text, stdout, stderr=0):
    return RankDisplay(
        rank=0, node="rig1", display=Display(data={"text/plain": text}, written=(stdout, stderr)), is_only_rank=True
    )


def test_a_single_ranks_display_waits_for_the_output_before_it():
    """A chunk with output from before and after is split there, also within a character's bytes."""
    order = DisplayOrder()
    shown = alone("d", len("é\n".encode()))
    order.add(shown)
    assert order.pop_due() == []
    parts = order.split([0, "stdout", 1, "é\nafter\n"])
    assert (next(parts), order.pop_due()) == ([0, "stdout", 1, "é\n"], [shown])
    assert (list(parts), order.pop_due()) == ([[0, "stdout", 1, "after\n"]], [])
    later = alone("e", 100, 2)
    order.add(later)
    assert list(order.split([0, "stdout", 1, None, 91])) == [[0, "stdout", 1, None, 91]]
    assert order.pop_due() == []
    assert list(order.split([0, "stderr", 1, "ab"])) == [[0, "stderr", 1, "ab"]]
    assert order.pop_due() == [later]
    missing = alone("f", 10_000)
    order.add(missing)
    assert (order.pop_due(), order.pop_due(everything=True)) == ([], [missing])


def test_displays_of_several_ranks_do_not_wait():
    """They have a place of their own."""
    order = DisplayOrder()
    order.add(show(0, "a", written=(5, 5)))
    assert len(order.pop_due()) == 1
