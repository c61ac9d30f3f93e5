"""Holds the cells of a suspended notebook until it has its GPU back.

Without that, a kernel that has not used its GPU yet would see none, and a script would silently continue without it.

A cell that waits survives its connection, as one that runs does: when the page connects again its connection takes it
over. Until then the server keeps what the kernel answers, if no other page is connected to the kernel.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any


class HeldCells:
    """The cells that wait, over all connections of browsers to kernels."""

    def __init__(self, on_hold: Callable[[], None]) -> None:
        """`on_hold` is called for each cell that has to wait."""
        self._on_hold = on_hold
        #: The connections with cells that wait, in their order.
        self._connections: dict[Any, None] = {}
        self._is_holding = False

    @property
    def is_waiting(self) -> bool:
        """Whether a cell waits for a kernel that lives."""
        return any(connection.holds_cells for connection in self._connections)

    def set_holding(self, is_holding: bool) -> None:
        """Begin to hold cells, or let all continue in their order."""
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
                self._is_lost = False
                self._format: Any = None

            @property
            def subprotocol(self) -> Any:
                """The format of the browser's messages, which its handler forgets with the connection."""
                return self._format if self._is_lost else super().subprotocol

            @property
            def holds_cells(self) -> bool:
                return any(is_running(self.parent, process) for _, process in self._held)

            def connect(self) -> Any:
                """Take over what waits in lost connections to the same kernel, and continue as usual."""
                for other in [one for one in held._connections if one.is_followed_by(self)]:
                    held._connections.pop(other)
                    self._held += other._held
                    self._format = other._format
                    other._held.clear()
                    held._connections[self] = None
                return super().connect()

            def is_followed_by(self, other: Any) -> bool:
                """Return whether another connection can send what waits here, in the format of its browser."""
                is_over = self._is_lost or self.session.session == other.session.session
                return is_over and self.parent is other.parent and self._format == other.subprotocol

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
                    self._format = self.subprotocol
                    held._connections[self] = None
                    if is_cell:
                        held._on_hold()

            def release(self) -> None:
                """Send on what was held, unless its kernel was restarted or ended meanwhile."""
                held._connections.pop(self, None)
                messages = [message for message, process in self._held if is_running(self.parent, process)]
                self._held.clear()
                with self._open_shell() if messages and self._is_lost else nullcontext():
                    for message in messages:
                        super().handle_incoming_message(message)

            @contextmanager
            def _open_shell(self) -> Iterator[None]:
                """Ensure a channel to the kernel: that in which the server keeps the answers, or another without it."""
                kept = getattr(self, "channels", {}).get("shell")
                if kept is not None and not kept.closed():
                    yield
                    return
                shell = self.parent.connect_shell(identity=self.session.bsession)
                self.channels = {"shell": shell}
                yield
                shell.flush()
                shell.close()

            def disconnect(self) -> None:
                """Keep what was held: its browser may come back, and a running cell continues as well."""
                self._is_lost = True
                super().disconnect()

        return HoldingConnection


def is_running(manager: Any, process: Any) -> bool:
    """Return whether a kernel lives and has not been restarted since it had this process id."""
    return bool(getattr(manager, "has_kernel", True)) and find_process(manager) == process


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
