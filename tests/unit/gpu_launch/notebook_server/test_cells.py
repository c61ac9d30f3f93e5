"""Which cells run, from messages as ipykernel 7.4 sends them, signed by jupyter_client as a kernel does."""

from __future__ import annotations

from typing import Any

from jupyter_client.session import Session

from gpu_launch.notebook_server.cells import CellWatch, RunningCells


def tell(cells: RunningCells, state: str, request: str = "execute_request", cell: str = "1") -> bool:
    return cells.update({"msg_type": "status"}, {"msg_type": request, "msg_id": cell}, {"execution_state": state})


def test_cell_runs_from_busy_to_idle():
    """Output in between changes nothing."""
    cells = RunningCells(is_busy=False)
    assert not cells.is_running
    assert tell(cells, "busy")
    assert not cells.update({"msg_type": "stream"}, {"msg_type": "execute_request", "msg_id": "1"}, {"text": "x"})
    assert cells.is_running
    assert not tell(cells, "idle")
    assert not cells.is_running


def test_widget_in_the_middle_of_a_cell_ends_nothing():
    """A comm's message on a subshell ends with idle, and the cell still runs; so with a second cell on a subshell."""
    cells = RunningCells(is_busy=False)
    tell(cells, "busy")
    for state in ("busy", "idle"):
        tell(cells, state, "comm_msg", "w")
        tell(cells, state, "execute_request", "2")
    assert cells.is_running


def test_cell_before_the_watch_counts_until_a_cell_ends():
    """Its request is not known, so the end of any cell ends it."""
    cells = RunningCells(is_busy=True)
    tell(cells, "idle", "kernel_info_request")
    assert cells.is_running
    tell(cells, "idle")
    assert not cells.is_running


def test_restarted_kernel_runs_nothing():
    """The messages of the old process do not come any more."""
    cells = RunningCells(is_busy=False)
    tell(cells, "busy")
    cells.update({"msg_type": "status"}, {}, {"execution_state": "starting"})
    assert not cells.is_running


class Stream:
    is_closed = False

    def on_recv(self, receive: Any) -> None:
        self.receive = receive

    def closed(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


class Manager:
    class session:  # noqa: N801 - the attribute's name in jupyter_client
        config, key = None, b"key"

    execution_state = "busy"

    def __init__(self) -> None:
        self.stream = Stream()

    def connect_iopub(self) -> Stream:
        return self.stream


class Kernels:
    def __init__(self) -> None:
        self.managers: dict[str, Manager] = {}

    def list_kernel_ids(self) -> list[str]:
        return list(self.managers)

    def get_kernel(self, kernel: str) -> Manager:
        return self.managers[kernel]


def test_watch_follows_kernels_that_come_and_go():
    """A new kernel is watched once; one that is gone no longer counts, and its stream is closed."""
    kernels = Kernels()
    watch = CellWatch(kernels, on_start=lambda: None)
    first = kernels.managers["a"] = Manager()
    watch.refresh()
    watch.refresh()
    assert watch.is_running
    del kernels.managers["a"]
    watch.refresh()
    assert not watch.is_running
    assert first.stream.closed()


def test_start_of_a_cell_is_told_at_once():
    """From a signed message as it comes over the kernel's socket; its end is not told."""
    kernels, started = Kernels(), []
    manager = kernels.managers["a"] = Manager()
    manager.execution_state = "idle"
    watch = CellWatch(kernels, on_start=lambda: started.append(watch.is_running))
    watch.refresh()
    kernel = Session(key=b"key")
    request = kernel.msg("execute_request")
    for state in ("busy", "idle"):
        message = kernel.msg("status", {"execution_state": state}, parent=request)
        manager.stream.receive(kernel.serialize(message, ident=b"kernel.status"))
    assert started == [True]
    assert not watch.is_running
