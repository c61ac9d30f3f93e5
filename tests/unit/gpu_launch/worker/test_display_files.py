"""The files of displays are read as they grow, emptied, and bounded."""

from __future__ import annotations

import pytest

from gpu_launch.common.displays import Display
from gpu_launch.common.run_folder import RunFolder
from gpu_launch.worker.display_files import DisplayFiles
from gpu_launch.worker.rank_displays import DisplayWriter


@pytest.fixture
def run(tmp_path):
    return RunFolder(root=tmp_path)


def texts(shown):
    return [(rank, display["data"]["text/plain"]) for rank, display in shown]


def test_displays_are_read_in_order_and_the_file_is_emptied(run):
    """A line that is not complete waits for its rest; one that is no JSON is passed over."""
    files = DisplayFiles(run, [0, 1])
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
    assert texts(files.read()) == [(1, "c")]
    with run.display_file(1).open("ab") as file:
        file.write(b': "d"}}\n')
    assert texts(files.read()) == [(1, "d")]
    assert files.read() == []
    files.close()


def test_a_rank_that_displays_too_much_is_bounded(run):
    """The rest is named with its size, and it gets better with time."""
    now = 0.0
    files = DisplayFiles(run, [0], clock=lambda: now)
    writer = DisplayWriter(str(run.display_file(0)))
    shown = []
    for _ in range(5):
        writer.write(Display(data={"text/plain": "x" * 8_000_000}))
        shown += texts(files.read())
    assert [len(text) for _, text in shown[:4]] == [8_000_000] * 4
    assert shown[4] == (0, "[a display of 8.0 MB is left out: too many large ones]")
    now = 10.0
    writer.write(Display(data={"text/plain": "x" * 8_000_000}))
    assert len(texts(files.read())[0][1]) == 8_000_000
    files.close()


def test_a_writer_without_its_file_writes_nothing(run):
    """When the launch is over."""
    writer = DisplayWriter(str(run.display_file(0)))
    writer.write(Display(data={"text/plain": "a"}))
    assert writer.count == 0
