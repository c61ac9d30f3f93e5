"""The ways to the nodes' Docker, which cases hold up, cut and break; and the daemons themselves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker

from gpuhub.closet import daemons, shell
from gpuhub.closet.places import node_places
from gpuhub.closet.plan import Plan
from gpuhub.paths import Paths
from tests.faults.certificates import Authority
from tests.support.product import ROOT, wait_for

#: Where the nodes' Docker is reached.
PORT = 2376


@dataclass(slots=True, kw_only=True)
class Ways:
    """The practice closet's nodes, each with a wire in front of its Docker; see `wire`."""

    paths: Paths
    plan: Plan
    _wires: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    # -- wires ----------------------------------------------------------------------------------------------------

    def wire_folder(self, node: str) -> Path:
        """What the node's wire reads and says."""
        return self.paths.run / "wires" / node

    def start_wire(self, node: str) -> None:
        """Have the node's Docker reached over its network."""
        folder, closet_node = self.wire_folder(node), self.plan.node(node)
        for name in ("trouble", "met", "serves"):
            (folder / name).unlink(missing_ok=True)
        command = [
            "nsenter", f"--net=/run/netns/{self.plan.netns(closet_node)}",
            sys.executable, "-m", "tests.faults.wire",
            str(closet_node.address), str(PORT), str(node_places(self.paths, closet_node).socket), str(folder),
        ]  # fmt: skip
        with (folder / "log").open("ab") as log:
            self._wires[node] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        wait_for((folder / "serves").exists, f"the wire to {node} serves: {folder / 'log'}", 20)

    def stop_wire(self, node: str) -> None:
        """Nobody reaches the node's Docker."""
        wire = self._wires.pop(node)
        wire.kill()
        wire.wait(10)

    def _make_certificates(self) -> None:
        authority = Authority.make("nodes")
        for node in self.plan.nodes:
            folder = self.wire_folder(node.name)
            folder.mkdir(parents=True, exist_ok=True)
            authority.write(folder / "ca.pem")
            authority.issue(folder / "server", str(node.address))
            authority.issue(folder / "client")
            authority.issue(folder / "expired", str(node.address), begins=-3, ends=-1)
            Authority.make("strangers").issue(folder / "stranger", str(node.address))

    @contextmanager
    def trouble(self, node: str, on: str, do: str, **more: Any) -> Iterator[Trouble]:
        """Requests to the node's Docker that match meet this; see `wire`."""
        folder = self.wire_folder(node)
        (folder / "met").unlink(missing_ok=True)
        fresh = folder / "trouble.new"
        fresh.write_text(json.dumps({"on": on, "do": do, "id": uuid.uuid4().hex, **more}))
        fresh.replace(folder / "trouble")
        try:
            yield Trouble(folder)
        finally:
            (folder / "trouble").unlink(missing_ok=True)

    @contextmanager
    def dropped(self, node: str, *rules: tuple[str, ...]) -> Iterator[None]:
        """Packets of the node are dropped: all of them, or by these rules (chain, then matches)."""
        space = ("ip", "netns", "exec", self.plan.netns(self.plan.node(node)), "iptables", "--wait", "10")
        wanted = rules or (("INPUT",), ("OUTPUT",), ("FORWARD",))
        for chain, *matches in wanted:
            shell.run((*space, "-I", chain, *matches, "-j", "DROP"))
        try:
            yield
        finally:
            for chain, *matches in wanted:
                shell.run((*space, "-D", chain, *matches, "-j", "DROP"))

    # -- daemons --------------------------------------------------------------------------------------------------

    def signal_daemon(self, node: str, number: signal.Signals) -> None:
        """To the node's dockerd; SIGKILL ends all its containers with it."""
        for pid, name in daemons.processes(self.plan, self.plan.node(node)).items():
            if name == "dockerd":
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def crash(self, node: str) -> None:
        """A power cut; the node is up again when this returns."""
        self.signal_daemon(node, signal.SIGKILL)
        shell.wait_until(lambda: not daemons.is_answering(self.plan.node(node), self.paths), timeout_s=10)
        daemons.wait_ready(self.plan, self.paths)

    @contextmanager
    def frozen(self, node: str) -> Iterator[None]:
        """The node's dockerd does not answer; its containers go on."""
        self.signal_daemon(node, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal_daemon(node, signal.SIGCONT)

    def client_of(self, node: str) -> docker.APIClient:
        """The node's Docker itself, past the product; close it after use."""
        url = node_places(self.paths, node).docker_url
        return docker.APIClient(base_url=url, version="auto", timeout=30)


@dataclass(frozen=True, slots=True)
class Trouble:
    """A wire's trouble."""

    folder: Path

    def met(self) -> list[str]:
        """The requests that met it."""
        file = self.folder / "met"
        return file.read_text().splitlines() if file.exists() else []

    def wait_met(self, deadline_s: float = 30) -> None:
        """Until one did."""
        wait_for(lambda: bool(self.met()), "a request meets the trouble", deadline_s, every_s=0.02)
