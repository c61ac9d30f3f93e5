"""Cells of a suspended notebook: held in their order, sent on also without their browser, and forgotten with their kernel."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpu_launch.notebook_server.held_cells import HeldCells, find_channel, is_execute_request


def text(kind: str, channel: str = "shell", number: int = 1) -> str:
    return json.dumps({"channel": channel, "header": {"msg_type": kind, "msg_id": str(number)}, "content": {}})


def binary(kind: str, channel: str = "shell") -> bytes:
    from jupyter_server.services.kernels.connection.base import serialize_msg_to_ws_v1

    parts = [json.dumps(part).encode() for part in ({"msg_type": kind}, {}, {}, {})]
    return bytes(serialize_msg_to_ws_v1(parts, channel))


class Kernel:
    """A kernel manager, with what the kernel has received by its own channels."""

    def __init__(self, pid: int) -> None:
        self.provisioner = type("Provisioner", (), {"pid": pid})()
        self.has_kernel = True
        self.received: list[Any] = []

    def connect_shell(self, identity: str) -> Shell:
        return Shell(self)


class Shell:
    """A channel to a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.is_closed = False

    def closed(self) -> bool:
        return self.is_closed

    def flush(self) -> None:
        """Send nothing: all is sent at once."""

    def close(self) -> None:
        self.is_closed = True


class Connection:
    """The part of the server's class that is used; `page` is the session's id."""

    subprotocol = "v1"

    def __init__(self, parent: Kernel, page: str = "page") -> None:
        self.parent = parent
        self.session = type("Session", (), {"session": page, "bsession": page.encode()})()
        self.channels = {"shell": Shell(parent)}
        self.is_open = True

    @property
    def sent(self) -> list[Any]:
        return self.parent.received

    def connect(self) -> None:
        self.is_open = True

    def handle_incoming_message(self, incoming_msg: Any) -> None:
        shell = self.channels.get("shell")
        assert shell is not None
        assert not shell.is_closed
        shell.kernel.received.append(incoming_msg)

    def disconnect(self) -> None:
        self.is_open = False


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def held(calls: list[str]) -> HeldCells:
    return HeldCells(lambda: calls.append("a cell waits"))


@pytest.mark.parametrize("form", [text, binary])
def test_cells_wait_in_their_order_and_what_follows_them_too(held: HeldCells, calls: list[str], form: Any) -> None:
    """Nothing overtakes a cell on its channel; interrupts, input and completions before it are sent at once."""
    connection = held.build_connection_class(Connection)(Kernel(7))
    before, first, between, second = (
        form("complete_request"),
        form("execute_request"),
        form("comm_msg"),
        form("execute_request"),
    )
    interrupt = form("interrupt_request", "control")
    held.set_holding(True)
    for message in (before, first, between, interrupt, second):
        connection.handle_incoming_message(message)
    assert connection.sent == [before, interrupt]
    assert (held.is_waiting, calls) == (True, ["a cell waits", "a cell waits"])
    held.set_holding(False)
    assert connection.sent == [before, interrupt, first, between, second]
    assert not held.is_waiting
    connection.handle_incoming_message(first)
    assert connection.sent[-1] is first


def test_without_a_suspension_nothing_waits(held: HeldCells, calls: list[str]) -> None:
    connection = held.build_connection_class(Connection)(Kernel(7))
    connection.handle_incoming_message(text("execute_request"))
    assert (len(connection.sent), held.is_waiting, calls) == (1, False, [])


def test_cells_for_a_kernel_that_was_restarted_are_forgotten(held: HeldCells) -> None:
    """As Jupyter forgets those that a kernel has not begun."""
    kernel = Kernel(7)
    connection = held.build_connection_class(Connection)(kernel)
    held.set_holding(True)
    connection.handle_incoming_message(text("execute_request"))
    kernel.provisioner.pid = 8
    held.set_holding(False)
    assert connection.sent == []


@pytest.mark.parametrize("channel", ["kept", "closed", "none"])
def test_a_cell_runs_without_its_browser(held: HeldCells, channel: str) -> None:
    """As a running one does: by the channel that the server keeps for the browser, or another one."""
    connection = held.build_connection_class(Connection)(Kernel(7))
    held.set_holding(True)
    connection.handle_incoming_message(text("execute_request"))
    connection.disconnect()
    if channel == "closed":
        connection.channels["shell"].close()
    if channel == "none":
        connection.channels = {}
    assert (held.is_waiting, connection.is_open, connection.sent) == (True, False, [])
    held.set_holding(False)
    assert connection.sent == [text("execute_request")]
    assert connection.channels["shell"].is_closed is (channel != "kept")
    assert not held.is_waiting


@pytest.mark.parametrize(("page", "is_closed"), [("page", True), ("page", False), ("reloaded", True)])
def test_the_next_connection_takes_over_what_waits(held: HeldCells, page: str, is_closed: bool) -> None:
    """Of the same page, also if the server has not noticed that the last one is gone; before its own cells."""
    build, kernel = held.build_connection_class(Connection), Kernel(7)
    lost, other = build(kernel), build(Kernel(8))
    held.set_holding(True)
    lost.handle_incoming_message(text("execute_request", number=1))
    if is_closed:
        lost.disconnect()
    back = build(kernel, page)
    for connection in (other, back):
        connection.connect()
    back.handle_incoming_message(text("execute_request", number=2))
    lost.disconnect()
    held.set_holding(False)
    assert back.sent == [text("execute_request", number=1), text("execute_request", number=2)]
    assert other.sent == []


def test_another_page_takes_over_nothing_from_an_open_one(held: HeldCells) -> None:
    build, kernel = held.build_connection_class(Connection), Kernel(7)
    first, second = build(kernel), build(kernel, "another")
    held.set_holding(True)
    first.handle_incoming_message(text("execute_request"))
    second.connect()
    assert (first.holds_cells, second.holds_cells) == (True, False)


def test_a_cell_of_a_kernel_that_has_ended_waits_for_nothing(held: HeldCells) -> None:
    """Otherwise a GPU would come back without need."""
    kernel = Kernel(7)
    connection = held.build_connection_class(Connection)(kernel)
    held.set_holding(True)
    connection.handle_incoming_message(text("execute_request"))
    connection.disconnect()
    kernel.has_kernel = False
    assert not held.is_waiting
    held.set_holding(False)
    assert connection.sent == []


def test_both_formats_are_understood() -> None:
    for form in (text, binary):
        assert (find_channel(form("execute_request")), is_execute_request(form("execute_request"))) == ("shell", True)
        assert (find_channel(form("interrupt_request", "control")), is_execute_request(form("comm_open"))) == (
            "control",
            False,
        )
