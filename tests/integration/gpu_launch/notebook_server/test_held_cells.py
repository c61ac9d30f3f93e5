"""Cells of a suspended notebook in a real Jupyter Server with a real kernel; browsers come and go."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from jupyter_server.services.kernels.connection.base import deserialize_msg_from_ws_v1, serialize_msg_to_ws_v1
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

from tests.support.docker.simulated_nodes import wait_until
from tests.support.hub.jupyter_lab import TOKEN, JupyterLab, serve_lab

#: JupyterLab's form of messages: parts of JSON with the channel before them.
PROTOCOL = Subprotocol("v1.kernel.websocket.jupyter.org")


class Broker:
    """Answers the reports of a notebook. A real one would see ranks of other tests on this machine, and resume it."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.url = f"http://127.0.0.1:{server.server_port}"
        self.suspension: dict[str, str] | None = None
        self.answered = 0

    def answer(self) -> dict[str, Any]:
        self.answered += 1
        return {"idle": None, "report_in_s": 0.1, "gpu_problems": [], "suspension": self.suspension}

    def set_suspended(self, is_suspended: bool) -> None:
        """Suspend the notebook or give it its GPU back, and wait until its server knows."""
        self.suspension = {"state": "suspended", "text": ""} if is_suspended else None
        answered = self.answered
        wait_until(lambda: self.answered > answered + 1, "the notebook knows")


@pytest.fixture
def broker() -> Iterator[Broker]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps(broker.answer()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *_args: object) -> None:
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        broker = Broker(server)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield broker
        server.shutdown()
        thread.join()


class Notebook:
    """A notebook's server with a kernel."""

    def __init__(self, lab: JupyterLab) -> None:
        self._lab = lab
        self._kernel = lab.request("POST", "/api/kernels").json()["id"]

    def list_files(self) -> list[str]:
        return sorted(path.name for path in self._lab.home.iterdir() if path.is_file())

    def open_page(self, page: str) -> ClientConnection:
        """Connect to the kernel as JupyterLab does; the id of a page stays when its connection is lost."""
        address = f"{self._lab.url.replace('http', 'ws', 1)}/api/kernels/{self._kernel}/channels?session_id={page}"
        return connect(f"{address}&token={TOKEN}", subprotocols=[PROTOCOL], proxy=None)


@pytest.fixture
def notebook(broker: Broker, tmp_path: Path) -> Iterator[Notebook]:
    environ = {"GPUHUB_BROKER_URL": broker.url, "GPUHUB_LEASE": "l0", "JUPYTERHUB_API_TOKEN": "ada"}
    with serve_lab(tmp_path / "lab", tmp_path / "no-extension", environ) as lab:
        yield Notebook(lab)


def run_cell(page: ClientConnection, number: int, code: str) -> None:
    header = {"msg_id": f"cell-{number}", "msg_type": "execute_request", "username": "", "version": "5.3"}
    header |= {"session": "page", "date": "2026-11-28T12:00:00Z"}
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    parts = [json.dumps(part).encode() for part in (header, {}, {}, content)]
    page.send(serialize_msg_to_ws_v1(parts, "shell"))


def read_output(page: ClientConnection, number: int) -> str:
    """Return what a cell prints, when it has ended."""
    printed = ""
    while True:
        message = page.recv(timeout=60)
        assert isinstance(message, bytes)
        header, parent, _, content = (json.loads(part) for part in deserialize_msg_from_ws_v1(message)[1][:4])
        if parent.get("msg_id") != f"cell-{number}":
            continue
        printed += content.get("text", "") if header["msg_type"] == "stream" else ""
        if header["msg_type"] == "status" and content["execution_state"] == "idle":
            return printed


def test_a_cell_survives_its_connection_and_the_page_gets_the_output(broker: Broker, notebook: Notebook) -> None:
    """Its page connects again when the GPU is back and the cell has run."""
    with notebook.open_page("page") as page:
        run_cell(page, 1, "x = 40; print(x)")
        assert read_output(page, 1) == "40\n"
        broker.set_suspended(True)
        run_cell(page, 2, "open('second', 'w').close(); print(x + 2)")
    assert notebook.list_files() == []
    broker.set_suspended(False)
    wait_until(lambda: notebook.list_files() == ["second"], "the cell has run without its page")
    with notebook.open_page("page") as page:
        assert read_output(page, 2) == "42\n"


@pytest.mark.parametrize("name", ["page", "loaded-again"])
def test_what_waits_runs_before_the_cells_of_the_next_connection(broker: Broker, notebook: Notebook, name: str) -> None:
    """Of the same page, or of one that was loaded again."""
    broker.set_suspended(True)
    with notebook.open_page("page") as page:
        run_cell(page, 1, "x = 40")
    with notebook.open_page(name) as page:
        run_cell(page, 2, "print(x + 2)")
        broker.set_suspended(False)
        assert read_output(page, 2) == "42\n"


def test_a_cell_runs_while_another_page_has_the_kernel(broker: Broker, notebook: Notebook) -> None:
    """The server keeps nothing for the page that is gone then."""
    with notebook.open_page("another") as another:
        broker.set_suspended(True)
        with notebook.open_page("page") as page:
            run_cell(page, 1, "open('first', 'w').close(); print(1)")
        broker.set_suspended(False)
        assert read_output(another, 1) == "1\n"
    assert notebook.list_files() == ["first"]
