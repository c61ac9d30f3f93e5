"""The program of a Slurm job on its node."""

from __future__ import annotations

import ast
import fcntl
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpuhub.slurm_jobs import node_main

#: Prints its arguments, listens on request, and ends.
NOTEBOOK = """
import json, os, signal, socket, sys, urllib.parse
url = urllib.parse.urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"])
open("seen", "w").write(json.dumps({"argv": sys.argv, "environment": dict(os.environ), "stdin": sys.stdin.read()}))
open("go").read()
listening = socket.socket()
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listening.bind((url.hostname, url.port))
listening.listen()
open("end").read()
sys.exit(4)
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """Records reports, and answers the first one with 503."""

    reports: list[tuple[str, str | None, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reports.append((self.path, self.headers["Authorization"], body))
        self.send_response(503 if len(self.reports) == 1 else 204)
        self.end_headers()

    def do_GET(self) -> None:
        self.send_error(403)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[http.server.HTTPServer]:
    Hub.reports = []
    with http.server.HTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def notebook_instructions(hub_port: int, command: list[str], **changes: Any) -> str:
    return json.dumps(
        {
            "addresses": {"sx1": "127.0.0.2"},
            "names": {"sx1": "rig1"},
            "listen": {"sx1": "127.0.0.2"},
            "scheme": "http",
            "prefix": "/user/ada/",
            "report": f"http://127.0.0.1:{hub_port}/hub/api/gpuhub-port",
            "command": command,
            "environment": {
                "JUPYTERHUB_API_TOKEN": "tok",
                "JUPYTERHUB_API_URL": f"http://127.0.0.1:{hub_port}/hub/api",
                "PLACE": "$(touch x)",
            },
            "certificates": None,
        }
        | changes
    )


def start_node_main(text: str, folder: Path, node: str = "sx1") -> subprocess.Popen[bytes]:
    program = Path(node_main.__file__).read_text()
    running = subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={
            "SLURMD_NODENAME": node,
            "CUDA_VISIBLE_DEVICES": "1",
            "SLURM_JOB_GPUS": "5",
            "http_proxy": "http://127.0.0.1:9",
        },
    )
    assert running.stdin is not None
    running.stdin.write(text.encode())
    running.stdin.close()
    return running


def test_notebook_gets_a_port_and_hub_is_notified_when_it_listens(hub: http.server.HTTPServer, tmp_path: Path) -> None:
    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    for name in ("go", "end"):
        os.mkfifo(tmp_path / name)
    running = start_node_main(notebook_instructions(hub.server_port, [sys.executable, "notebook.py", "a b"]), tmp_path)
    assert running.stderr is not None
    go = (tmp_path / "go").open("w")
    seen = json.loads((tmp_path / "seen").read_text())
    assert Hub.reports == []
    environment = seen["environment"]
    port = int(environment["JUPYTERHUB_SERVICE_URL"].removeprefix("http://127.0.0.2:").removesuffix("/user/ada/"))
    assert (seen["argv"], seen["stdin"]) == (["notebook.py", "a b"], "")
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["GPUHUB_NODE"]) == ("1", "rig1")
    assert environment["PLACE"] == "$(touch x)"
    assert (environment["GPUHUB_NETWORK_SUBNET"], environment["GPUHUB_GPU_UUIDS"]) == ("127.0.0.2/32", "SLURM-rig1-5")
    # The port is reserved, so that no other program gets it by chance.
    with closing(socket.socket()) as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.2", port))
    go.close()
    end = (tmp_path / "end").open("w")
    first = running.stderr.readline()
    assert b"503" in first
    while len(Hub.reports) < 2:
        assert running.poll() is None
        time.sleep(0.01)
    end.close()
    assert running.wait(30) == 4
    running.stderr.close()
    assert Hub.reports == [("/hub/api/gpuhub-port", "token tok", {"port": port})] * 2


def test_unreachable_hub_is_retried(tmp_path: Path) -> None:
    """The notebook starts only when the hub answers."""
    with closing(node_main.reserve_port("127.0.0.1")) as holder:
        port = holder.getsockname()[1]
        running = start_node_main(notebook_instructions(port, ["touch", str(tmp_path / "started")]), tmp_path)
        assert running.stderr is not None
        assert b"gpuhub: the hub does not answer yet" in running.stderr.readline()
        assert not (tmp_path / "started").exists()
        with http.server.HTTPServer(("127.0.0.1", port), Hub) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            assert running.wait(60) == 0
            server.shutdown()
            thread.join()
    running.stderr.close()
    assert (tmp_path / "started").exists()


#: Shows the folder for sockets, and waits for a signal.
WAITER = """
import json, os, signal, sys
folder = os.environ["JUPYTER_RUNTIME_DIR"]
settings = os.environ["JUPYTER_CONFIG_PATH"].split(":")[0] + "/labconfig/page_config.json"
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
shown = {"folder": folder, "mode": oct(os.stat(folder).st_mode & 0o7777), "settings": json.load(open(settings))}
open("shown", "w").write(json.dumps(shown))
signal.pause()
"""


@pytest.mark.parametrize(("ends", "status"), [(signal.SIGTERM, 7), (signal.SIGUSR1, -signal.SIGUSR1)])
def test_folder_for_sockets_is_private_and_removed(
    hub: http.server.HTTPServer, tmp_path: Path, ends: signal.Signals, status: int
) -> None:
    """A signal reaches the notebook; afterwards its exit code is the job's, and the folder is gone."""
    os.mkfifo(tmp_path / "shown")
    running = start_node_main(notebook_instructions(hub.server_port, [sys.executable, "-c", WAITER]), tmp_path)
    shown = json.loads((tmp_path / "shown").read_text())
    folder = Path(shown["folder"])
    assert shown["mode"] == "0o700"
    assert len(f"{folder}/kernel-{uuid.uuid4()}-ipc-5") <= 107
    assert shown["settings"] == {"disabledExtensions": {"@jupyterlab/debugger-extension": True}}
    assert folder.is_dir()
    running.send_signal(ends)
    assert running.wait(30) == status
    assert running.stderr is not None
    running.stderr.close()
    assert not folder.exists()


def test_only_folders_of_killed_notebooks_are_removed(tmp_path: Path) -> None:
    """A folder that a process has locked, a new one, and what a link leads to remain."""
    past = time.time() - 2 * node_main.LEFT_FOLDER_S
    for name in ("gpuhub-0-left", "gpuhub-0-used", "gpuhub-0-new", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel-1-ipc-1").touch()
        if name != "gpuhub-0-new":
            os.utime(tmp_path / name, (past, past))
    (tmp_path / "gpuhub-0-link").symlink_to(tmp_path / "other")
    lock = os.open(tmp_path / "gpuhub-0-used", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    node_main.remove_left_folders(str(tmp_path), "gpuhub-0-")
    os.close(lock)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "gpuhub-0-link", "gpuhub-0-new", "gpuhub-0-used", "other"
    ]  # fmt: skip
    assert (tmp_path / "other" / "kernel-1-ipc-1").exists()


def test_sockets_fit_where_the_temporary_folder_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with node_main.create_runtime_folder() as folder:
        assert len(f"{folder}/kernel-{uuid.uuid4()}-ipc-5") <= 107
        assert folder.parent != long


def test_node_missing_in_the_settings_is_refused(tmp_path: Path) -> None:
    running = start_node_main(notebook_instructions(1, ["true"]), tmp_path, node="other")
    assert running.stderr is not None
    with running.stderr as output:
        said = output.read()
    assert running.wait(30) == 1
    assert b"'other', which is not in cluster.toml" in said


def worker_instructions(folder: Path, **changes: Any) -> str:
    show = "import json, os; open('seen', 'w').write(json.dumps(dict(os.environ)))"
    instructions = {
        "addresses": {"sx1": "127.0.0.2", "sx2": "10.0.0.12"},
        "names": {"sx1": "rig1", "sx2": "rig2"},
        "first_worker": 3,
        "is_detached": False,
        "command": [sys.executable, "-c", show],
        "environment": {"GPU_LAUNCH_RUN": "run-1", "HOME": str(folder)},
    }
    return json.dumps(instructions | changes)


def run_worker(text: str, folder: Path, **environment: str) -> tuple[dict[str, str], str]:
    """Return the environment of the worker's program, and the messages on stderr."""
    program = Path(node_main.__file__).read_text()
    command = [sys.executable, "-I", "-c", program]
    done = subprocess.run(
        command, input=text, text=True, capture_output=True, cwd=folder, env=environment, check=False, timeout=30
    )
    seen = folder / "seen"
    return (json.loads(seen.read_text()) if seen.exists() else {}), done.stderr


def test_worker_index_follows_the_jobs_node_list(tmp_path: Path) -> None:
    """The broker uses the same order; Slurm's own numbers may have another one."""
    given = {"SLURMD_NODENAME": "sx2", "GPUHUB_JOB_NODES": "sx1\nsx2", "SLURM_NODEID": "0", "SLURM_JOB_GPUS": "7"}
    seen, said = run_worker(worker_instructions(tmp_path), tmp_path, SLURM_STEP_GPUS="0,2-3", **given)
    assert said == ""
    assert (seen["GPU_LAUNCH_RUN"], seen["GPU_LAUNCH_WORKER"], seen["GPUHUB_NODE"]) == ("run-1", "4", "rig2")
    assert seen["GPUHUB_NETWORK_SUBNET"] == "10.0.0.12/32"
    assert seen["GPUHUB_GPU_UUIDS"] == "SLURM-rig2-0,SLURM-rig2-2,SLURM-rig2-3"
    assert "GPU_LAUNCH_ROSTER" not in seen


def test_launch_on_an_ipv6_only_node_uses_the_loopback() -> None:
    assert node_main.build_node_environment("rig1", "fd00::12", {}) == {"GPUHUB_NODE": "rig1", "GPUHUB_GPU_UUIDS": ""}


def test_first_worker_of_a_detached_job_gets_the_worker_list(tmp_path: Path) -> None:
    given = {"SLURMD_NODENAME": "sx1", "GPUHUB_JOB_NODES": "sx1\nsx2"}
    seen, _ = run_worker(worker_instructions(tmp_path, first_worker=0, is_detached=True), tmp_path, **given)
    assert seen["GPU_LAUNCH_WORKER"] == "0"
    assert json.loads(seen["GPU_LAUNCH_ROSTER"]) == [
        {"index": 0, "node": "rig1", "state": "running"},
        {"index": 1, "node": "rig2", "state": "running"},
    ]
    # A worker without GPUs names none.
    assert seen["GPUHUB_GPU_UUIDS"] == ""


def test_missing_program_is_reported(tmp_path: Path) -> None:
    text = worker_instructions(tmp_path, command=["/opt/gpu-launch-worker"])
    _, said = run_worker(text, tmp_path, SLURMD_NODENAME="sx2", GPUHUB_JOB_NODES="sx2")
    assert said == "gpuhub: /opt/gpu-launch-worker cannot be started on sx2: No such file or directory\n"


def test_worker_on_a_node_outside_the_job_is_refused(tmp_path: Path) -> None:
    seen, said = run_worker(worker_instructions(tmp_path), tmp_path, SLURMD_NODENAME="sx2", GPUHUB_JOB_NODES="sx1")
    assert (seen, said) == ({}, "gpuhub: node 'sx2' is not one of the job's: sx1\n")


def test_socket_of_another_process_is_not_the_notebooks() -> None:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        assert not node_main.is_listening("127.0.0.1", port, os.getuid())
        one.listen()
        assert node_main.is_listening("127.0.0.1", port, os.getuid())
        assert not node_main.is_listening("127.0.0.1", port, os.getuid() + 1)
        assert not node_main.is_listening("127.0.0.2", port, os.getuid())


def test_ipv6_listener_is_detected() -> None:
    with closing(socket.socket(socket.AF_INET6)) as one:
        one.bind(("::1", 0))
        one.listen()
        assert node_main.is_listening("::1", one.getsockname()[1], os.getuid())


def test_certificates_are_passed_in_memory() -> None:
    """The user's programs can read the certificates, and no file is written."""
    variables = node_main.store_certificates({"JUPYTERHUB_SSL_KEYFILE": "KEY"})
    file = Path(variables["JUPYTERHUB_SSL_KEYFILE"])
    assert file.parent == Path(f"/proc/{os.getpid()}/fd")
    assert subprocess.run(["cat", file], check=True, capture_output=True).stdout == b"KEY"
    stranger = subprocess.run(["cat", file], check=False, capture_output=True, user=71001, group=71001, extra_groups=[])
    assert (stranger.returncode, stranger.stdout) == (1, b"")
    os.close(int(file.name))
    assert node_main.store_certificates(None) == {}


def test_node_main_imports_only_the_standard_library() -> None:
    tree = ast.parse(Path(node_main.__file__).read_text(), feature_version=(3, 8))
    imported = {
        alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {
        node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }
    assert imported <= sys.stdlib_module_names
