"""The connections to the nodes' Docker, which cases delay and cut, and the daemons themselves."""

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

from gpuhub.common.paths import Paths
from gpuhub_closet import docker_daemons, shell
from gpuhub_closet.paths import node_paths
from gpuhub_closet.topology import ClosetPlan
from tests.faults.testbed.certificates import Authority
from tests.support.product import ROOT, wait_for

#: The relays' port.
PORT = 2376


@dataclass(slots=True, kw_only=True)
class NodeAccess:
    """The practice closet's nodes, each with a relay in front of its Docker."""

    paths: Paths
    plan: ClosetPlan
    _relays: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    # -- relays ----------------------------------------------------------------------------------------------------

    def relay_folder(self, node: str) -> Path:
        """Return the folder of the node's relay: its certificates, fault and log."""
        return self.paths.run / "relays" / node

    def start_relay(self, node: str) -> None:
        """Start a relay that serves the node's Docker on the node's network."""
        folder, closet_node = self.relay_folder(node), self.plan.node(node)
        for name in ("fault", "matched", "serves"):
            (folder / name).unlink(missing_ok=True)
        command = [
            "nsenter", f"--net=/run/netns/{self.plan.netns_name(closet_node)}",
            sys.executable, "-m", "tests.faults.testbed.relay",
            str(closet_node.address), str(PORT), str(node_paths(self.paths, closet_node).socket), str(folder),
        ]  # fmt: skip
        with (folder / "log").open("ab") as log:
            self._relays[node] = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        wait_for((folder / "serves").exists, f"the relay to {node} serves: {folder / 'log'}", 20)

    def stop_relay(self, node: str) -> None:
        """Stop the relay, so that the node's Docker cannot be reached."""
        relay = self._relays.pop(node)
        relay.kill()
        relay.wait(10)

    def _make_certificates(self) -> None:
        authority = Authority.make("nodes")
        for node in self.plan.nodes:
            folder = self.relay_folder(node.name)
            folder.mkdir(parents=True, exist_ok=True)
            authority.write(folder / "ca.pem")
            authority.issue(folder / "server", str(node.address))
            authority.issue(folder / "client")
            authority.issue(folder / "expired", str(node.address), begins=-3, ends=-1)
            Authority.make("strangers").issue(folder / "stranger", str(node.address))

    @contextmanager
    def fault(self, node: str, on: str, do: str, **parameters: Any) -> Iterator[RelayFault]:
        """Inject a fault into the requests to the node's Docker that match; see `relay`."""
        folder = self.relay_folder(node)
        (folder / "matched").unlink(missing_ok=True)
        fresh = folder / "fault.new"
        fresh.write_text(json.dumps({"on": on, "do": do, "id": uuid.uuid4().hex, **parameters}))
        fresh.replace(folder / "fault")
        try:
            yield RelayFault(folder)
        finally:
            (folder / "fault").unlink(missing_ok=True)

    @contextmanager
    def dropped(self, node: str, *rules: tuple[str, ...]) -> Iterator[None]:
        """Drop all packets of the node, or those that match these rules (chain, then matches)."""
        space = ("ip", "netns", "exec", self.plan.netns_name(self.plan.node(node)), "iptables", "--wait", "10")
        wanted = rules or (("INPUT",), ("OUTPUT",), ("FORWARD",))
        for chain, *matches in wanted:
            shell.run_command((*space, "-I", chain, *matches, "-j", "DROP"))
        try:
            yield
        finally:
            for chain, *matches in wanted:
                shell.run_command((*space, "-D", chain, *matches, "-j", "DROP"))

    # -- daemons --------------------------------------------------------------------------------------------------

    def signal_daemon(self, node: str, number: signal.Signals) -> None:
        """Signal the node's dockerd; SIGKILL ends all its containers too."""
        for pid, name in docker_daemons.find_processes(self.plan, self.plan.node(node)).items():
            if name == "dockerd":
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def crash(self, node: str) -> None:
        """Simulate a power cut; return when the node is up again."""
        self.signal_daemon(node, signal.SIGKILL)
        shell.wait_until(lambda: not docker_daemons.is_answering(self.plan.node(node), self.paths), timeout_s=10)
        docker_daemons.wait_ready(self.plan, self.paths)

    @contextmanager
    def frozen(self, node: str) -> Iterator[None]:
        """Freeze the node's dockerd; its containers keep running."""
        self.signal_daemon(node, signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal_daemon(node, signal.SIGCONT)

    def client_of(self, node: str) -> docker.APIClient:
        """Return a client of the node's Docker that bypasses relay and product; close it after use."""
        url = node_paths(self.paths, node).docker_url
        return docker.APIClient(base_url=url, version="auto", timeout=30)


@dataclass(frozen=True, slots=True)
class RelayFault:
    """A fault of a relay."""

    folder: Path

    def list_matched(self) -> list[str]:
        """Return the requests that it matched."""
        file = self.folder / "matched"
        return file.read_text().splitlines() if file.exists() else []

    def wait_matched(self, deadline_s: float = 30) -> None:
        """Wait until it has matched a request."""
        wait_for(lambda: bool(self.list_matched()), "a request matches the fault", deadline_s, every_s=0.02)
