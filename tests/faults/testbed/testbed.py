"""The testbed of the cases: the whole product on a practice closet whose daemons are reached over the nodes' network."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import tomlkit
from docker.errors import APIError

from gpuhub.common import names, secrets
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.ops.deploy.programs import BROKER, HUB, Supervisor
from gpuhub_closet import docker_daemons, gpu_state
from gpuhub_closet.layouts import build_plan
from tests.faults.testbed import light_image
from tests.faults.testbed.node_access import PORT
from tests.faults.testbed.user_actions import UserActions
from tests.support.closet import practice_closet
from tests.support.closet.observer import Observer
from tests.support.hub.users import log_in, with_token
from tests.support.product import build_instance, run_make, stop_earlier_run, wait_for

#: Processes of pytest-xdist inject cases side by side, each into a product of its own.
INSTANCE = build_instance(os.environ.get("GPUHUB_TEST_INSTANCE", "ghtest"), os.environ.get("PYTEST_XDIST_WORKER", ""))
#: Leaves the product running at the end and reuses it at the next start, for authors of cases.
KEEP = bool(os.environ.get("GPUHUB_FAULTS_KEEP"))
USERS = ("ada", "ben", "cyd", "dee", "eve")
#: A lease that ends on an unreachable node is quarantined after this, seconds; short, so that cases are short.
QUARANTINE_S = 10
#: Longest time after a network partition until Swarm works on every node again, seconds: for a minute the others' pause
#: between two attempts to reach the node that was away, then for an election.
SWARM_DEADLINE_S = 150
#: A file in each user's home that must not change.
KEPT = "kept.bin"


@dataclass(slots=True, kw_only=True)
class FaultTestbed(UserActions):
    """The running product, with operations that start, break, repair and stop it."""

    # -- beginning and end ----------------------------------------------------------------------------------------

    @classmethod
    def make(cls) -> FaultTestbed:
        """Return a testbed that is not started."""
        paths, plan = Paths(INSTANCE), build_plan(INSTANCE)
        return cls(paths=paths, plan=plan, observer=Observer(plan, paths), supervisor=Supervisor(paths))

    def begin(self) -> None:
        """Start the product."""
        is_up = KEEP and self.supervisor.is_running()
        if is_up:
            for name in (HUB, BROKER):
                self.supervisor.stop(name)
            self._remove_containers()
        else:
            stop_earlier_run(INSTANCE)
        for stale in ("jupyterhub.sqlite", "broker.sqlite"):
            for file in self.paths.state.glob(f"{stale}*"):
                file.unlink()
        if not is_up:
            run_make(INSTANCE, "up")
        for node in self.plan.nodes:
            light_image.ensure_image(self.paths, node)
        self._make_certificates()
        for node in self.plan.nodes:
            self.start_relay(node.name)
        self._restart_with_relays()

    def end(self) -> None:
        """Stop the product."""
        self.observer.end()
        for client in (*self.clients.values(), self.all_owners):
            if client is not None:
                client.close()
        if not KEEP:
            run_make(INSTANCE, "down")
        for name in list(self._relays):
            self.stop_relay(name)

    def _remove_containers(self) -> None:
        """Remove the containers of an earlier run."""
        for node in self.plan.nodes:
            with self.client_of(node.name) as client:
                for container in client.containers(all=True, filters=label_filter(self)):
                    if container["Labels"].get(names.LABEL_LEASE):
                        client.remove_container(container["Id"], force=True, v=True)

    def _restart_with_relays(self) -> None:
        """Restart hub and broker with settings that reach the nodes through the relays."""
        for name in (HUB, BROKER):
            self.supervisor.stop(name)
        text = self.settings_text()
        self.paths.closet_cluster_file.write_text(text, encoding="utf-8")
        # `make down` reaches the nodes as usual, whether or not relays run.
        cluster = settings.load(self.paths.closet_cluster_file)
        self.address = f"http://{cluster.hub.bind}:{cluster.hub.port}"
        for name in (BROKER, HUB):
            self.supervisor.ensure_started(name)
        token = secrets.read_secret(self.paths, secrets.SPAWNER_TOKEN)
        self.all_owners = with_token(self.address, "all_owners", token)
        wait_for(self.is_live, "hub and broker answer", 60)
        password = secrets.read_secret(self.paths, secrets.USER_PASSWORD)
        for name in USERS:
            self.clients[name] = log_in(self.address, name, password)

    def settings_text(self, **changes: dict[str, Any]) -> str:
        """Return the closet's settings with relays, light profiles and the cases' users; `changes` by table name."""
        file = self.paths.closet_cluster_file
        tables = tomlkit.parse(file.read_text(encoding="utf-8")).unwrap()
        for node in tables["nodes"]:
            folder = self.relay_folder(node["name"])
            node["docker"] = f"tcp://{node['address']}:{PORT}"
            node["tls"] = {key: str(folder / f) for key, f in _TLS.items()}
        tables["profiles"] = [profile for profile in tables["profiles"] if profile["name"] not in _PROFILES] + [
            {"name": name, "title": name, "image": light_image.IMAGE, **_SMALL, **options}
            for name, options in _PROFILES.items()
        ]
        tables["users"]["allowed"] = list(USERS)
        tables["scheduling"]["quarantine_after"] = f"{QUARANTINE_S}s"
        for table, values in changes.items():
            tables.setdefault(table, {}).update(values)
        return tomlkit.dumps(tables)

    # -- hub and broker -------------------------------------------------------------------------------------------

    def kill(self, program: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal hub or broker and return its process id."""
        pid = self.supervisor.pid(program)
        assert pid, f"{program} does not run"
        os.kill(pid, number)
        return pid

    def wait_renewed(self, program: str, old: int) -> None:
        """Wait until supervisord runs another process and the product answers."""
        wait_for(lambda: self.supervisor.pid(program) not in {0, old}, f"{program} is started again", 30)
        wait_for(self.is_live, "hub and broker answer", 90)

    def kill_and_wait(self, program: str) -> float:
        """Kill a program and return the seconds until the product answers again."""
        began = time.monotonic()
        self.wait_renewed(program, self.kill(program))
        return time.monotonic() - began

    # -- putting right --------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """End every fault of relays, links, daemons, GPUs, hub and broker."""
        for program in (BROKER, HUB):
            pid = self.supervisor.pid(program)
            if pid:
                os.kill(pid, signal.SIGCONT)
            self.supervisor.ensure_started(program)
        for node in self.plan.nodes:
            (self.relay_folder(node.name) / "fault").unlink(missing_ok=True)
            self.signal_daemon(node.name, signal.SIGCONT)
            for index in range(len(node.gpus)):
                practice_closet.set_gpu_load(self.paths, node, index, gpu_state.GpuLoad())
        docker_daemons.wait_ready(self.plan, self.paths)
        wait_for(self.is_live, "hub and broker answer", 90)
        wait_for(self._has_whole_swarm, "every node is in the Swarm and knows its leader", SWARM_DEADLINE_S, every_s=1)

    def _has_whole_swarm(self) -> bool:
        """Return whether every node that manages the Swarm knows a leader and lists every node as ready."""
        for node in self.plan.nodes:
            with closing(self.client_of(node.name)) as client:
                try:
                    members = client.nodes()
                except (APIError, requests.Timeout):
                    return False
            leaders = [member for member in members if member.get("ManagerStatus", {}).get("Leader")]
            ready = [member for member in members if member["Status"]["State"] == "ready"]
            if len(leaders) != 1 or len(ready) < len(self.plan.nodes):
                return False
        return True

    def clear(self) -> None:
        """End every server, job and lease, and wait until all GPUs are free."""
        self.clear_servers()
        wait_for(self.are_all_free, self.describe, 60)

    def clear_servers(self) -> None:
        """End every server, job and lease."""
        for client in self.clients.values():
            for server in client.servers() or {}:
                client.stop(server)
            status, jobs = client.ask(client.broker, "GET", "/jobs")
            for job in jobs if status == 200 else ():
                client.ask(client.broker, "DELETE", f"/jobs/{job['id']}")
        wait_for(self._is_empty, "every server and lease ends", 90)
        for client in self.clients.values():
            for server in client.stopped():
                client.stop(server)

    def _is_empty(self) -> bool:
        for row in self.leases() or ():
            if row["state"] == "requested" or row["owner"] not in USERS:
                self.all.ask(self.all.broker, "DELETE", f"/leases/{row['id']}")
        for client in self.clients.values():
            for name, server in (client.servers() or {}).items():
                if not server.get("pending"):
                    client.stop(name)
        return self.leases() == [] and all(client.servers() == {} for client in self.clients.values())


_TLS = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
_SMALL = {"cpus": 1, "memory": "96M", "shm": "16M", "pids": 64}
_PROFILES: dict[str, dict[str, Any]] = {
    "light": {"gpu_count": 0},
    "anygpu": {"gpu_count": 1},
    "on1": {"gpu_model": "RTX 5090"},
    "half1": {"gpu_model": "RTX 5090", "gpu_share": 2},
    "on2": {"gpu_model": "RTX 5070"},
    "on3": {"gpu_model": "RTX 5060"},
    "absent": {"gpu_model": "RTX 5060", "image": "gpuhub/absent:1"},
}


def home_of(testbed: FaultTestbed, name: str) -> Path:
    """Return a user's home on the head node."""
    return testbed.paths.state / "homes" / name


def label_filter(testbed: FaultTestbed) -> dict[str, list[str]]:
    """Return Docker's filter for the instance's objects."""
    return {"label": [f"{names.LABEL_INSTANCE}={testbed.paths.instance}"]}
