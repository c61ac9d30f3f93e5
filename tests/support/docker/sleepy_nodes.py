"""Simulated nodes that sleep: real commands switch them, whose files the machines follow."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.docker.simulated_nodes import SimulatedNode


def build_switch(folder: Path, node: str, action: str) -> tuple[str, ...]:
    """Return the command that switches a node `on` or `off`."""
    return ("/usr/bin/touch", f"{folder}/{node}.{action}")


@contextmanager
def follow_switches(folder: Path, nodes: Mapping[str, SimulatedNode]) -> Iterator[None]:
    """Let machines follow their switches: those told to sleep stop answering, and the others come up."""
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(0.01):
            for name, node in nodes.items():
                for file, is_reachable in ((folder / f"{name}.off", False), (folder / f"{name}.on", True)):
                    if file.exists():
                        file.unlink()
                        node.is_reachable = is_reachable

    thread = threading.Thread(target=follow, name="switches")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(5)
