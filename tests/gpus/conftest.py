"""gpuhub on real GPUs, driven through the hub's address without a browser.

They are in the machines of a cluster.toml or, for test_closet_node.py, in a node of the practice closet.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuhub.common import secrets
from gpuhub.common.names import agent_container_name
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker.client import DockerClients
from gpuhub_closet import layouts, lifecycle
from tests.support.broker.metrics import Metrics
from tests.support.closet import practice_closet
from tests.support.closet.practice_closet import Closet
from tests.support.hub.kernel_client import Kernel, open_kernel
from tests.support.hub.users import Client, log_in
from tests.support.product import CLOSET, wait_for

INSTANCE = os.environ.get("GPUHUB_TEST_INSTANCE", "ghgpu")
ROOT = Path(__file__).parents[2]
#: The node of the practice closet that has this machine's GPUs; empty for the machines of a cluster.toml.
REAL_GPU = os.environ.get("GPUHUB_TEST_REAL_GPU", "")
#: The three users who have to be in `[users] allowed`, with `login = "password"`; or those of the practice closet.
USERS = ("ada", "ben") if REAL_GPU else ("ada", "ben", "eve")
collect_ignore = ["test_product.py" if REAL_GPU else "test_closet_node.py"]


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The product on the machines with real GPUs."""

    file: Path
    cluster: ClusterSettings
    address: str
    users: dict[str, Client]
    daemons: DockerClients

    def view(self) -> dict[str, Any]:
        """Return the broker's view of the cluster, as an ordinary user gets it."""
        user = self.users[USERS[-1]]
        status, view = user.ask(user.broker, "GET", "/cluster")
        assert status == 200, view
        assert isinstance(view, dict)
        return view

    def gpus(self) -> list[dict[str, Any]]:
        """Return all GPUs, as the broker shows them."""
        return [gpu for node in self.view()["nodes"] for gpu in node["gpus"]]

    def states(self) -> dict[str, str]:
        """Return the state of each GPU by UUID."""
        return {gpu["uuid"]: gpu["state"] for gpu in self.gpus()}

    def wait_free(self) -> None:
        """Wait until every GPU is free."""
        wait_for(lambda: set(self.states().values()) == {"free"}, lambda: f"all GPUs are free: {self.gpus()}", 90)

    def containers(self, node: str) -> list[str]:
        """Return the names of this instance's containers on a node."""
        found = self.daemons.client(node).containers(filters={"name": f"^/?{INSTANCE}-"})
        return [name.removeprefix("/") for container in found for name in container["Names"]]

    def metrics(self) -> Metrics:
        """Return the broker's metrics, as Prometheus gets them."""
        token = secrets.read_secret(Paths(INSTANCE), secrets.METRICS_TOKEN)
        url = f"{self.address}/services/broker/api/v1/metrics"
        answer = httpx.get(url, headers={"Authorization": f"token {token}"}, trust_env=False).raise_for_status()
        return Metrics(text_string_to_metric_families(answer.text))

    def ask_driver(self, query: str) -> dict[str, list[str]]:
        """Return what `nvidia-smi --query-gpu` answers on all nodes, by UUID; numbers come without units."""
        command = ("nvidia-smi", f"--query-gpu=uuid,{query}", "--format=csv,noheader,nounits")
        lines = [line for node in self.cluster.nodes for line in self.run_in_agent(node.name, *command)]
        return {uuid: values for uuid, *values in (line.split(", ") for line in lines)}

    def energy(self, uuid: str) -> float:
        """Return NVML's counter of the energy that a GPU has taken, in joules."""
        node = next(gpu["node"] for gpu in self.gpus() if gpu["uuid"] == uuid)
        code = (
            "import pynvml, sys; pynvml.nvmlInit(); gpu = pynvml.nvmlDeviceGetHandleByUUID(sys.argv[1]); "
            "print(pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu))"
        )
        return int(self.run_in_agent(node, "python3", "-c", code, uuid)[0]) / 1000

    def run_in_agent(self, node: str, *command: str) -> list[str]:
        """Run a command in the container of the node's GPU agent, which sees all GPUs; return the lines of its output."""
        client = self.daemons.client(node)
        call = client.exec_create(agent_container_name(INSTANCE), list(command))
        output: bytes = client.exec_start(call["Id"])
        assert client.exec_inspect(call["Id"])["ExitCode"] == 0, output
        return output.decode().splitlines()


def gpuhub(*words: str | Path) -> str:
    """Run the administrator's command and return its output."""
    done = subprocess.run(
        [Path(sys.executable).with_name("gpuhub"), *words, "--instance", INSTANCE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def product() -> Iterator[Gpus]:
    """Bring gpuhub up on the cluster, and down at the end."""
    with ExitStack() as stack:
        file = _start_closet(stack) if REAL_GPU else _start_cluster(stack)
        cluster = settings.load(file)
        address = f"http://127.0.0.1:{cluster.hub.port}"
        password = secrets.read_secret(Paths(INSTANCE), secrets.USER_PASSWORD)
        users = {name: log_in(address, name, password) for name in USERS}
        for user in users.values():
            stack.callback(user.close)
        daemons = DockerClients(cluster.nodes, instance=INSTANCE, run_dir=Paths(INSTANCE).run)
        stack.callback(daemons.close)
        found = Gpus(file=file, cluster=cluster, address=address, users=users, daemons=daemons)
        wait_for(lambda: len(found.gpus()) > 0, "the broker knows GPUs", 60)
        yield found


def _start_cluster(stack: ExitStack) -> Path:
    name = os.environ.get("GPUHUB_TEST_CLUSTER")
    assert name, "name your cluster.toml: make test-gpu CLUSTER=cluster.toml"
    file = Path(name).resolve()
    cluster = settings.load(file)
    assert cluster.hub.bind == "127.0.0.1", f"these tests use the hub on this machine alone: bind = {cluster.hub.bind}"
    assert cluster.users.login == "password", (
        f"[users] login = {cluster.users.login!r}, but these tests need 'password'"
    )
    stack.callback(gpuhub, "down", "--cluster-file", file)
    gpuhub("up", "--cluster-file", file)
    return file


def _start_closet(stack: ExitStack) -> Path:
    if archive := os.environ.get("GPUHUB_TEST_IMAGES"):
        _load_images(Path(archive))
    stack.callback(_stop_closet)
    gpuhub("up", "--closet", CLOSET, "--real-gpu", REAL_GPU)
    return Paths(INSTANCE).closet_cluster_file


def _load_images(archive: Path) -> None:
    """Give the closet's node that builds images those of an archive of `docker save`, while gpuhub does not run."""
    plan, paths = layouts.build_plan(INSTANCE, CLOSET), Paths(INSTANCE)
    one_node = replace(plan, nodes=plan.nodes[:1])
    practice_closet.ensure_up(one_node, paths)
    try:
        with closing(Closet(one_node, paths, Path()).client(plan.nodes[0])) as client, archive.open("rb") as content:
            client.images.load(content)
    finally:
        lifecycle.ensure_down(plan, paths)


def _stop_closet() -> None:
    """Stop gpuhub and the closet, and check that nothing is left on this machine and on its GPUs."""
    gpuhub("down")
    assert lifecycle.find_leftovers(layouts.build_plan(INSTANCE, CLOSET), Paths(INSTANCE)) == []
    assert run_nvidia_smi("--query-compute-apps=pid", "--format=csv,noheader") == []


def run_nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that this machine's own nvidia-smi writes."""
    return subprocess.check_output(["nvidia-smi", *arguments], text=True).splitlines()


@dataclass(frozen=True, kw_only=True)
class RunningNotebook:
    """A user's notebook server with one kernel."""

    user: Client
    server: str
    kernel: Kernel

    def run(self, code: str, timeout_s: float = 240) -> str:
        """Run a cell that must not fail, and return its output."""
        output = self.kernel.run(code, timeout_s)
        assert "Traceback" not in output, output
        return output

    def interrupt(self, address: str) -> None:
        """Interrupt the cell that runs, as JupyterLab's button does."""
        url = f"{address}/user/{self.user.name}/{self.server}/api/kernels"
        with httpx.Client(headers={"Authorization": f"token {self.user.token}"}, trust_env=False) as web:
            [kernel] = web.get(url).json()
            web.post(f"{url}/{kernel['id']}/interrupt").raise_for_status()

    def uuids(self) -> set[str]:
        """Return the UUIDs that nvidia-smi shows in the notebook."""
        return set(re.findall(r"GPU-[0-9a-f-]{36}", self.run("!nvidia-smi -L")))


@pytest.fixture
def start(product: Gpus) -> Iterator[Callable[[str, str], RunningNotebook]]:
    """Return a function that starts a notebook of a user with a profile; all stop at the end, and all GPUs are free."""
    with ExitStack() as stack:
        stack.callback(product.wait_free)

        numbers = count()

        def start_one(name: str, profile: str) -> RunningNotebook:
            user, server = product.users[name], f"n{next(numbers)}"
            user.start(server, profile)
            stack.callback(user.stop, server)
            wait_for(lambda: user.is_ready(server), lambda: f"{server} of {name} is ready: {user.servers()}", 180)
            kernel = stack.enter_context(open_kernel(product.address.removeprefix("http://"), user, server))
            return RunningNotebook(user=user, server=server, kernel=kernel)

        yield start_one
