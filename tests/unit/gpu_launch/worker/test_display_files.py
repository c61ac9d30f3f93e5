"""The files of displays are read as they grow, emptied, and bounded."""

from __future__ import annotations

import pytest

from gpu_launch.common.displays import Display, DisplayKind
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.worker.display_files import PERIOD_S, DisplayFiles
from gpu_launch.worker.rank_displays import DisplayWriter


@pytest.fixture
def run(tmp_path):
    return RunFolder(root=tmp_path)


def texts(shown):
    return [(found.rank, found.display["data"]["text/plain"]) for found in shown]


def test_displays_are_read_in_order_and_the_file_is_emptied(run):
    """A line that is not complete waits for its rest; one that is no JSON is passed over."""
    now = 0.0
    files = DisplayFiles(run, [0, 1], clock=lambda: now)
    writer = DisplayWriter(str(run.display_file(1)))
    for text in ("a", "b"):
        writer.write(Display(data={"text/plain": text}))
    writer.write(Display(data={"text/plain": object()}))
    assert writer.count == 2
    assert texts(files.read()) == [(1, "a"), (1, "b")]
    assert run.display_file(1).stat().st_size == 0
    writer.write(Display(data={"text/plain": "c"}))
    with run.display_file(1).open("ab") as file:
        file.write(b"no JSON\n[]\n" + b'{"data": {"text/plain"')
    now += PERIOD_S
    assert texts(files.read()) == [(1, "c")]
    with run.display_file(1).open("ab") as file:
        file.write(b': "d"}}\n')
    now += PERIOD_S
    assert texts(files.read()) == [(1, "d")]
    assert files.read() == []
    files.close()


def test_updates_in_between_are_left_out(run):
    """Of a thousand updates in a second ten or so are sent, the last one among them; all are counted."""
    now = 0.0
    files = DisplayFiles(run, [0], clock=lambda: now)
    writer = DisplayWriter(str(run.display_file(0)))
    writer.write(Display(data={"text/plain": "first"}, display_id="a"))
    sent = []
    for number in range(1000):
        writer.write(Display(kind=DisplayKind.UPDATE, data={"text/plain": str(number)}, display_id="a"))
        now = number / 1000
        sent += files.read()
    now += PERIOD_S
    sent += files.read()
    assert len(sent) <= 12
    assert [texts([found])[0][1] for found in (sent[0], sent[-1])] == ["first", "999"]
    assert sum(found.count for found in sent) == writer.count == 1001
    assert files.read(everything=True) == []
    files.close()


def test_displays_of_a_single_rank_do_not_wait(run):
    """They have a place among its lines; updates have none."""
    files = DisplayFiles(run, [0], is_only_rank=True, clock=lambda: 0.0)
    writer = DisplayWriter(str(run.display_file(0)))
    writer.write(Display(data={"text/plain": "a"}))
    assert texts(files.read()) == [(0, "a")]
    writer.write(Display(kind=DisplayKind.UPDATE, data={"text/plain": "u"}, display_id="a"))
    assert files.read() == []
    writer.write(Display(data={"text/plain": "b"}))
    assert texts(files.read()) == [(0, "u"), (0, "b")]
    files.close()


def test_what_is_cleared_before_it_is_sent_is_left_out(run):
    """A clear that waits does so with the display that follows; updates may be of displays of other cells."""
    files = DisplayFiles(run, [0])
    writer = DisplayWriter(str(run.display_file(0)))
    clear = Display(kind=DisplayKind.CLEAR, wait=True)
    writer.write(Display(kind=DisplayKind.UPDATE, data={"text/plain": "u"}, display_id="a"))
    for text in "abc":
        writer.write(clear)
        writer.write(Display(data={"text/plain": text}))
    found = files.read(everything=True)
    assert [(item.display["kind"], item.display["data"].get("text/plain")) for item in found] == [
        ("update", "u"),
        ("clear", None),
        ("show", "c"),
    ]
    for _ in range(2):
        writer.write(clear)
    writer.write(Display(data={"text/plain": "d"}))
    for _ in range(2):
        writer.write(clear)
    assert [item.display["kind"] for item in files.read(everything=True)] == ["clear", "show", "clear"]
    writer.write(Display(data={"text/plain": "e"}))
    writer.write(Display(kind=DisplayKind.CLEAR))
    assert [item.display["kind"] for item in files.read(everything=True)] == ["clear"]
    files.close()


def test_a_rank_that_displays_too_much_is_bounded(run):
    """What is above the rate waits, the last update too; what does not fit into that is named with its size."""
    now = 0.0
    files = DisplayFiles(run, [0], clock=lambda: now)
    writer = DisplayWriter(str(run.display_file(0)))
    sent = []
    for _ in range(10):
        writer.write(Display(data={"text/plain": "x" * 8_000_000}))
        now += PERIOD_S
        sent += texts(files.read())
    assert [len(text) for _, text in sent] == [8_000_000] * 5
    writer.write(Display(kind=DisplayKind.UPDATE, data={"text/plain": "last"}, display_id="a"))
    sent = texts(files.read(everything=True))
    assert [len(text) for _, text in sent[:4]] == [8_000_000] * 4
    assert sent[4:] == [(0, "[a display of 8.0 MB is left out: too many large ones]"), (0, "last")]
    now += 60
    writer.write(Display(data={"text/plain": "x" * 8_000_000}))
    assert len(texts(files.read())[0][1]) == 8_000_000
    files.close()


def test_a_writer_without_its_file_writes_nothing(run):
    """When the launch is over."""
    writer = DisplayWriter(str(run.display_file(0)))
    writer.write(Display(data={"text/plain": "a"}))
    assert writer.count == 0
