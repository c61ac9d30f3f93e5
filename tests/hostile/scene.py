"""The running product with a victim's and an attacker's containers, and the check that everything else works on."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import tomlkit

from gpuhub.common import names
from gpuhub.ops.deploy.programs import BROKER, HUB, PROXY
from gpuhub_closet.layouts import build_plan
from gpuhub_closet.paths import node_paths
from gpuhub_closet.topology import ClosetPlan
from tests.support.closet.observer import Observer, SeenContainer
from tests.support.hub.browser import Product
from tests.support.hub.users import Client, log_in
from tests.support.product import wait_for

PROBES = Path(__file__).with_name("probes")
#: The victim's server, and the attacker's.
SERVER = "main"
#: The node of the victim's job is for this group alone, of which she is the only member, and so is this service.
GROUP, GROUPS_NODE, GROUPS_SERVICE = "vision", "rig2", "labels"
#: Hub, broker and the victim's notebook answer within this while somebody attacks, seconds. Alone they need some
#: hundredths; the tests' machine has two cores, which attacker, nodes and head node share.
ANSWER_S = 5.0
#: An attack may make a program of the head node grow by at most this, bytes.
GROWTH = 150 * 2**20


@dataclass(frozen=True, slots=True)
class HeadState:
    """What an attack must not change: processes by program, and the containers of the victim."""

    pids: dict[str, int]
    containers: frozenset[str]


@dataclass(slots=True)
class Scene:
    """Ada's notebook and job, and ben's notebook on the same GPU as hers, from which the tests attack."""

    product: Product
    clients: dict[str, Client] = field(default_factory=dict)
    notebooks: dict[str, SeenContainer] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    plan: ClosetPlan = field(init=False)
    observer: Observer = field(init=False)

    def __post_init__(self) -> None:
        self.plan = build_plan(self.product.paths.instance)
        self.observer = Observer(self.plan, self.product.paths)

    @property
    def ada(self) -> Client:
        """The victim."""
        return self.clients["ada"]

    @property
    def ben(self) -> Client:
        """The attacker, as far as he uses the APIs from outside of his container."""
        return self.clients["ben"]

    def begin(self) -> None:
        """Restrict a node, start the victim's notebook and job, and the attacker's notebook."""
        file = self.product.paths.closet_cluster_file
        self.product.restart(restrict(file.read_text(encoding="utf-8")))
        for name in ("ada", "ben"):
            self.clients[name] = log_in(self.product.address, name, self.product.password)
        for name, client in self.clients.items():
            client.start(SERVER, "part")
            wait_for(lambda client=client: client.is_ready(SERVER), f"{name}'s notebook is ready", 180)
            (self.notebooks[name],) = self.find_containers(name, names.KIND_NOTEBOOK)
        self.job = self.start_job("ada", "RTX 5070")
        assert self.notebooks["ada"].node == self.notebooks["ben"].node

    def end(self) -> None:
        """Close the connections."""
        for client in self.clients.values():
            client.close()

    def start_job(self, owner: str, model: str) -> dict[str, Any]:
        """Start a detached job that sleeps, from a user's notebook, and return it when its worker runs."""
        client = self.clients[owner]
        options = f'--model "{model}"'
        found = self.probe("detached_job", seen=self.notebooks[owner], name=f"{owner}s_job", options=options)
        assert found == {"error": None}

        def find() -> dict[str, Any] | None:
            for job in client.ask(client.broker, "GET", "/jobs")[1]:
                status, state = client.ask(client.broker, "GET", f"/jobs/{job['id']}/state")
                if status == 200 and state["state"] == "running":
                    return dict(job)
            return None

        return wait_for(find, f"{owner}'s job runs", 180)

    def find_containers(self, owner: str, kind: str) -> list[SeenContainer]:
        """Return the running containers of a user, asked of the nodes' Docker."""
        return [seen for seen in self.observer.running() if seen.owner == owner and seen.kind == kind]

    def inspect(self, seen: SeenContainer) -> dict[str, Any]:
        """Return what Docker says of a container."""
        return dict(json.loads(self._docker(seen, "inspect", seen.id).stdout)[0])

    def probe(
        self, name: str, /, *, seen: SeenContainer | None = None, timeout_s: float = 180, **arguments: Any
    ) -> Any:
        """Run one of the programs in `probes` in a container, ben's notebook if none is named, and return its answer."""
        seen = seen or self.notebooks["ben"]
        code = (PROBES / f"{name}.py").read_text(encoding="utf-8")
        command = ("exec", "-i", seen.id, "python3", "-c", code)
        done = self._docker(seen, *command, stdin=json.dumps(arguments), timeout_s=timeout_s)
        assert done.returncode == 0, f"probe {name}: {done.stdout}{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    def shell(self, command: str, *, seen: SeenContainer | None = None, timeout_s: float = 120) -> tuple[int, str]:
        """Run a command line in ben's notebook container, as he would in a terminal; return its status and output."""
        seen = seen or self.notebooks["ben"]
        done = self._docker(seen, "exec", seen.id, "sh", "-c", command, timeout_s=timeout_s)
        return done.returncode, done.stdout + done.stderr

    def docker_folder(self, seen: SeenContainer) -> Path:
        """Return the folder of a container's log on its node."""
        return node_paths(self.product.paths, seen.node).data_root / "containers" / seen.id

    def _docker(
        self, seen: SeenContainer, *words: str, stdin: str | None = None, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        url = next(node.docker for node in self.product.cluster.nodes if node.name == seen.node)
        return subprocess.run(
            ["docker", "-H", url, *words], input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s
        )

    # -- everybody else --------------------------------------------------------------------------------------------

    def head_state(self) -> HeadState:
        """Return what must be the same after an attack."""
        pids = {name: self.product.supervisor.pid(name) for name in (HUB, BROKER, PROXY)}
        return HeadState(pids, frozenset(seen.id for seen in self.observer.running() if seen.owner == "ada"))

    def head_memory(self) -> dict[str, int]:
        """Return the resident memory of hub, broker and proxy, bytes."""
        memory = {}
        for name in (HUB, BROKER, PROXY):
            process = psutil.Process(self.product.supervisor.pid(name))
            memory[name] = sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
        return memory

    def ask_everybody(self) -> dict[str, float]:
        """Ask hub, broker and the victim's notebook, and return the seconds that each took; each must answer."""
        took = {}
        for what, url in {
            "hub": f"{self.product.address}/hub/api/",
            "broker": f"{self.product.address}/services/broker/health",
            "ada's leases": f"{self.product.address}/services/broker/api/v1/leases",
            "ada's notebook": f"{self.product.address}/user/ada/{SERVER}/api/status",
        }.items():
            began = time.monotonic()
            headers = {"Authorization": f"token {self.ada.token}"}
            answer = httpx.get(url, headers=headers, trust_env=False, timeout=30)
            took[what] = time.monotonic() - began
            assert answer.status_code == 200, f"{what}: {answer.status_code} {answer.text[:300]}"
        return took

    @contextmanager
    def everybody_works_on(self) -> Iterator[None]:
        """Ask all the while, from outside; each must answer in time, and no program of the head node may grow much."""
        over, slowest, errors = threading.Event(), dict[str, float](), list[str]()

        def ask() -> None:
            while not over.is_set():
                try:
                    for what, took in self.ask_everybody().items():
                        slowest[what] = max(took, slowest.get(what, 0.0))
                except (AssertionError, httpx.HTTPError) as error:
                    errors.append(f"{type(error).__name__}: {error}")
                over.wait(0.2)

        before = self.head_memory()
        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(60)
        assert errors == [], errors[:3]
        assert slowest, "nobody was asked"
        assert max(slowest.values()) < ANSWER_S, slowest
        grown = {name: used - before[name] for name, used in self.head_memory().items()}
        assert max(grown.values()) < GROWTH, grown


def restrict(cluster_file: str) -> str:
    """Return the closet's settings with a node, its profile and a service for the group alone."""
    settings = tomlkit.parse(cluster_file).unwrap()
    (node,) = (node for node in settings["nodes"] if node["name"] == GROUPS_NODE)
    models = {gpu["model"] for gpu in node["gpus"]}
    for table in (node, *(profile for profile in settings["profiles"] if profile.get("gpu_model") in models)):
        table["groups"] = [GROUP]
    settings["groups"] = [{"name": GROUP, "members": ["ada"]}]
    serve = ["python3", "-m", "http.server", "--bind", "127.0.0.1", "--directory", "/tmp", "8000"]
    settings["services"] = [
        {
            "name": GROUPS_SERVICE,
            "image": names.DEFAULT_IMAGE,
            "command": serve,
            "port": 8000,
            "groups": [GROUP],
            "variables": ["LABELS_URL={url}"],
        }
    ]
    return tomlkit.dumps(settings)
