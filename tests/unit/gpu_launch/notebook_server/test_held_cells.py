"""Cells of a suspended notebook: held in their order, sent on, and forgotten with their kernel or browser."""

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


class Connection:
    """The part of the server's class that is used."""

    def __init__(self, parent: Any) -> None:
        self.parent = parent
        self.sent: list[Any] = []
        self.is_open = True

    def handle_incoming_message(self, incoming_msg: Any) -> None:
        self.sent.append(incoming_msg)

    def disconnect(self) -> None:
        self.is_open = False


class Kernel:
    """A kernel manager."""

    def __init__(self, pid: int) -> None:
        self.provisioner = type("Provisioner", (), {"pid": pid})()


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


def test_a_browser_that_is_gone_waits_for_nothing(held: HeldCells) -> None:
    """Otherwise a GPU would come back without need."""
    connection = held.build_connection_class(Connection)(Kernel(7))
    held.set_holding(True)
    connection.handle_incoming_message(text("execute_request"))
    connection.disconnect()
    assert (held.is_waiting, connection.is_open) == (False, False)
    held.set_holding(False)
    assert connection.sent == []


def test_both_formats_are_understood() -> None:
    for form in (text, binary):
        assert (find_channel(form("execute_request")), is_execute_request(form("execute_request"))) == ("shell", True)
        assert (find_channel(form("interrupt_request", "control")), is_execute_request(form("comm_open"))) == (
            "control",
            False,
        )
