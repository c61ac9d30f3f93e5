"""The programs that run on the head node, and supervisord, which keeps them running.

Supervisord instead of systemd units, because it works the same in a container, on a machine without systemd and for
several instances on one machine; docs/decisions has the reasons.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings

PROXY = "proxy"
BROKER = "broker"
HUB = "hub"
#: The service for guests; runs only with `endpoint` in [guests].
GUESTS = "guests"
#: Prometheus; runs only with `make up MONITORING=1`, see `monitoring`.
PROMETHEUS = "prometheus"
#: Variables of the shell that would change the certificates or the daemon that Python's libraries use.
_STRIPPED = frozenset(
    {"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR", "DOCKER_HOST", "DOCKER_TLS_VERIFY"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A process to keep running; `priority` orders stops (higher stops first)."""

    name: str
    command: tuple[str, ...]
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    priority: int = 100
    #: Seconds from SIGTERM to SIGKILL.
    stop_wait_s: int = 10
    #: The user as whom it runs; None for root.
    user: str | None = None


def build_programs(paths: Paths, cluster_file: Path, hub_config: Path) -> list[Program]:
    """Return proxy, broker and hub in the order of their start; each reads its secrets from files."""
    gpuhub = find_gpuhub()
    options = ("--instance", paths.instance, "--cluster-file", str(cluster_file))
    commands = {
        PROXY: (gpuhub, "proxy", *options),
        BROKER: (gpuhub, "broker", *options),
        HUB: (sys.executable, "-m", "gpuhub.ops.deploy.hub_process", "-f", str(hub_config)),
    }
    environment = {"GPUHUB_INSTANCE": paths.instance, "GPUHUB_CLUSTER_FILE": str(cluster_file)}
    return [
        Program(name=name, command=command, directory=paths.state, environment=environment, priority=100 * number)
        for number, (name, command) in enumerate(commands.items(), start=1)
    ]


def build_guest_programs(cluster: ClusterSettings, paths: Paths, cluster_file: Path) -> list[Program]:
    """Return the service for guests, which keeps WireGuard and its packet filter; nothing without [guests]."""
    if cluster.guests.endpoint is None:
        return []
    return [
        Program(
            name=GUESTS,
            command=(find_gpuhub(), "guests", "--instance", paths.instance, "--cluster-file", str(cluster_file)),
            directory=paths.state,
            priority=50,
            stop_wait_s=30,
        )
    ]


def find_gpuhub() -> str:
    """Return the path of the command `gpuhub` of this installation."""
    return str(Path(sys.executable).with_name("gpuhub"))


def build_config(paths: Paths, programs: Sequence[Program]) -> str:
    """Return the text of supervisord.conf; programs do not start automatically, because gpuhub decides the order."""
    lines = [
        "[supervisord]",
        f"logfile={paths.log / 'supervisord.log'}",
        "logfile_maxbytes=10MB",
        "logfile_backups=2",
        f"pidfile={paths.run / 'supervisord.pid'}",
        f"directory={paths.state}",
        "umask=077",
        "[unix_http_server]",
        f"file={paths.run / 'supervisor.sock'}",
        "chmod=0700",
        "[rpcinterface:supervisor]",
        "supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface",
        "[supervisorctl]",
        f"serverurl=unix://{paths.run / 'supervisor.sock'}",
    ]
    for program in programs:
        lines += [
            f"[program:{program.name}]",
            f"command={_quote_command(program.command)}",
            f"directory={program.directory}",
            f"environment={_quote_environment(program.environment)}",
            f"priority={program.priority}",
            "autostart=false",
            "autorestart=true",
            "startsecs=1",
            "startretries=1000000",
            f"stopwaitsecs={program.stop_wait_s}",
            *([] if program.user is None else [f"user={program.user}"]),
            # SIGTERM goes to the program alone; SIGKILL also reaches a process behind a wrapper.
            "stopasgroup=false",
            "killasgroup=true",
            "redirect_stderr=true",
            f"stdout_logfile={paths.log / (program.name + '.log')}",
            "stdout_logfile_maxbytes=10MB",
            "stdout_logfile_backups=2",
        ]
    return "\n".join(lines) + "\n"


def _quote_command(command: Sequence[str]) -> str:
    """Quote a command: supervisord splits it with shlex and expands %(name)s."""
    quoted = []
    for word in command:
        if "\n" in word or '"' in word:
            raise SetupError(f"the command {list(command)!r} cannot be given to supervisord")
        quoted.append(f'"{word}"' if not word or set(word) & set(" ';#") else word)
    return " ".join(quoted).replace("%", "%%")


def _quote_environment(environment: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in environment.items()).replace("%", "%%")


class Supervisor:
    """The running supervisord of one instance."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._socket = paths.run / "supervisor.sock"

    def is_running(self) -> bool:
        """Return whether supervisord answers."""
        try:
            return bool(self._call("supervisor.getState")["statename"] == "RUNNING")
        except OSError:
            return False

    def start(self, programs: Sequence[Program]) -> set[str]:
        """Start supervisord or let it read changed programs; return the names of those that changed and are stopped."""
        config = self._paths.run / "supervisord.conf"
        config.write_text(build_config(self._paths, programs), encoding="utf-8")
        config.chmod(0o600)
        if not self.is_running():
            self._launch(config)
            return {program.name for program in programs}
        return self._reread()

    def _launch(self, config: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _STRIPPED}
        supervisord = Path(sys.executable).with_name("supervisord")
        done = subprocess.run(
            [str(supervisord), "-c", str(config)], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SetupError(f"supervisord did not start: {(done.stderr or done.stdout).strip()}")
        _wait(self.is_running, 15, "supervisord does not answer")

    def _reread(self) -> set[str]:
        """Let supervisord read its file, compare it with what it runs, and replace what differs."""
        added, changed, removed = self._call("supervisor.reloadConfig")[0]
        for name in [*removed, *changed]:
            self.stop(name)
            self._call("supervisor.removeProcessGroup", name)
        for name in [*added, *changed]:
            self._call("supervisor.addProcessGroup", name)
        return {*added, *changed}

    def ensure_started(self, name: str) -> None:
        """Start a program unless it runs."""
        if self.state(name) in {"RUNNING", "STARTING"}:
            return
        self._call("supervisor.startProcess", name, False)

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a running program a signal."""
        self._call("supervisor.signalProcess", name, str(int(number)))

    def stop(self, name: str) -> None:
        """Stop a program and wait until it is gone."""
        with contextlib.suppress(xmlrpc.client.Fault):  # NOT_RUNNING is what we want
            self._call("supervisor.stopProcess", name, True)

    def kill(self, name: str) -> None:
        """Kill a program, which supervisord does not start again."""
        with contextlib.suppress(xmlrpc.client.Fault):  # NOT_RUNNING is what we want
            # A program that is killed while it is being stopped stays stopped.
            self._call("supervisor.stopProcess", name, False)
            self._call("supervisor.signalProcess", name, str(int(signal.SIGKILL)))

    def state(self, name: str) -> str:
        """Return supervisord's name of the program's state."""
        return str(self._call("supervisor.getProcessInfo", name)["statename"])

    def pid(self, name: str) -> int:
        """Return the program's process id; 0 when it does not run."""
        return int(self._call("supervisor.getProcessInfo", name)["pid"])

    def states(self) -> dict[str, str]:
        """Return the state of every program by its name."""
        return {info["name"]: info["statename"] for info in self._call("supervisor.getAllProcessInfo")}

    def shutdown(self) -> None:
        """Stop every program and supervisord itself, if it runs."""
        if not self.is_running():
            return
        self._call("supervisor.shutdown")
        _wait(lambda: not self._socket.exists(), 90, "supervisord does not end")

    def _call(self, method: str, *arguments: object) -> Any:
        with xmlrpc.client.ServerProxy("http://supervisor", transport=_UnixTransport(self._socket)) as proxy:
            call: Any = proxy
            for part in method.split("."):
                call = getattr(call, part)
            return call(*arguments)


class _UnixTransport(xmlrpc.client.Transport):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: Any) -> HTTPConnection:
        connection = _UnixConnection(self._path)
        # xmlrpc.client closes the connection that it finds here.
        self._connection = host, connection
        return connection


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("supervisor", timeout=120)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(str(self._path))
        except OSError:
            self.close()
            raise


def _wait(condition: Any, deadline_s: float, failure: str) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise SetupError(f"{failure} after {deadline_s:.0f} s")
        time.sleep(0.1)
