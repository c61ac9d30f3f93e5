"""The panel as HTML and as one line of text."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from gpu_launch.output.panel import PanelView, RankState, build_html, build_line
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
