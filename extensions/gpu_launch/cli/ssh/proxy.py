"""The command that OpenSSH's client runs for a connection: bytes between it and the container's sshd.

The first line from the other side is JSON, `{"host_key": "ssh-ed25519 AAAA…", "user": "ada"}`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import urllib.parse
from dataclasses import dataclass
from typing import Any

from gpu_launch.broker import models
from gpu_launch.cli.connection.http import describe_error
from gpu_launch.cli.connection.hub_client import HubClient, Server
from gpu_launch.cli.connection.websockets import build_job_url, open_websocket, start_pings
from gpu_launch.cli.context import Context
from gpu_launch.cli.job_lookup import find_named_job, shorten_run_id
from gpu_launch.cli.jobs import list_own_jobs
from gpu_launch.cli.ssh.files import SshFiles
from gpu_launch.errors import BrokerError, GpuLaunchError, UsageError

_BLOCK = 65536
_MAX_GREETING_BYTES = 4096
#: Path below a server's URL, see `gpu_launch.sshd.jupyter_extension`.
_SERVER_PATH = "gpu-launch/ssh"
#: A job's worker: `train.3`; without a number, worker 0.
_WORKER = re.compile(r"(.+)\.(\d{1,5})")


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """The container's public host key and the user's name there."""

    host_key: str
    user: str


def find_target(context: Context, files: SshFiles, host: str, public_key: str) -> str:
    """Return the URL of the WebSocket for a host name of the settings, such as `gpuhub-big`.

    Raises:
        UsageError: Nothing of that name runs; the text says what would work.
    """
    name = "" if host == files.prefix else host.removeprefix(f"{files.prefix}-")
    client = HubClient(context.hub, context.user)
    server = client.find_server(name)
    if server is not None:
        return _build_server_url(server, public_key)
    if name and (job_worker := _find_worker(context, files, name)) is not None:
        job, worker = job_worker
        return build_job_url(context.hub, job.id, "ssh", {"worker": worker, "key": public_key})
    shown = f"instance or job {name}" if name else "default instance"
    option = f" --name {name}" if name.replace("-", "").isalnum() else ""
    start = f"gpu-launch instance start{option} --profile PROFILE"
    raise UsageError(f"You have no running {shown}.\nStart one: {start}; what runs: gpu-launch instance list, ps")


def _build_server_url(server: Server, public_key: str) -> str:
    shown = f"Instance {server.name}" if server.name else "The default instance"
    if not server.is_ready:
        if server.pending == "stop":
            raise UsageError(f"{shown} is being stopped.\nWhat runs: gpu-launch instance list, ps")
        raise UsageError(f"{shown} is still starting.\nIts place in the queue: gpu-launch instance list")
    query = urllib.parse.urlencode({"key": public_key})
    return f"ws{server.url.removeprefix('http')}{_SERVER_PATH}?{query}"


def _find_worker(context: Context, files: SshFiles, name: str) -> tuple[models.Job, int] | None:
    """Return the running job with this name, run id or last part of it, and the worker; None if there is none.

    The beginning of a run id is not enough: `fa` may be meant as an instance that does not run.
    """
    jobs = [job for job in list_own_jobs(context, ended=False) if job.state in (models.RUNNING, models.PREEMPTING)]
    match = _WORKER.fullmatch(name)
    for text, worker in ((name, 0), *([(match[1], int(match[2]))] if match else [])):
        by_end = (job for job in jobs if job.array is None and shorten_run_id(job.run_id) == text)
        job = find_named_job(text, jobs) or next(by_end, None)
        if job is None:
            continue
        if worker not in {member.index for member in job.workers}:
            indexes = ", ".join(str(member.index) for member in job.workers)
            raise UsageError(
                f"{job.run_id} has no worker {worker}; its workers are {indexes}.\n"
                f"The first one: ssh {files.build_host(shorten_run_id(job.run_id))}"
            )
        return job, worker
    return None


class SshConnection:
    """A WebSocket behind which sshd answers."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._is_over = threading.Event()
        self._early = b""
        self._problem = ""

    def read_greeting(self) -> Greeting:
        """Return what the first line says; what follows it is kept for the client.

        Raises:
            GpuLaunchError: The connection ended before it, or the line is another one.
        """
        received = b""
        while b"\n" not in received and len(received) < _MAX_GREETING_BYTES:
            if (data := self._receive_data()) is None:
                raise BrokerError(f"The connection broke{f': {self._problem}' if self._problem else ''}.")
            received += data
        line, _, self._early = received.partition(b"\n")
        try:
            values = json.loads(line)
            return Greeting(host_key=_check_line(values["host_key"]), user=_check_line(values["user"]))
        except (ValueError, KeyError, TypeError):
            raise GpuLaunchError(
                "The server does not speak gpu-launch's protocol for SSH: update gpu-launch."
            ) from None

    def relay(self) -> None:
        """Pass on bytes between the client, at stdin and stdout, and sshd until one of them ends.

        Raises:
            BrokerError: The connection broke, or the hub ended it; the text has the reason.
        """
        threading.Thread(target=self._receive, daemon=True).start()
        start_pings(self._socket, self._is_over)
        threading.Thread(target=self._send, daemon=True).start()
        # With a time limit in a loop, because Windows has no Ctrl-C in an endless wait.
        while not self._is_over.wait(1.0):
            pass
        # Read first: closing the connection is an error for the thread that receives.
        problem = self._problem
        self._socket.shutdown()
        if problem:
            raise BrokerError(f"The connection ended: {problem}.")

    def _send(self) -> None:
        import websocket

        try:
            while data := os.read(sys.stdin.fileno(), _BLOCK):
                self._socket.send_binary(data)
        except (websocket.WebSocketException, OSError):
            pass
        finally:
            self._is_over.set()

    def _receive(self) -> None:
        try:
            _write_all(sys.stdout.fileno(), self._early)
            while (data := self._receive_data()) is not None:
                _write_all(sys.stdout.fileno(), data)
        except OSError:
            pass
        finally:
            self._is_over.set()

    def _receive_data(self) -> bytes | None:
        """Return sshd's next bytes, None at the end; `_problem` is its reason if there is one."""
        import websocket

        try:
            while True:
                opcode, data = self._socket.recv_data()
                if opcode == websocket.ABNF.OPCODE_BINARY:
                    return bytes(data)
                if opcode == websocket.ABNF.OPCODE_TEXT:
                    self._problem = _find_error(data)
                if opcode == websocket.ABNF.OPCODE_CLOSE:
                    self._problem = self._problem or data[2:].decode("utf-8", "replace")
                    return None
        except (websocket.WebSocketException, OSError) as error:
            self._problem = self._problem or describe_error(error)
            return None


def connect(context: Context, files: SshFiles, host: str) -> SshConnection:
    """Connect to the container that a host name means, and check its host key against the pinned one.

    Raises:
        GpuLaunchError: Nothing of that name runs, the hub refuses, or the host key has changed.
    """
    target = find_target(context, files, host, files.read_public_key())
    try:
        connection = SshConnection(open_websocket(context.hub, target))
    except BrokerError as error:
        if error.status == 404 and _SERVER_PATH in target:
            raise BrokerError(
                "The image of this instance has no SSH: it lacks this version of gpu-launch.\n"
                "Start an instance with an image made from the current gpuhub/notebook.",
                status=404,
            ) from None
        raise
    greeting = connection.read_greeting()
    files.pin_host_key(greeting.host_key)
    if greeting.user != files.read_user():
        context.console.print_note(
            f"gpu-launch: your user name in the container is {greeting.user}: "
            f"gpu-launch ssh-config --prefix {files.prefix} --user {greeting.user}"
        )
    return connection


def _check_line(value: object) -> str:
    """Return a text of one line.

    Raises:
        ValueError: It is something else.
    """
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(value)
    return value


def _find_error(text: bytes) -> str:
    """Return the reason in the broker's last message, such as `{"exit": 255, "error": "…"}`."""
    try:
        return str(json.loads(text).get("error") or "")
    except (ValueError, AttributeError):
        return ""


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
