"""The panel of a notebook, the line of a terminal, and how often they change."""

from __future__ import annotations

import io
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from gpu_launch.output.panel import NotebookScreen, PanelView, RankState, TextScreen, build_html, build_line
from gpu_launch.output.progress_bars import ProgressBar
from gpu_launch.worker.gpu_monitor import GpuSample

CARD = GpuSample(node="rig1", uuid="GPU-1a2b3c", model="RTX 5090", use_percent=93, memory_mib=31_500, memory_total_mib=32_607,
            power_w=512, power_limit_w=575)  # fmt: skip
VIEW = PanelView(
    bars=(ProgressBar(text="train", step=45, total=100, remaining_s=15, note="3.6it/s"),),
    gpus=(CARD, GpuSample(node="rig2", model="RTX 5070")),
    ranks={RankState.RUNNING: (1, 2), RankState.FINISHED: (0,)},
)
CLOSING = PanelView(is_closing=True)


class _Reader(HTMLParser):
    """The tags, and the text besides the style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.meters: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.meters += [dict(attrs)] if dict(attrs).get("role") == "meter" else []

    def handle_data(self, data):
        self.text += f"{data} " if self.tags[-1] != "style" else ""


def test_panel_states_everything_as_text():
    """No bar is the only sign of what it shows."""
    text = " ".join(_Reader(build_html("running on rig1", VIEW, "12 s")).text.split())
    for part in (
        "running on rig1 12 s", "train 45 of 100 (45 %) · 15 s left 3.6it/s", "rig1 RTX 5090 use 93 %",
        "memory ⚠ nearly full, 30.8 of 31.8 GiB power 512 of 575 W", "rig2 RTX 5070 use – memory – power –",
        "▶ ranks 1-2 running ✓ rank 0 finished",
    ):  # fmt: skip
        assert part in text


def test_bars_are_accessible_to_screen_readers():
    """As meters with names; none for what is not known."""
    meters = _Reader(build_html("x", VIEW, "")).meters
    values = [(meter["aria-label"], meter.get("aria-valuenow")) for meter in meters]
    assert values == [("train", "45"), ("use", "93"), ("memory", "97"), ("power", "89"),
                      ("use", None), ("memory", None), ("power", None)]  # fmt: skip


def test_only_the_summary_remains_after_the_end():
    """No bar of a launch that is over."""
    page = _Reader(build_html("done in 3.1 s · 3 ranks", CLOSING, ""))
    assert page.text.strip() == "done in 3.1 s · 3 ranks"
    assert page.meters == []


HOSTILE = st.text(alphabet="<>&\"'/= scriptonerror\x00", max_size=20)


@given(HOSTILE, HOSTILE, HOSTILE)
def test_panel_escapes_html(node, told, note):
    """Names of nodes and cards, descriptions of bars: no tag and no attribute comes of them."""

    def page(node, told, note):
        view = PanelView(
            bars=(ProgressBar(text=told, step=1, total=2, note=note),),
            gpus=(GpuSample(node=node, uuid=told, model=note, use_percent=1),),
            ranks={RankState.FAILED: (0,)},
        )
        return _Reader(build_html(told, view, note))

    # Without a note there is no place for one.
    assert page(node, told, note).tags == page("n", "t", note and "o").tags
    assert len(page(node, told, note).meters) == 4


def test_status_line_is_a_short_form_of_the_panel():
    """For terminals, and notebooks that show no HTML."""
    assert build_line("running on rig1", VIEW, "12 s") == (
        "running on rig1 · 12 s · train 45 of 100 (45 %), 15 s left, 3.6it/s · GPUs 93 %"
    )
    assert build_line("done", CLOSING, "") == "done"
    assert build_line("a\nb", PanelView(ranks={RankState.FAILED: (1,)}), "") == "a b · rank 1 failed"


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
