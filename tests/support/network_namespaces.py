"""Machines as network namespaces on one bridge, each with a link of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machines:
    """Namespaces `NAME0`, `NAME1` and so on, with the addresses `PREFIX.1`, `PREFIX.2` and so on."""

    name: str
    prefix: str

    def namespace(self, number: int) -> str:
        return f"{self.name}{number}"

    def address(self, number: int) -> str:
        return f"{self.prefix}.{number + 1}"

    def enter(self, number: int, *command: str) -> list[str]:
        """Return the command that runs another one on a machine."""
        return ["ip", "netns", "exec", self.namespace(number), *command]


@contextmanager
def machines(name: str, prefix: str, count: int, rate: str | None = None) -> Iterator[Machines]:
    """Make machines on a bridge, where this machine has the address `PREFIX.254`.

    Args:
        rate: Of each link in both directions, as tc(8) writes it; None for no limit.
    """
    made = Machines(name, prefix)
    _remove(made, count)
    try:
        _run("ip", "link", "add", name, "type", "bridge")
        _run("ip", "addr", "add", f"{prefix}.254/24", "dev", name)
        _run("ip", "link", "set", name, "up")
        for number in range(count):
            namespace = made.namespace(number)
            _run("ip", "netns", "add", namespace)
            _run("ip", "link", "add", namespace, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _run("ip", "link", "set", namespace, "master", name, "up")
            _run("ip", "-netns", namespace, "addr", "add", f"{made.address(number)}/24", "dev", "eth0")
            _run("ip", "-netns", namespace, "link", "set", "eth0", "up")
            _run("ip", "-netns", namespace, "link", "set", "lo", "up")
            if rate is not None:
                bucket = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "20ms")
                _run("tc", "qdisc", "replace", "dev", namespace, *bucket)
                _run("tc", "-netns", namespace, "qdisc", "replace", "dev", "eth0", *bucket)
        yield made
    finally:
        _remove(made, count)


def _remove(made: Machines, count: int) -> None:
    for number in range(count):
        # A namespace may outlive its name for as long as a connection of it, and keep its link.
        _run("ip", "link", "del", made.namespace(number), check=False)
        _run("ip", "netns", "del", made.namespace(number), check=False)
    _run("ip", "link", "del", made.name, check=False)


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True, timeout=60)
