"""Holds the cells of a suspended notebook until it has its GPU back.

Without that, a kernel that has not used its GPU yet would see none, and a script would silently go on without it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any


class HeldCells:
    """The cells that wait, over all connections of browsers to kernels."""

    def __init__(self, on_hold: Callable[[], None]) -> None:
        """`on_hold` is called for each cell that has to wait."""
        self._on_hold = on_hold
        self._connections: set[Any] = set()
        self._is_holding = False

    @property
    def is_waiting(self) -> bool:
        """Whether a cell waits in an open connection."""
        return any(connection.holds_cells for connection in self._connections)

    def set_holding(self, is_holding: bool) -> None:
        """Begin to hold cells, or have all go on in their order."""
        self._is_holding = is_holding
        if not is_holding:
            for connection in list(self._connections):
                connection.release()

    def build_connection_class(self, base: type) -> type:
        """Return the server's class of connections to kernels, which holds cells."""
        held = self

        class HoldingConnection(base):  # type: ignore[misc] # the server's class, or a user's own
            """A connection of a browser to a kernel."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                #: Messages for the shell channel, with the process of the kernel that they are for.
                self._held: deque[tuple[Any, Any]] = deque()

            @property
            def holds_cells(self) -> bool:
                return bool(self._held)

            def handle_incoming_message(self, incoming_msg: Any) -> None:
                """Send a message on to the kernel, or keep a cell and what follows it."""
                is_cell = held._is_holding and is_execute_request(incoming_msg)
                if not self._held and not is_cell:
                    super().handle_incoming_message(incoming_msg)
                elif find_channel(incoming_msg) != "shell":
                    # Interrupts and answers to input do not wait.
                    super().handle_incoming_message(incoming_msg)
                else:
                    self._held.append((incoming_msg, find_process(self.parent)))
                    held._connections.add(self)
                    if is_cell:
                        held._on_hold()

            def release(self) -> None:
                """Send on what was held, unless its kernel was restarted meanwhile."""
                held._connections.discard(self)
                process = find_process(self.parent)
                messages, self._held = self._held, deque()
                for message, meant_for in messages:
                    if meant_for == process:
                        super().handle_incoming_message(message)

            def disconnect(self) -> None:
                """Forget what was held: its browser is gone."""
                self._held.clear()
                held._connections.discard(self)
                super().disconnect()

        return HoldingConnection


def find_process(manager: Any) -> Any:
    """Return the process id of a kernel, None if it is not known."""
    return getattr(getattr(manager, "provisioner", None), "pid", None)


def find_channel(message: Any) -> str:
    """Return the channel of a message from a browser, in either of Jupyter's formats."""
    if isinstance(message, bytes):
        from jupyter_server.services.kernels.connection.base import deserialize_msg_from_ws_v1

        return str(deserialize_msg_from_ws_v1(message)[0])
    return str(json.loads(message).get("channel"))


def is_execute_request(message: Any) -> bool:
    """Return whether a message from a browser runs a cell."""
    if isinstance(message, bytes):
        from jupyter_server.services.kernels.connection.base import deserialize_msg_from_ws_v1

        parts = deserialize_msg_from_ws_v1(message)[1]
        header = json.loads(parts[0])
    else:
        header = json.loads(message).get("header") or {}
    return bool(header.get("msg_type") == "execute_request")
