"""Which cells run in the server's kernels, by the kernels' own messages.

The server's `execution_state` is not enough: with ipykernel's subshells, a widget's message in the middle of a cell
ends with the state idle. Here the state belongs to the request that it names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Stands for a cell that began before its kernel was watched.
_EARLIER = ""


class RunningCells:
    """The cells of one kernel that have begun and not ended."""

    def __init__(self, *, is_busy: bool) -> None:
        """`is_busy` is whether the kernel is busy when the watch begins."""
        self._running = {_EARLIER} if is_busy else set()

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    def update(self, header: dict[str, Any], parent: dict[str, Any], content: dict[str, Any]) -> bool:
        """Record a message from the kernel; return whether a cell begins with it."""
        if header.get("msg_type") != "status":
            return False
        state, cell = content.get("execution_state"), parent.get("msg_id", "")
        is_cell = parent.get("msg_type") == "execute_request"
        if state == "starting":
            self._running.clear()
        elif is_cell and state == "idle":
            self._running -= {cell, _EARLIER}
        elif is_cell and state == "busy":
            self._running.add(cell)
            return True
        return False


class CellWatch:
    """Follows the messages of all kernels of a server."""

    def __init__(self, kernel_manager: Any, on_start: Callable[[], None]) -> None:
        """`on_start` is called whenever a cell begins."""
        self._kernel_manager = kernel_manager
        self._on_start = on_start
        #: Kernel id → its manager, the stream of its messages, and its cells.
        self._watched: dict[str, tuple[Any, Any, RunningCells]] = {}

    @property
    def is_running(self) -> bool:
        """Whether a cell runs in one of the kernels."""
        return any(cells.is_running for _, _, cells in self._watched.values())

    def refresh(self) -> None:
        """Watch kernels that are new, and forget those that are gone."""
        managers = {
            kernel: self._kernel_manager.get_kernel(kernel) for kernel in self._kernel_manager.list_kernel_ids()
        }
        for kernel, (manager, stream, _) in list(self._watched.items()):
            if managers.get(kernel) is not manager or stream.closed():
                if not stream.closed():
                    stream.close()
                del self._watched[kernel]
        for kernel, manager in managers.items():
            if kernel not in self._watched and getattr(manager, "has_kernel", True):
                self._watched[kernel] = self._watch(manager)

    def _watch(self, manager: Any) -> tuple[Any, Any, RunningCells]:
        from jupyter_client.session import Session

        session = Session(config=manager.session.config, key=manager.session.key)
        cells = RunningCells(is_busy=getattr(manager, "execution_state", "") == "busy")
        stream = manager.connect_iopub()

        def receive(parts: list[bytes]) -> None:
            message = session.deserialize(session.feed_identities(parts)[1])
            if cells.update(message["header"], message["parent_header"] or {}, message["content"]):
                self._on_start()

        stream.on_recv(receive)
        return manager, stream, cells
