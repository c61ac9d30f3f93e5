"""Mutual TLS for a node's Docker daemon: certificates made and brought there, the daemon told of them, and tried."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gpuhub.admin.commands import Console
from gpuhub.errors import SetupError
from gpuhub.nodes.adding import certificates, daemon_tls, steps
from gpuhub.nodes.adding.remote import Remote
from gpuhub.nodes.doctor.facts import HostFacts
from gpuhub.paths import Paths
from gpuhub.settings import Node
from gpuhub.trust.authority import RENEW_BEFORE, utc_now


@dataclass(frozen=True, slots=True, kw_only=True)
class Secured:
    """What is known of the machine when it is to get certificates."""

    node: Node
    host: HostFacts
    #: Its containers outlive a restart of its daemon.
    live_restore: bool
    #: Nobody is to be asked.
    yes: bool

    @property
    def as_root(self) -> bool:
        """Root's part needs sudo."""
        return self.host.sudo != "root"


def secure(remote: Remote, machine: Secured, paths: Paths, console: Console) -> None:
    """Have the daemon speak TLS with us and nobody else; certificates that are good already stay.

    Raises:
        SetupError: it does not, with what to set where systemd does not start it.
    """
    node, files = machine.node, certificates.client_files(paths, machine.node.name)
    # Made already and not in use: the daemon waits to be started with them.
    if not certificates.is_good(files, node.address, utc_now(), before=RENEW_BEFORE):
        made = certificates.make(node.name, node.address, utc_now())
        remote.run(daemon_tls.build_files_script(made), as_root=machine.as_root)
        certificates.store(files, made)
        console.say(f"  ✓ certificates made: the node's in {daemon_tls.FOLDER} there, ours in {files.key.parent}")
        _restart(remote, machine, console)
    try:
        version = asyncio.run(steps.verify(node, paths))
    except SetupError as error:
        raise SetupError(f"{error}\n{daemon_tls.by_hand(node.address)}") from None
    console.say(f"  ✓ Docker {version} answers over TLS, and nobody without our certificate")


def _restart(remote: Remote, machine: Secured, console: Console) -> None:
    node, host = machine.node, machine.host
    if not host.systemd or not host.docker_start:
        raise SetupError(f"systemd does not run Docker there: {daemon_tls.by_hand(node.address)}")
    text = daemon_tls.build_drop_in(host.docker_start, node.address)
    console.say(f"\n{daemon_tls.DROP_IN} on {node.name}:\n\n{text}")
    if not machine.yes:
        outcome = "run on" if machine.live_restore else "stop"
        console.confirm(f"Write it and restart Docker there (its containers {outcome})?")
    remote.run(daemon_tls.build_drop_in_script(text), as_root=machine.as_root)
    remote.run(daemon_tls.RESTART, as_root=machine.as_root)
