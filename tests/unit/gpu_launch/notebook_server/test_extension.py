"""What a notebook's server reports to the broker while it is suspended."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from unittest.mock import Mock

import pytest

from gpu_launch.notebook_server import activity, extension
from gpu_launch.notebook_server.extension import IdleReporter
from gpu_launch.notebook_server.programs import UserPrograms


class Notebook:
    """A reporter whose container runs programs of these names, and what the broker was told and answers."""

    def __init__(self) -> None:
        self.programs: set[str] = set()
        self.suspension: dict[str, Any] | None = None
        server = Mock()
        server.web_app.settings = {"started": datetime.now(UTC)}
        server.kernel_manager.list_kernels.return_value = server.kernel_manager.list_kernel_ids.return_value = []
        self._broker = Mock(**{"report_activity.side_effect": self._answer})
        self._reporter = IdleReporter(server, self._broker, "l1")

    async def report(self) -> bool:
        """Return whether the notebook says that it is busy, with which a suspended one asks for its GPU."""
        await self._reporter.report()
        return bool(self._broker.report_activity.call_args.kwargs["is_busy"])

    def _answer(self, _lease: str, **_state: Any) -> dict[str, Any]:
        return {"idle": None, "report_in_s": 2.0, "suspension": self.suspension}


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Notebook:
    notebook = Notebook()

    def find_programs(**_ids: Any) -> UserPrograms:
        return UserPrograms(running=frozenset(notebook.programs), used_at=None)

    monkeypatch.setattr(extension, "find_programs", find_programs)
    monkeypatch.setattr(activity, "has_ranks", lambda: False)
    return notebook


async def test_program_that_starts_while_it_is_suspended_asks_for_the_gpu(notebook: Notebook) -> None:
    """Not one that its owner has left running: the notebook would never lend its GPU then."""
    notebook.programs = {"editor"}
    assert not await notebook.report()
    notebook.suspension = {"state": "suspended"}
    assert not await notebook.report()
    assert not await notebook.report()
    notebook.programs = {"editor", "training"}
    assert await notebook.report()


async def test_program_that_started_just_before_it_was_suspended_asks_too(notebook: Notebook) -> None:
    """The broker did not know of it: it had no report with it."""
    assert not await notebook.report()
    notebook.programs = {"training"}
    notebook.suspension = {"state": "suspending"}
    assert not await notebook.report()
    assert await notebook.report()
