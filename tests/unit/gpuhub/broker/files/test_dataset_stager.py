"""Which error of a chain of staging containers is shown."""

from __future__ import annotations

import pytest

from gpuhub.broker.files.dataset_stager import find_cause
from gpuhub.docker.containers.staging_container import StagingFailed, StagingSpec

SPECS = [StagingSpec(name=f"stage-{node}", node=node, task={}, mounts=()) for node in ("rig1", "rig2")]
LATE = StagingFailed("node rig2: the previous node did not connect within 120 s")
FULL = StagingFailed("node rig1: the disk is full")


@pytest.mark.parametrize(
    ("results", "text"),
    [
        ([FULL, LATE], "node rig1: the disk is full"),
        ([{"done": True, "next_error": None}, LATE], "node rig2: the previous node did not connect within 120 s"),
        (
            [{"done": True, "next_error": "the next node cannot be reached: Name or service not known"}, LATE],
            "node rig2: the previous node did not connect within 120 s; "
            "node rig1: the next node cannot be reached: Name or service not known",
        ),
    ],
)
def test_cause_is_shown(results: list[object], text: str) -> None:
    """The node that failed by itself, else what each side says of their connection."""
    assert str(find_cause(SPECS, results)) == text
