"""NFS servers on loopback: a real one in user space (nfs-ganesha) with libnfs's tools, and prepared replies to RPC calls.

Neither needs the kernel's NFS client.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpuhub.storage.probe import NfsServer, probe_server

_READY_S = 30.0
_CONFIG = """
NFS_CORE_PARAM {{
  Bind_addr = {host}; NFS_Port = {port}; Protocols = 4;
  Enable_NLM = false; Enable_RQUOTA = false; Enable_UDP = false;
}}
NFSv4 {{ Graceless = true; RecoveryBackend = fs; RecoveryRoot = {state}; Only_Numeric_Owners = true; }}
EXPORT {{
  Export_Id = 1; Path = {folder}; Pseudo = /export; Protocols = 4; Transports = TCP;
  Access_Type = RW; Squash = {squash}; SecType = sys;
  FSAL {{ Name = VFS; }}
}}
"""
#: Returns the bytes to send for a call's transaction id; None keeps the connection open without a reply.
Reply = Callable[[int], bytes | None]


@dataclass(frozen=True, slots=True)
class RunningNfsServer:
    """A running server; its export `/export` is `folder`."""

    host: str
    port: int
    folder: Path
    process: subprocess.Popen[bytes]

    def signal(self, number: signal.Signals) -> None:
        """Signal the server: SIGSTOP hangs it like a dead machine, SIGCONT resumes it."""
        os.kill(self.process.pid, number)

    def url(self, path: str, uid: int) -> str:
        """Return a URL for libnfs's tools with that user's id."""
        return f"nfs://{self.host}/export/{path}?version=4&nfsport={self.port}&uid={uid}&gid={uid}"

    def tool(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `nfs-ls`, `nfs-cat` or `nfs-cp`."""
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)


@contextmanager
def serving_nfs(
    state: Path, host: str = "127.0.0.1", squash: str = "No_root_squash", namespace: str | None = None
) -> Iterator[RunningNfsServer]:
    """Start a server of a new folder below `state`, and wait until it answers; in a network namespace, if one is given."""
    folder, recovery, log = state / "export", state / "recovery", state / "ganesha.log"
    for new_folder in (folder, recovery):
        new_folder.mkdir(parents=True)
    with socket.create_server(("" if namespace else host, 0)) as free:
        port = free.getsockname()[1]
    config = state / "ganesha.conf"
    config.write_text(_CONFIG.format(host=host, port=port, state=recovery, folder=folder, squash=squash))
    command: tuple[str, ...] = (
        "ganesha.nfsd",
        "-F",
        "-f",
        str(config),
        "-L",
        str(log),
        "-p",
        str(state / "ganesha.pid"),
    )
    if namespace is not None:
        command = ("ip", "netns", "exec", namespace, *command)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + _READY_S
        while trouble := probe_server(NfsServer(host=host, port=port, version=4), 1.0):
            assert time.monotonic() < end, f"{trouble}\n{log.read_text() if log.exists() else ''}"
            time.sleep(0.1)
        yield RunningNfsServer(host, port, folder, process)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def encode_accepted_reply(xid: int) -> bytes:
    """Return the reply that the program supports the version."""
    return encode_record(xid, 1, 0, 0, 0, 0)


def encode_record(*words: int) -> bytes:
    """Return words as one record."""
    return struct.pack(f">{len(words) + 1}I", 0x80000000 | 4 * len(words), *words)


@contextmanager
def serve_reply(reply: Reply) -> Iterator[tuple[int, list[int]]]:
    """Yield a server's port, and the list of the versions in its calls."""
    asked: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                kept.append(connection)
                call = connection.recv(1024)
                xid, version = struct.unpack(">I", call[4:8])[0], struct.unpack(">I", call[20:24])[0]
                asked.append(version)
                answer = reply(xid)
                if answer is not None:
                    with suppress(OSError):  # the client has read enough
                        connection.sendall(answer)
                        connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1], asked
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            for connection in kept:
                connection.close()
