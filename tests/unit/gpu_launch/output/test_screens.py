"""The panel of a notebook and the line of a terminal: how often they change, and what stays."""

from __future__ import annotations

import io

from gpu_launch.common.displays import Display
from gpu_launch.output.display_tabs import RankDisplay
from gpu_launch.output.panel import PanelView
from gpu_launch.output.progress_bars import ProgressBar
from gpu_launch.output.screens import NotebookScreen, TextScreen
from gpu_launch.worker.gpu_monitor import GpuSample

CARD = GpuSample(node="rig1", model="RTX 5090", use_percent=93)
VIEW = PanelView(bars=(ProgressBar(text="train", step=45, total=100, remaining_s=15),), gpus=(CARD,))
CLOSING = PanelView(is_closing=True)


class _Handle:
    """IPython's DisplayHandle, remembering."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def display(self, data, *, raw):
        assert raw
        assert not self.shown
        self.shown.append(data)

    def update(self, data, *, raw):
        assert raw
        self.shown.append(data)


class _Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_notebooks_panel_changes_at_most_once_a_second():
    """However often it is told; both as HTML and as text. The summary is shown at once."""
    clock, handle = _Clock(), _Handle()
    screen = NotebookScreen(lambda: handle, clock)
    for tick in range(100):
        clock.now = tick * 0.05
        screen.show_progress(f"running {tick}", phase="running")
        screen.show_panel(VIEW)
    assert len(handle.shown) == 5
    assert handle.shown[-1]["text/plain"].startswith("gpu_launch: running 8")
    assert "4 s" in handle.shown[-1]["text/html"]
    screen.show_progress("done")
    screen.show_panel(CLOSING)
    screen.show_panel(CLOSING)
    assert len(handle.shown) == 6
    assert handle.shown[-1]["text/plain"] == "gpu_launch: done"


def test_tabs_change_at_most_five_times_a_second():
    """Large ones more seldom; the last state is shown, and nothing where it is on the screen already."""
    clock, handle = _Clock(), _Handle()
    screen = NotebookScreen(lambda: handle, clock)
    for tick in range(1001):
        clock.now = tick / 1000
        screen.show_displays([RankDisplay(rank=1, node="rig1", display=Display(data={"text/html": f"<{tick}>"}))])
    assert 5 <= len(handle.shown) <= 6
    screen.show_displays((), last=True)
    screen.show_displays((), last=True)
    assert len(handle.shown) <= 7
    assert "<1000>" in handle.shown[-1]["text/html"]
    shown = len(handle.shown)
    for tick in range(100):
        clock.now = 2 + tick / 10
        screen.show_displays(
            [RankDisplay(rank=1, node="rig1", display=Display(data={"text/html": f"{tick}" * 4_000_000}))]
        )
    assert len(handle.shown) - shown <= 5


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def render_terminal(text):
    """The lines that a terminal shows in the end."""
    return [line.split("\r\x1b[K")[-1] for line in text.split("\n")]


def test_a_terminals_line_stays_below_the_ranks_lines():
    """It is drawn again after them, and the summary stays."""
    out, clock = _Terminal(), _Clock()
    screen = TextScreen(out, out, clock)
    screen.show_progress("running", phase="running")
    screen.show_panel(VIEW)
    screen.write("stdout", "[rank 0 · rig1] a\n")
    screen.write("stderr", "[rank 0 · rig1] b\n")
    screen.flush()
    clock.now = 2.0
    screen.show_panel(VIEW)
    assert render_terminal(out.getvalue())[:2] == ["[rank 0 · rig1] a", "[rank 0 · rig1] b"]
    assert render_terminal(out.getvalue())[2].startswith("gpu_launch: running · 2 s · train 45 of 100")
    screen.show_progress("freeing the GPUs")
    screen.show_panel(CLOSING)
    screen.show_progress("done in 3.1 s")
    screen.show_panel(CLOSING)
    screen.show_panel(CLOSING)
    assert render_terminal(out.getvalue())[2:] == ["gpu_launch: freeing the GPUs", "gpu_launch: done in 3.1 s", ""]


def test_a_line_is_no_longer_than_the_terminal(monkeypatch):
    """Else it could not be drawn again in its place."""
    monkeypatch.setenv("COLUMNS", "30")
    out = _Terminal()
    screen = TextScreen(out, out, _Clock())
    screen.show_progress("x" * 100)
    screen.show_panel(VIEW)
    assert all(len(line) == 29 and line.endswith("…") for line in render_terminal(out.getvalue()))


def test_output_file_gets_one_line_per_change():
    """Not one for every second or step."""
    out, clock = io.StringIO(), _Clock()
    screen = TextScreen(out, out, clock)
    for step in range(100):
        clock.now = float(step)
        screen.show_progress("running", phase="running")
        screen.show_panel(PanelView(bars=(ProgressBar(step=step, total=100),), gpus=(CARD,)))
    screen.show_progress("done in 3.1 s")
    screen.show_panel(CLOSING)
    *lines, last = out.getvalue().splitlines()
    assert last == "gpu_launch: done in 3.1 s"
    assert len(lines) == 11
    assert lines[0] == "gpu_launch: running"
    assert lines[5] == "gpu_launch: running · 40 of 100 (40 %) · GPU 93 %"
