"""The bed that cases lie on: the whole product on a practice closet whose daemons are reached over the nodes' network."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit

from gpuhub import names, secrets, settings
from gpuhub.closet import cards, daemons
from gpuhub.closet.plan import practice_plan
from gpuhub.head.programs import BROKER, HUB
from gpuhub.head.supervisor import Supervisor
from gpuhub.paths import Paths
from tests.faults import light
from tests.faults.asking import Asking
from tests.faults.ways import PORT
from tests.support.observer import Observer
from tests.support.product import run_make, wait_for
from tests.support.users import log_in, with_token

INSTANCE = os.environ.get("GPUHUB_TEST_INSTANCE", "ghtest")
#: Leaves the product as it is at the end, and takes it up at the next beginning: for whoever writes cases.
KEEP = bool(os.environ.get("GPUHUB_FAULTS_KEEP"))
USERS = ("ada", "ben", "cyd", "dee", "eve")
#: A lease that ends while its node is away is quarantined after this, seconds; shorter than usual, so that cases are.
QUARANTINE_S = 10
#: Each user's home has this file; nobody may change it.
KEPT = "kept.bin"


@dataclass(slots=True, kw_only=True)
class Bed(Asking):
    """The running product: brought up, broken, put right, taken down."""

    # -- beginning and end ----------------------------------------------------------------------------------------

    @classmethod
    def make(cls) -> Bed:
        """Nothing runs yet."""
        paths, plan = Paths(INSTANCE), practice_plan(INSTANCE)
        return cls(paths=paths, plan=plan, observer=Observer(plan, paths), supervisor=Supervisor(paths))

    def begin(self) -> None:
        """Bring it up."""
        is_up = KEEP and self.supervisor.is_running()
        if is_up:
            for name in (HUB, BROKER):
                self.supervisor.stop(name)
            self._remove_containers()
        else:
            run_make(INSTANCE, "down")
        for stale in ("jupyterhub.sqlite", "broker.sqlite"):
            for file in self.paths.state.glob(f"{stale}*"):
                file.unlink()
        if not is_up:
            run_make(INSTANCE, "up")
        for node in self.plan.nodes:
            light.ensure_image(self.paths, node)
        self._make_certificates()
        for node in self.plan.nodes:
            self.start_wire(node.name)
        self._settle_on_wires()

    def end(self) -> None:
        """Take it down."""
        self.observer.end()
        for client in (*self.clients.values(), self.everybody):
            if client is not None:
                client.close()
        if not KEEP:
            run_make(INSTANCE, "down")
        for name in list(self._wires):
            self.stop_wire(name)

    def _remove_containers(self) -> None:
        """What an earlier run has left."""
        for node in self.plan.nodes:
            with self.client_of(node.name) as client:
                for one in client.containers(all=True, filters=label_filter(self)):
                    if one["Labels"].get(names.LABEL_LEASE):
                        client.remove_container(one["Id"], force=True, v=True)

    def _settle_on_wires(self) -> None:
        """Hub and broker are started with settings that reach the nodes over their network."""
        for name in (HUB, BROKER):
            self.supervisor.stop(name)
        text = self.settings_text()
        self.paths.closet_cluster_file.write_text(text, encoding="utf-8")
        # So that `make down` finds the nodes in the usual way, whether or not there are wires by then.
        cluster = settings.load(self.paths.closet_cluster_file)
        self.address = f"http://{cluster.hub.bind}:{cluster.hub.port}"
        for name in (BROKER, HUB):
            self.supervisor.ensure_started(name)
        token = secrets.read_secret(self.paths, secrets.SPAWNER_TOKEN)
        self.everybody = with_token(self.address, "everybody", token)
        wait_for(self.is_live, "hub and broker answer", 60)
        password = secrets.read_secret(self.paths, secrets.USER_PASSWORD)
        for name in USERS:
            self.clients[name] = log_in(self.address, name, password)

    def settings_text(self, **changes: dict[str, Any]) -> str:
        """The closet's settings with the wires, light profiles and our users; `changes` by table name."""
        file = self.paths.closet_cluster_file
        made = tomlkit.parse(file.read_text(encoding="utf-8")).unwrap()
        for node in made["nodes"]:
            folder = self.wire_folder(node["name"])
            node["docker"] = f"tcp://{node['address']}:{PORT}"
            node["tls"] = {key: str(folder / f) for key, f in _TLS.items()}
        made["profiles"] = [one for one in made["profiles"] if one["name"] not in _PROFILES] + [
            {"name": name, "title": name, "image": light.IMAGE, **_SMALL, **more} for name, more in _PROFILES.items()
        ]
        made["users"]["allowed"] = list(USERS)
        made["scheduling"]["quarantine_after"] = f"{QUARANTINE_S}s"
        for table, values in changes.items():
            made.setdefault(table, {}).update(values)
        return tomlkit.dumps(made)

    # -- hub and broker -------------------------------------------------------------------------------------------

    def kill(self, program: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Signal hub or broker; its process id."""
        pid = self.supervisor.pid(program)
        assert pid, f"{program} does not run"
        os.kill(pid, number)
        return pid

    def wait_renewed(self, program: str, old: int) -> None:
        """Return when supervisord runs another process and the product answers."""
        wait_for(lambda: self.supervisor.pid(program) not in {0, old}, f"{program} is started again", 30)
        wait_for(self.is_live, "hub and broker answer", 90)

    def kill_and_wait(self, program: str) -> float:
        """Kill it; seconds until the product answers again."""
        began = time.monotonic()
        self.wait_renewed(program, self.kill(program))
        return time.monotonic() - began

    # -- putting right --------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Whatever a case has left broken is mended; wires, links, daemons, cards, hub and broker."""
        for program in (BROKER, HUB):
            pid = self.supervisor.pid(program)
            if pid:
                os.kill(pid, signal.SIGCONT)
            self.supervisor.ensure_started(program)
        for node in self.plan.nodes:
            (self.wire_folder(node.name) / "trouble").unlink(missing_ok=True)
            self.signal_daemon(node.name, signal.SIGCONT)
            for index in range(len(node.cards)):
                cards.set_live(self.paths, node, index, cards.Live())
        daemons.wait_ready(self.plan, self.paths)
        wait_for(self.is_live, "hub and broker answer", 90)

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
        wait_for(self._nobody_left, "every server and lease ends", 90)
        for client in self.clients.values():
            for server in client.stopped():
                client.stop(server)

    def _nobody_left(self) -> bool:
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
    "on2": {"gpu_model": "RTX 5070"},
    "on3": {"gpu_model": "RTX 5060"},
    "absent": {"gpu_model": "RTX 5060", "image": "gpuhub/absent:1"},
}


def home(bed: Bed, name: str) -> Path:
    """A user's home on the head node."""
    return bed.paths.state / "homes" / name


def label_filter(bed: Bed) -> dict[str, list[str]]:
    """What Docker lists of this instance."""
    return {"label": [f"{names.LABEL_INSTANCE}={bed.paths.instance}"]}
