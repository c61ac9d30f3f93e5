"""Which of the ranks that stop is debugged, and what others are told to do."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_launch.common.launch_spec import Membership
from gpu_launch.launch import debug_prompt
from gpu_launch.launch.debug_prompt import DebugPrompt
from gpu_launch.output.rank_monitor import StoppedRank
from gpu_launch.worker import agent
from gpu_launch.worker.debugger_client import DebuggerAnswer


class FakeLaunch:
    """Agents, ranks and screen of a launch with two ranks on each of two nodes."""

    def __init__(self) -> None:
        self.membership = Membership(includes_notebook=True, workers=(0,), nodes=("rig2",), nproc_per_node=2)
        self.stops: list[StoppedRank] = []
        self.calls: list[tuple[Any, ...]] = []
        self.answers: list[DebuggerAnswer] = []
        self.text = ""

    def stop(self, *ranks: int) -> None:
        self.stops += [StoppedRank(rank=rank, node=f"rig{1 + rank // 2}", place="t.py:3", detail="") for rank in ranks]

    def pop_stops(self) -> list[StoppedRank]:
        stops, self.stops = self.stops, []
        return stops

    def call(self, participant: int | None, function: Any, *arguments: Any) -> FakeLaunch:
        self.calls.append((participant, function.__name__, *arguments[1:]))
        return self

    def ready(self) -> bool:
        return True

    def wait(self, participant: int | None, call: Any, *, limit_s: float) -> dict[str, Any]:
        return vars(self.answers.pop(0))

    def write(self, _stream: str, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.fixture
def launch() -> FakeLaunch:
    return FakeLaunch()


@pytest.fixture
def prompt(launch: FakeLaunch) -> DebugPrompt:
    return DebugPrompt(
        "run-1", "run-0", agents=launch, ranks=launch, screen=launch, show_output=lambda: None, chosen=None
    )


@pytest.mark.parametrize("is_person", [True, False])
def test_the_first_rank_is_debugged_and_the_others_continue(
    launch: FakeLaunch, prompt: DebugPrompt, monkeypatch: pytest.MonkeyPatch, is_person: bool
) -> None:
    """Those that stop a moment later count as well."""
    monkeypatch.setattr(debug_prompt, "can_type", lambda: is_person)
    launch.stop(2)
    prompt.poll(10.0)
    assert launch.calls == []
    launch.stop(1, 3)
    prompt.poll(10.4)
    prompt.poll(10.6)
    assert launch.calls == [(0, agent.continue_ranks.__name__, (2, 3))]
    assert launch.text.startswith("gpu_launch: rank 1 on rig1 stopped at t.py:3; ranks 2-3, which stopped as well, ")
    assert ("gpu-launch debug run-0 --rank 1\n" in launch.text) == (not is_person)
    assert ("c continues" in launch.text) == is_person


def test_the_rank_at_hand_stays_and_is_left_for_another(
    launch: FakeLaunch, prompt: DebugPrompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debug_prompt, "can_type", lambda: True)
    typed = iter(["n", "c"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(typed))
    launch.stop(3)
    prompt.poll(0.0)
    prompt.poll(1.0)
    launch.answers = [DebuggerAnswer(text="-> x\n", is_ready=True), DebuggerAnswer(text="-> y\n", is_ready=True)]
    prompt.poll(2.0)
    prompt.poll(3.0)
    assert [call[-1] for call in launch.calls] == [None, "n", "c"]
    assert launch.text.endswith("-> x\n-> y\n")
    launch.answers = [DebuggerAnswer()] * 4
    launch.stop(0, 3)
    prompt.poll(4.0)
    prompt.poll(5.0)
    assert launch.calls[-1] == (None, agent.continue_ranks.__name__, (0,))
    launch.stop(1)
    prompt.poll(6.0)
    prompt.poll(7.0)
    assert launch.calls[-1] == (0, agent.leave_debugger.__name__, 3)
    assert "the debugger of rank 3 is left\n" in launch.text
    launch.answers = [DebuggerAnswer(text="gone\n", is_over=True)]
    prompt.poll(8.0)
    count = len(launch.calls)
    prompt.poll(9.0)
    assert len(launch.calls) == count, "an ended conversation is not polled"
