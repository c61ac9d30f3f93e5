"""Output of a notebook that did not start, in the hub's log."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpuhub.common.log_text import CONTINUATION, MAX_OUTPUT_CHARACTERS
from gpuhub.spawners.docker.spawner import NodeSpawner


class FakeDaemons:
    """A daemon's logs of one container."""

    def __init__(self, output: bytes) -> None:
        self._output = output

    async def call(self, node: str, method: str, container: str, **options: Any) -> bytes:
        """Return the log."""
        assert (node, method, container, options) == ("rig1", "logs", "c1", {"tail": 40})
        return self._output


async def test_output_of_a_notebook_cannot_imitate_the_hubs_log(caplog: pytest.LogCaptureFixture) -> None:
    """The hub's log is the record of logins; a user writes only marked lines, and few."""
    forged = b"[I 2026-01-01 00:00:00.000 JupyterHub base:1 log_user_in] User logged in: root\n"
    spawner = SimpleNamespace(
        object_id="c1", node="rig1", daemons=FakeDaemons(forged * 5000 + b"\x1b[2J\xff\n"), log=logging.getLogger("hub"),
        _log_name="ada",
    )  # fmt: skip
    await NodeSpawner.log_output(cast("NodeSpawner", spawner))
    (record,) = caplog.records
    first, *lines = record.getMessage().split("\n")
    assert first == "Last output of the container of ada:"
    assert len(record.getMessage()) < MAX_OUTPUT_CHARACTERS + 100
    assert all(line.startswith(CONTINUATION) and line.isprintable() for line in lines)
    assert lines[-1] == CONTINUATION + "\\x1b[2J\N{REPLACEMENT CHARACTER}"
