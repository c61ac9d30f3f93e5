"""Access to nodes by SSH: gpuhub's own key, the host keys that it trusts, and tunnels to Docker sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gpuhub.common.errors import NodeUnreachable
from gpuhub.common.paths import Paths

#: Where Docker's packages put the daemon's socket. The SSH key gives access to nothing else on a node.
REMOTE_SOCKET = "/var/run/docker.sock"
_START_DEADLINE_S = 12.0


@dataclass(frozen=True, slots=True)
class SshFiles:
    """gpuhub's SSH key and the host keys that one instance trusts, in a folder that only root can enter."""

    folder: Path

    @property
    def key(self) -> Path:
        """Return the path of the private key, one for all nodes."""
        return self.folder / "id_ed25519"

    @property
    def public_key(self) -> Path:
        return self.folder / "id_ed25519.pub"

    def known_hosts(self, node: str) -> Path:
        """Return the path of the node's host keys; `gpuhub node add` writes them once a person has compared them."""
        return self.folder / f"{node}.known_hosts"

    def options(self, node: str) -> list[str]:
        """Return ssh's options for a node that `gpuhub node add` set up; other nodes use root's own keys."""
        if not self.known_hosts(node).exists():
            return []
        return [
            "-i", str(self.key),
            "-o", "IdentitiesOnly=yes",
            "-o", "IdentityAgent=none",
            "-o", "PreferredAuthentications=publickey",
            "-o", "StrictHostKeyChecking=yes",
            "-o", f"HostKeyAlias={host_alias(node)}",
            "-o", f"UserKnownHostsFile={self.known_hosts(node)}",
            "-o", "GlobalKnownHostsFile=/dev/null",
            "-o", "UpdateHostKeys=no",
        ]  # fmt: skip


def ssh_files(instance: str) -> SshFiles:
    return SshFiles(Paths(instance).secrets / "ssh")


def host_alias(node: str) -> str:
    """Return the name under which a node's host keys are stored, independent of its address and port."""
    return f"gpuhub-{node}"


def build_tunnel_command(url: str, local_socket: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the ssh command for `ssh://[user@]host[:port]`; `options` hold the key. ssh ends with this process."""
    parts = urlsplit(url)
    command = [
        # The kernel ends ssh however this process dies, so that no forwarded root socket outlives it.
        "setpriv", "--pdeathsig", "TERM",
        "ssh", "-N", "-T",
        "-o", "BatchMode=yes",
        "-o", "ExitOnForwardFailure=yes",
        "-o", "ConnectTimeout=8",
        "-o", "ServerAliveInterval=5",
        "-o", "ServerAliveCountMax=3",
        "-o", "StreamLocalBindUnlink=yes",
        "-o", "StreamLocalBindMask=0177",
        "-L", f"{local_socket}:{REMOTE_SOCKET}",
        *options,
    ]  # fmt: skip
    if parts.port is not None:
        command += ["-p", str(parts.port)]
    if parts.username:
        command += ["-l", parts.username]
    return [*command, "--", str(parts.hostname)]


class SshTunnel:
    """Forwards one node's Docker socket; started when first needed, and again when ssh has ended."""

    def __init__(self, node: str, url: str, run_dir: Path, files: SshFiles) -> None:
        self._node = node
        self._url = url
        self._files = files
        # Hub and broker each have their own tunnel.
        self._socket = run_dir / f"ssh-{node}-{os.getpid()}.sock"
        self._errors = self._socket.with_suffix(".log")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """Return the address that a Docker client connects to."""
        return f"unix://{self._socket}"

    def ensure(self) -> None:
        """Start ssh unless it runs, and wait until the socket is forwarded. Blocks for some seconds at most.

        Raises:
            NodeUnreachable: ssh ended or did not connect; its last line of output is in the text.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._start()

    def close(self) -> None:
        """End ssh and remove the socket."""
        with self._lock:
            if self._process is not None:
                self._process.terminate()
                try:
                    self._process.wait(3)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
                self._process = None
            self._socket.unlink(missing_ok=True)
            self._errors.unlink(missing_ok=True)

    def _start(self) -> None:
        folder = self._socket.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                build_tunnel_command(self._url, self._socket, self._files.options(self._node)),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
        end = time.monotonic() + _START_DEADLINE_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise NodeUnreachable(f"node {self._node}: ssh ended: {self._last_error_line()}")
            if self._is_listening():
                return
            time.sleep(0.05)
        self._process.kill()
        self._process.wait()
        raise NodeUnreachable(f"node {self._node}: ssh did not connect within {_START_DEADLINE_S:.0f} s")

    def _is_listening(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self._socket))
            except OSError:
                return False
        return True

    def _last_error_line(self) -> str:
        lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"
