"""The real proxy, hub and broker of one cluster.toml, without Docker, for tests with browsers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx
import psutil

from gpuhub.common import secrets
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.tls import internal_certificates, public_access
from tests.support.product import ROOT, wait_for

SETTINGS = """
[[nodes]]
name = "rig1"
address = "127.0.0.1"
docker = "unix:///run/gpuhub-nobody-listens-here.sock"
[[profiles]]
name = "cpu"
title = "No GPU"
gpu_count = 0
[users]
login = "password"
allowed = ["ada", "ben"]
admins = ["root1"]
uid_first = 20000
[storage]
home = "/tmp/{{username}}"
"""
#: Ends all settings.
HUB_TABLE = """
[hub]
address = "127.0.0.1"
port = {port}
api_port = {api_port}
broker_port = {broker_port}
proxy_api_port = {proxy_api_port}
{hub}
"""

#: The program of a notebook.
NOTEBOOK = str(ROOT / "tests" / "support" / "hub" / "notebook_server.py")
#: The hub's configuration; a notebook is a process of this machine with the usual login.
HUB_CONFIG = """
import sys
load_subconfig({real!r})
c.JupyterHub.spawner_class = "simple"
c.Spawner.cmd = [sys.executable, {notebook!r}]
c.Spawner.start_timeout = 30
"""


@dataclass
class ServedHub:
    """Programs that `start` starts; `stop` removes all their traces."""

    instance: str
    folder: Path
    #: Lines of `[hub]` in cluster.toml except ports.
    hub: str
    #: The first of four ports.
    first_port: int
    #: cluster.toml, with the ports' names in braces and `{hub}`.
    settings: str = SETTINGS
    #: The hub's configuration, with `{real}` for the product's and `{notebook}`.
    config: str = HUB_CONFIG
    #: Words before each program's command, such as those of nsenter.
    enter: tuple[str, ...] = ()
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _logs: list[IO[bytes]] = field(default_factory=list)

    @property
    def paths(self) -> Paths:
        """The instance's paths."""
        return Paths(self.instance)

    @property
    def port(self) -> int:
        """The browsers' port."""
        return self.first_port

    @property
    def cluster_file(self) -> Path:
        """The settings' file."""
        return self.folder / "cluster.toml"

    @property
    def cluster(self) -> settings.ClusterSettings:
        """The parsed settings."""
        return settings.load(self.cluster_file)

    @property
    def password(self) -> str:
        """The password of all users."""
        return secrets.read_secret(self.paths, secrets.USER_PASSWORD)

    def start(self, *names: str) -> None:
        """Start the given programs, or proxy, broker and hub; return when the hub answers through the proxy."""
        self._remove_state()
        ports = dict(
            zip(("port", "api_port", "broker_port", "proxy_api_port"), range(self.first_port, 10**6), strict=False)
        )
        self.cluster_file.write_text((self.settings + HUB_TABLE).format(hub=self.hub, **ports), encoding="utf-8")
        config = self.folder / "hub_config.py"
        config.write_text(self.config.format(real=str(ROOT / "jupyterhub_config.py"), notebook=NOTEBOOK))
        for folder in (self.paths.state, self.paths.run, self.paths.log):
            folder.mkdir(parents=True, exist_ok=True)
        secrets.ensure_secrets(self.paths)
        public_access.ensure_certificate(self.cluster, self.paths, "127.0.0.1")
        if self.cluster.has_internal_tls:
            internal_certificates.ensure_internal_certificates(self.paths.internal_certificates, "127.0.0.1")
        for name in names or self._commands:
            self.begin(name)
        self.wait_ready()

    def begin(self, name: str) -> None:
        """Start a program without waiting."""
        self._start(name, self._commands[name])

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End a program."""
        process = self._running.pop(name)
        process.send_signal(how)
        process.wait(timeout=30)

    def wait_ready(self) -> None:
        """Wait until the hub answers through the proxy."""
        wait_for(self._is_ready, f"the hub behind {self.instance}'s proxy\n{self.log('hub')}", 180)

    @property
    def _commands(self) -> dict[str, list[str]]:
        options = ["--instance", self.instance, "--cluster-file", str(self.cluster_file)]
        gpuhub = str(Path(sys.executable).with_name("gpuhub"))
        return {
            "proxy": [gpuhub, "proxy", *options],
            "broker": [gpuhub, "broker", *options],
            "hub": [sys.executable, "-m", "gpuhub.ops.deploy.hub_process", "-f", str(self.folder / "hub_config.py")],
        }

    def _start(self, name: str, command: list[str]) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        self._logs.append(log)
        environment = os.environ | {
            "GPUHUB_INSTANCE": self.instance,
            "GPUHUB_CLUSTER_FILE": str(self.cluster_file),
        }
        # As under supervisord, files are readable by root only.
        self._running[name] = subprocess.Popen(
            [*self.enter, *command],
            cwd=self.paths.state,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            umask=0o077,
        )

    def _is_ready(self) -> bool:
        gone = [name for name, process in self._running.items() if process.poll() is not None]
        assert not gone, f"{gone[0]} ended:\n{self.log(gone[0])}"
        files = public_access.find_certificate_files(self.cluster, self.paths)
        scheme, verify = (
            ("http", True) if files is None else ("https", public_access.build_pinned_context(files.certificate))
        )
        try:
            answer = httpx.get(f"{scheme}://127.0.0.1:{self.port}/hub/health", verify=verify, trust_env=False)
        except httpx.TransportError:
            return False
        return answer.status_code == httpx.codes.OK

    def log(self, name: str) -> str:
        """Return the end of a log."""
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace")[-4000:] if file.exists() else ""

    def pid(self, name: str) -> int:
        """Return the id of a running process."""
        return self._running[name].pid

    def stop(self) -> None:
        """End all programs and remove their files."""
        for process in reversed(self._running.values()):
            process.terminate()
        for process in self._running.values():
            process.wait(timeout=30)
        self._end_notebooks()
        for log in self._logs:
            log.close()
        self._running.clear()
        self._remove_state()

    def _end_notebooks(self) -> None:
        """End the notebooks of this hub, which leaves them running when it ends, as the product's does."""
        api = f":{self.first_port + 1}/hub/api"
        notebooks = [
            process
            for process in psutil.process_iter(["cmdline"])
            if NOTEBOOK in (process.info["cmdline"] or ())
            and process.environ().get("JUPYTERHUB_API_URL", "").endswith(api)
        ]
        for notebook in notebooks:
            notebook.terminate()
        psutil.wait_procs(notebooks, timeout=30)

    def _remove_state(self) -> None:
        for folder in (self.paths.state, self.paths.run, self.paths.log):
            shutil.rmtree(folder, ignore_errors=True)
