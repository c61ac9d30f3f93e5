"""The display of long steps, and the comparison of images."""

import io

from gpuhub.ops.images.distribution import is_same_image
from gpuhub.ops.images.progress import ProgressStep, ProgressTerminal, format_step

IMAGE = {"Id": "sha256:1", "RootFS": {"Layers": ["sha256:a"]}, "Config": {"Env": ["A=1"], "Cmd": ["x"]}}


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_plain_log_gets_a_line_every_few_seconds():
    """A step that reports a thousand times must not fill a log."""
    stream, clock = io.StringIO(), Clock()
    show = ProgressTerminal(stream, clock=clock)
    for tenth in range(120):
        clock.now = tenth / 10
        show(ProgressStep(label="rig1: image", done=tenth * 10_000_000, total=1_200_000_000))
    show(ProgressStep(label="rig1: image", text="sent", is_finished=True))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[1] == "  … rig1: image  500 of 1200 MB (41 %)"
    assert lines[-1] == "  ✓ rig1: image  sent  (11.9 s)"


def test_a_terminal_shows_parallel_steps_in_one_line():
    """A finished step gets its own line, and the others continue below it."""
    stream, clock = io.StringIO(), Clock()
    show = ProgressTerminal(stream, is_live=True, clock=clock)
    show(ProgressStep(label="rig2", done=1_000_000, total=4_000_000))
    clock.now = 1.0
    show(ProgressStep(label="rig3", done=2_000_000, total=4_000_000))
    show(ProgressStep(label="rig2", is_finished=True))
    parts = stream.getvalue().split("\r\x1b[2K")
    assert parts[2] == "  … rig2  1 of 4 MB (25 %) | rig3  2 of 4 MB (50 %)"
    assert parts[3] == "  ✓ rig2  (1.0 s)\n"
    assert parts[4] == "  … rig3  2 of 4 MB (50 %)"


def test_progress_never_claims_to_be_done_early():
    """The total is an estimate."""
    assert "(99 %)" in format_step(ProgressStep(label="x", done=7_000_000, total=5_000_000))


def test_images_are_the_same_by_id_or_by_content():
    """Ids differ between daemons with different image stores."""
    assert is_same_image(IMAGE, {**IMAGE, "RootFS": {}, "Config": {}})
    assert is_same_image(IMAGE, {**IMAGE, "Id": "sha256:2"})
    assert not is_same_image(IMAGE, {**IMAGE, "Id": "sha256:2", "Config": {"Env": ["A=2"], "Cmd": ["x"]}})
    assert not is_same_image(IMAGE, None)
