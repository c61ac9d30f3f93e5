"""A node's Docker socket brought to the head node by `ssh -L`, kept by one child process."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from gpuhub.containers.ssh import REMOTE_SOCKET, SshFiles
from gpuhub.errors import NodeUnreachable

_START_DEADLINE_S = 12.0


def build_command(url: str, local_socket: Path, options: Sequence[str] = ()) -> list[str]:
    """The ssh command for `ssh://[user@]host[:port]`, the key to use among `options`; it ends with this process."""
    parts = urlsplit(url)
    command = [
        # ssh is told when this process dies in whatever way, so that no forwarded root socket outlives it.
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


class Tunnel:
    """Forwards one node's Docker socket; started when first needed, and again when ssh has ended."""

    def __init__(self, node: str, url: str, run_dir: Path, files: SshFiles) -> None:
        self._node = node
        self._url = url
        self._files = files
        # Hub and broker each keep their own.
        self._socket = run_dir / f"ssh-{node}-{os.getpid()}.sock"
        self._errors = self._socket.with_suffix(".log")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """What a Docker client connects to."""
        return f"unix://{self._socket}"

    def ensure(self) -> None:
        """Return once the socket is forwarded; blocks for some seconds at most.

        Raises:
            NodeUnreachable: with ssh's own last words.
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
                build_command(self._url, self._socket, self._files.options(self._node)),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
        end = time.monotonic() + _START_DEADLINE_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise NodeUnreachable(f"node {self._node}: ssh ended: {self._last_words()}")
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

    def _last_words(self) -> str:
        lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "without a word"
