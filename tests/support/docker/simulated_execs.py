"""A Docker daemon's exec, which runs gpu-launch's courier or a service's relay on this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gpuhub.docker.containers.container_spec import COURIER_COMMAND

_ids = itertools.count(1)


@dataclass(slots=True)
class SimulatedExecs:
    """The execs of one node, by id."""

    made: dict[str, tuple[list[str], dict[str, str]]] = field(default_factory=dict)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def create(self, command: Sequence[str], home: Path) -> str:
        """Register a command and return its id."""
        name = f"exec{next(_ids)}"
        if command[0] == "python3":
            # A service's relay.
            words = [sys.executable, *command[1:]]
        else:
            assert tuple(command[: len(COURIER_COMMAND)]) == COURIER_COMMAND
            words = [sys.executable, "-m", "gpu_launch.courier", *command[len(COURIER_COMMAND) :]]
        self.made[name] = words, {**os.environ, "HOME": str(home), "SHELL": "/bin/bash"}
        return name

    def start(self, name: str) -> socket.socket:
        """Run it and return its streams in Docker's frames."""
        words, environ = self.made.pop(name)
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
        )
        self.running.append(process)
        ours, theirs = socket.socketpair()
        threading.Thread(target=_serve, args=(process, ours), daemon=True).start()
        return theirs


def _serve(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    lock = threading.Lock()
    outputs = [
        threading.Thread(target=_pass_output, args=(process.stdout, 1, connection, lock), daemon=True),
        threading.Thread(target=_pass_output, args=(process.stderr, 2, connection, lock), daemon=True),
    ]
    incoming = threading.Thread(target=_pass_input, args=(connection, process.stdin), daemon=True)
    for thread in (*outputs, incoming):
        thread.start()
    for thread in outputs:
        thread.join()
    process.wait()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    incoming.join()
    connection.close()


def _pass_input(connection: socket.socket, stdin: IO[bytes]) -> None:
    """Copy the client's input, and close it when the client disconnects, as Docker does."""
    with contextlib.suppress(OSError):
        while data := connection.recv(65536):
            stdin.write(data)
            stdin.flush()
    with contextlib.suppress(OSError):
        stdin.close()


def _pass_output(source: IO[bytes], stream: int, connection: socket.socket, lock: threading.Lock) -> None:
    """Copy output to the client, and keep reading when the client has disconnected, as Docker does."""
    with source:
        while data := os.read(source.fileno(), 32768):
            with lock, contextlib.suppress(OSError):
                connection.sendall(struct.pack(">BxxxI", stream, len(data)) + data)
