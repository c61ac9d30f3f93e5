"""Requests for the missing nodes of an elastic launch."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from gpu_launch.errors import LaunchFailed
from gpu_launch.launch import restart
from gpu_launch.launch.restart import ScaleUp
from gpu_launch.launch.workers.worker_group import BrokerWorkerGroup


def request_times(scale_up: ScaleUp, times: int) -> list[str]:
    """Let it request as often, and return its notes."""
    for _ in range(times):
        scale_up._due_at = 0.0
        scale_up.poll()
        assert scale_up._thread is not None
        scale_up._thread.join(10)
    return scale_up.pop_notes()


def test_reason_of_a_failed_request_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each reason in succession, however often it is tried, and again after a success."""
    monkeypatch.setattr(restart.time, "monotonic", lambda: 1e6)
    group: Any = Mock(spec=BrokerWorkerGroup)
    group.plan = Mock(nnodes=3)
    group.membership.return_value = Mock(nnodes=2)
    group.scale_up.side_effect = LaunchFailed("the broker answers 503")
    scale_up = ScaleUp(group)
    (note,) = request_times(scale_up, 3)
    assert note.endswith("the launch continues without: the broker answers 503")
    assert request_times(scale_up, 1) == []
    group.scale_up.side_effect = None
    group.scale_up.return_value = False
    assert request_times(scale_up, 1) == []
    group.scale_up.side_effect = LaunchFailed("the broker answers 503")
    assert request_times(scale_up, 2) == [note]
