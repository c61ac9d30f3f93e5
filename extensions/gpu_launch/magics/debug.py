"""The magic `%gpu_debug`: the debugger on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_magic, magics_class

from gpu_launch.errors import UsageError
from gpu_launch.options import command, value_types

if TYPE_CHECKING:
    from gpu_launch.sessions.session_manager import SessionManager

_USAGE = (
    "%gpu_debug RANK: the debugger on a rank of this notebook's %%gpu_ranks, where its last cell failed. While a cell "
    "runs, breakpoint() in it opens the debugger below the cell. A launch or job that runs elsewhere is debugged in a "
    "terminal of JupyterLab: gpu-launch debug RUN --rank RANK."
)


@magics_class
class GpuDebugMagics(Magics):
    """`%gpu_debug`."""

    def __init__(self, shell: Any, find_session: Callable[[], SessionManager | None]) -> None:
        """`find_session` returns the notebook's rank session; None without one."""
        super().__init__(shell)
        self._find_session = find_session

    @line_magic
    def gpu_debug(self, line: str) -> None:
        """Debug one rank of this notebook's `%%gpu_ranks`, where its last cell failed: `%gpu_debug RANK`."""
        from gpu_launch.launch import debug_prompt

        words = command.split_line(line)
        if words in ([], ["-h"], ["--help"]):
            print(_USAGE)  # noqa: T201 - the help of a magic
            return
        rank = value_types.parse_number("%gpu_debug", words[0], least=0, most=value_types.MAX_RANK)
        session = self._find_session()
        if len(words) > 1 or session is None:
            run = words[1] if len(words) > 1 else "RUN"
            raise UsageError(
                "This notebook has no ranks of %%gpu_ranks that wait for cells. A launch or job that runs is debugged "
                f"in a terminal of JupyterLab: gpu-launch debug {run} --rank {rank}. %gpu_status names your runs."
            )
        if not debug_prompt.can_type():
            raise UsageError("%gpu_debug needs a notebook or terminal in which a person can type.")
        session.debug(rank)
