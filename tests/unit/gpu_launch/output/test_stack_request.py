"""Requests for stacks as files in a run's folder."""

from __future__ import annotations

import json
import threading

import pytest

from gpu_launch.common.run_folder import RunFolder
from gpu_launch.errors import LaunchFailed
from gpu_launch.output import stack_request
from gpu_launch.output.stacks import RankStacks

FOUND = [RankStacks(rank=0, node="rig1", problem="has ended")]


@pytest.fixture
def run(tmp_path):
    return RunFolder(root=tmp_path)


def test_a_request_is_taken_once_and_answered(run):
    """The answer is private, and nothing of it stays."""
    taken = []

    def serve():
        while not taken:
            if (request := stack_request.pop(run)) is not None:
                taken.append(stack_request.pop(run))
                stack_request.answer(run, request, FOUND)
                taken.append(run.stacks.stat().st_mode & 0o777)

    thread = threading.Thread(target=serve)
    thread.start()
    answer = stack_request.ask(run)
    thread.join()
    assert answer["text"] == "where the rank is:\n  rank 0: has ended (rig1)\n"
    assert answer["groups"][0]["ranks"] == [0]
    assert taken[0] is None
    assert list(run.root.iterdir()) == []


@pytest.mark.parametrize("text", ["../../x", "A" * 16, "0" * 80])
def test_other_contents_are_no_request(run, text):
    """They are removed, so that they are read once."""
    run.stacks_request.write_text(text)
    assert stack_request.pop(run) is None
    assert not run.stacks_request.exists()


@pytest.mark.parametrize("part", ["", "0" * 15])
def test_a_request_that_is_being_written_is_not_lost(run, part):
    run.stacks_request.write_text(part)
    assert stack_request.pop(run) is None
    run.stacks_request.write_text("0" * 16)
    assert stack_request.pop(run) == "0" * 16


def test_answers_to_earlier_requests_do_not_count():
    assert stack_request.parse(json.dumps({"request": "a"}).encode(), "a") == {"request": "a"}
    assert stack_request.parse(json.dumps({"request": "b"}).encode(), "a") is None
    assert stack_request.parse(b"{", "a") is None


def test_a_run_that_does_not_answer_is_named(run):
    with pytest.raises(LaunchFailed, match="did not answer within 0 s: its ranks are not running yet"):
        stack_request.ask(run, limit_s=0.0)
    assert list(run.root.iterdir()) == []


def test_a_removed_run_is_an_error(run, tmp_path):
    with pytest.raises(LaunchFailed, match=r"stacks\.request cannot be written: No such file"):
        stack_request.ask(RunFolder(root=tmp_path / "gone"))
