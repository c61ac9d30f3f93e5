"""The options of `gpuhub node add|remove|firewall` and of `gpuhub doctor`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpuhub.paths import DEFAULT_INSTANCE

if TYPE_CHECKING:
    Group = argparse._SubParsersAction[argparse.ArgumentParser]


def add_commands(commands: Group, node: Group, run: Callable[..., None]) -> None:
    """Add `doctor` to the commands and the others to `node`; each sets `run` and the name of its `action`."""
    add = _command(node, "add", "node-add", "look at a machine and add it to the cluster, or mend a node", run)
    add.add_argument("url", metavar="ssh://USER@MACHINE", help="as you reach it with ssh")
    add.add_argument("--name", help="the node's name; default: the machine's, or rigN")
    add.add_argument("--address", metavar="IP", help="where other nodes reach it; default: where ssh does")
    add.add_argument("--tls", action="store_true", help="reach its Docker over mutual TLS instead of SSH")
    add.add_argument("--dry-run", action="store_true", help="look and show, and change nothing")
    add.add_argument("--up", action="store_true", help="`gpuhub up` afterwards: images, and services that use it")
    remove = _command(node, "remove", "node-remove", "take a node out of the cluster", run)
    remove.add_argument("name", metavar="NAME", help="the node, such as rig1")
    remove.add_argument("--force", action="store_true", help="end what runs there; go on where it does not answer")
    remove.add_argument("--ssh", metavar="ssh://USER@MACHINE", help="how you log in there; default: as it was added")
    for command in (add, remove):
        command.add_argument("-y", "--yes", action="store_true", help="do not ask")
        command.add_argument(
            "--hub-config", type=Path, default=Path("jupyterhub_config.py"), help="default: ./%(default)s"
        )
    firewall = _command(node, "firewall", "node-firewall", "show a node's packet filter", run)
    firewall.add_argument("name", metavar="NAME", help="the node, such as rig1")
    doctor = _command(commands, "doctor", "doctor", "check the head node and every node", run)
    doctor.add_argument("names", nargs="*", metavar="NAME", help="these nodes alone, and not the head node")
    doctor.add_argument("--json", action="store_true", help="for programs")


def _command(commands: Group, name: str, action: str, text: str, run: Callable[..., None]) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run, action=action)
    command.add_argument("--instance", default=DEFAULT_INSTANCE, help="default: %(default)s")
    command.add_argument("--cluster-file", type=Path, default=Path("cluster.toml"), help="default: ./%(default)s")
    return command
