"""The states of a launch."""

from __future__ import annotations

import pytest

from gpu_launch.launch.state import TRANSITIONS, LaunchState, check_transition


def test_every_state_can_end_and_the_end_is_final():
    """So that an interrupt can come at any time, and a launch ends once."""
    assert set(TRANSITIONS) == set(LaunchState)
    for state, following in TRANSITIONS.items():
        assert (LaunchState.ENDED in following) == (state is not LaunchState.ENDED)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (LaunchState.RUNNING, LaunchState.STARTING),
        (LaunchState.CHANGING_MEMBERS, LaunchState.RUNNING),
        (LaunchState.RUNNING, LaunchState.RUNNING),
        (LaunchState.ENDED, LaunchState.RESTARTING),
    ],
)
def test_invalid_transitions_raise(before, after):
    """They name both states."""
    with pytest.raises(RuntimeError, match=f"from {before} to {after}"):
        check_transition(before, after)
