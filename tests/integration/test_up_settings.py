"""`gpuhub up` on the nodes of a cluster.toml: existing machines that remain when gpuhub is taken down."""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpuhub.common import names, secrets
from gpuhub.common.paths import Paths
from gpuhub.ops.deploy.programs import Supervisor
from gpuhub_closet import docker_daemons
from gpuhub_closet.gpu_state import GpuFault
from gpuhub_closet.paths import node_paths
from tests.support.closet import practice_closet
from tests.support.closet.existing_nodes import INSTANCE
from tests.support.closet.existing_nodes import run_gpuhub as gpuhub
from tests.support.closet.existing_nodes import write_settings as write
from tests.support.closet.ssh_machines import Machine
from tests.support.docker.ipsec import ask_kernel
from tests.support.hub.users import Client, log_in
from tests.support.product import wait_for

#: Too small for the practice closet's RTX 5090, 5070 and 5060.
CIRCUIT = """
[[circuits]]
name = "left"
volts = 120
amps = 10
nodes = ["rig1", "rig2", "rig3"]
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Close at the end what a test opens."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def cleared(tmp_path: Path, closet: Any):
    """Take down what the test leaves."""
    yield
    done = gpuhub("down", tmp_path / "cluster.toml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_up_and_down_on_existing_nodes(closet: Any, tmp_path: Path, cleared: None):
    """`up` uses the nodes of the file; `down` removes what it made there and keeps the machines."""
    file = write(closet, tmp_path)
    done = gpuhub("up", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Cluster of {file}" in done.stdout
    assert "https://127.0.0.1:18200" in done.stdout
    assert f"scp 127.0.0.1:{Paths(INSTANCE).authority} gpuhub-authority.pem" in done.stdout
    everybodys = [file for file in Paths(INSTANCE).state.iterdir() if file.is_file() and file.stat().st_mode & 0o077]
    assert everybodys == [Paths(INSTANCE).authority], "only root can read databases and keys"
    assert set(Supervisor(Paths(INSTANCE)).states()) == {"proxy", "broker", "hub"}
    password = secrets.read_secret(Paths(INSTANCE), secrets.USER_PASSWORD)
    logs = "".join(path.read_text(errors="replace") for path in Paths(INSTANCE).log.glob("*.log"))
    for name in (secrets.USER_PASSWORD, secrets.BROKER_TOKEN, secrets.SPAWNER_TOKEN, secrets.PROXY_TOKEN):
        assert secrets.read_secret(Paths(INSTANCE), name) not in logs, f"{name} is in a log"
    assert password in done.stdout

    done = gpuhub("down", file)
    assert done.returncode == 0, done.stdout + done.stderr
    for node in closet.plan.nodes:
        with closing(closet.client(node)) as client:
            mine = {"label": f"{names.LABEL_INSTANCE}={INSTANCE}"}
            assert client.containers.list(all=True, ignore_removed=True, filters=mine) == []
            assert client.networks.list(filters=mine) == []
            assert client.info()["Swarm"]["LocalNodeState"] == "inactive"


@pytest.fixture
def faultless(closet: Any) -> Iterator[None]:
    """Repair the GPUs at the end."""
    yield
    for node in closet.plan.nodes:
        practice_closet.set_fault(closet.paths, node, 0, GpuFault.NONE)


def find_failures(file: Path) -> dict[str, list[str]]:
    """Return the values of the doctor's failed findings by node; its status must say whether there are any."""
    done = gpuhub("doctor", "--json", file)
    machines = json.loads(done.stdout)
    failures = {
        machine["machine"]: [finding["value"] for finding in machine["findings"] if finding["level"] == "failed"]
        for machine in machines
    }
    assert done.returncode == int(any(failures.values())), done.stderr
    return failures


def test_doctor_fails_for_broken_drivers_and_gpus(closet: Any, tmp_path: Path, cleared: None, faultless: None):
    """A driver that does not start and a lost GPU each fail the doctor on their node.

    Before, it knows the power limits of all GPUs, which NVML reports, and compares them with a breaker.
    """
    file = write(closet, tmp_path, further=CIRCUIT)
    done = gpuhub("up", file)
    assert done.returncode == 0, done.stdout + done.stderr
    [over] = find_failures(file)["the room"]
    assert over.startswith("left: its nodes may draw 1,420 W (GPUs 970 W, machines 450 W), 460 W too much")
    assert find_failures(file) == {"head node": [], "the room": [over], "rig1": [], "rig2": [], "rig3": []}
    practice_closet.set_fault(closet.paths, "rig1", 0, GpuFault.DRIVER_MISMATCH)
    practice_closet.set_fault(closet.paths, "rig2", 0, GpuFault.LOST)

    def find_all() -> dict[str, list[str]] | None:
        failures = find_failures(file)
        return failures if failures["rig1"] and failures["rig2"] else None

    failures = wait_for(find_all, "the agents' next readings", 120)
    assert (failures["head node"], failures["rig3"]) == ([], [])
    assert ["version mismatch" in value and "reboot needed" in value for value in failures["rig1"]] == [True]
    assert [value.endswith("fails: GPU is lost") for value in failures["rig2"]] == [True]


@contextmanager
def silenced(closet: Any, node: str) -> Iterator[None]:
    """Let the node's daemon answer nothing during the block."""
    processes = docker_daemons.find_processes(closet.plan, closet.plan.node(node))
    dockerd = [pid for pid, name in processes.items() if name == "dockerd"]
    for pid in dockerd:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in dockerd:
            os.kill(pid, signal.SIGCONT)


def find_warnings(shown: str) -> list[str]:
    """Return the lines with which `up` warns."""
    return [line for line in shown.splitlines() if line.startswith("  ! ")]


def test_up_starts_without_a_node_that_is_away(closet: Any, tmp_path: Path, cleared: None, faultless: None):
    """As after a power cut that one machine has not survived: users get the rest, also where a driver fails.

    A node that was never set up at its address ends the start instead, also with the same name.
    """
    file = write(closet, tmp_path)
    # The broker of an earlier test knows the GPUs.
    for database in Paths(INSTANCE).state.glob("broker.sqlite*"):
        database.unlink()
    practice_closet.set_fault(closet.paths, "rig3", 0, GpuFault.DRIVER_MISMATCH)
    done = gpuhub("up", file)
    assert done.returncode == 0, done.stdout + done.stderr
    [unread] = find_warnings(done.stdout)
    assert re.search(r"rig3: .*reboot needed.*The GPUs of the other nodes can be used", unread), unread
    practice_closet.set_fault(closet.paths, "rig3", 0, GpuFault.NONE)
    supervisor = Supervisor(Paths(INSTANCE))
    for name in ("hub", "broker", "proxy"):
        supervisor.stop(name)
    with silenced(closet, "rig2"):
        done = gpuhub("up", file)
        assert done.returncode == 0, done.stdout + done.stderr
        [away] = find_warnings(done.stdout)
        assert re.search(r"node rig2: its Docker daemon does not answer in time\. gpuhub starts without it", away), away
        trusted = ssl.create_default_context(cafile=Paths(INSTANCE).authority)
        assert httpx.get("https://127.0.0.1:18200/hub/login", verify=trusted, trust_env=False).is_success
    done = gpuhub("up", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert find_warnings(done.stdout) == []
    url = node_paths(closet.paths, "rig2").docker_url
    file.write_text(file.read_text().replace(url, "unix:///run/nothing.sock"))
    done = gpuhub("up", file)
    assert done.returncode == 1
    assert "node rig2" in done.stderr


def test_down_names_nodes_that_do_not_answer(closet: Any, tmp_path: Path, cleared: None):
    """`down` fails with the node in its last line, and the remedy in its text cleans the node."""
    file = write(closet, tmp_path)
    done = gpuhub("up", file)
    assert done.returncode == 0, done.stdout + done.stderr
    mine = {"label": f"{names.LABEL_INSTANCE}={INSTANCE}"}
    with silenced(closet, "rig2"):
        done = gpuhub("down", file)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "Not cleaned: rig2"
    assert "Stopped." not in done.stdout
    assert not Paths(INSTANCE).run.exists()
    with closing(closet.client("rig2")) as client:
        assert client.containers.list(all=True, ignore_removed=True, filters=mine) != []
    for command in ("up", "down"):
        done = gpuhub(command, file)
        assert done.returncode == 0, done.stdout + done.stderr
    for node in closet.plan.nodes:
        with closing(closet.client(node)) as client:
            assert client.containers.list(all=True, ignore_removed=True, filters=mine) == []
            assert client.networks.list(filters=mine) == []


def test_a_profile_that_no_node_has_is_refused(closet: Any, tmp_path: Path, cleared: None):
    """Without GPUs in the file NVML is read, and a model that no node has stops `up` before the hub."""
    done = gpuhub("up", write(closet, tmp_path, further='gpu_model = "RTX 9090"'))
    assert done.returncode == 1
    assert "'gpu' wants 1 × RTX 9090 on one node" in done.stderr
    assert "rig1 with 1 × RTX 5090" in done.stderr
    assert Supervisor(Paths(INSTANCE)).pid("hub") == 0


def test_kernel_that_cannot_encrypt_stops_up(closet: Any, tmp_path: Path, cleared: None):
    """The kernel itself is asked on each node, also by the doctor; with ESP the hub starts, with encrypted networks."""
    refusal = ask_kernel()
    file = write(closet, tmp_path, further="[network]\nencrypt = true")
    done = gpuhub("up", file)
    failures = find_failures(file)
    cannot = "its kernel cannot encrypt: "
    reasons = [value for node in closet.plan.nodes for value in failures[node.name] if value.startswith(cannot)]
    if refusal is None:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Every node's kernel can encrypt users' networks" in done.stdout
        assert reasons == []
    else:
        assert done.returncode == 1
        assert "network.encrypt = true, and not every node can do that" in done.stderr
        for node in closet.plan.nodes:
            assert f"  {node.name}: {cannot}{refusal}" in done.stderr
        assert [value.startswith(f"{cannot}{refusal}") for value in reasons] == [True] * len(closet.plan.nodes)
        assert Supervisor(Paths(INSTANCE)).pid("hub") == Supervisor(Paths(INSTANCE)).pid("broker") == 0


def test_invalid_file_starts_nothing(closet: Any, tmp_path: Path):
    """A daemon on plain TCP is refused with its key and the remedy, and no process is started."""
    file = write(closet, tmp_path)
    file.write_text(file.read_text().replace(node_paths(closet.paths, "rig2").docker_url, "tcp://10.87.0.12:2375"))
    done = gpuhub("up", file)
    assert done.returncode == 1
    assert "nodes[2]: docker = 'tcp://10.87.0.12:2375' has no tls" in done.stderr
    assert "ssh://" in done.stderr
    assert "Traceback" not in done.stderr
    assert not Supervisor(Paths(INSTANCE)).is_running()
    assert json.dumps(done.stdout) == '""'


def find_node(client: Client, name: str) -> dict[str, Any]:
    """Return a node as users see it."""
    status, view = client.ask(client.broker, "GET", "/cluster")
    assert status == 200
    return next(node for node in view["nodes"] if node["name"] == name)


def has_free(node: dict[str, Any]) -> bool:
    """Return whether a GPU of the node is free."""
    return any(gpu["state"] == "free" for gpu in node["gpus"])


def test_node_is_added_and_removed_while_users_work(
    closet: Any, agent: tuple[Path, str], rig3: Machine, tmp_path: Path, cleared: None, stack: ExitStack
):
    """`node add --up` makes hub and broker use the node without restarting notebooks, and `node remove` ends what runs
    there
    when asked to.
    """
    file = write(closet, tmp_path, count=2)
    file.write_text(file.read_text().replace('https = "local"\n', ""))
    done = gpuhub("up", file)
    assert done.returncode == 0, done.stdout + done.stderr
    ada = log_in("http://127.0.0.1:18200", "ada", secrets.read_secret(Paths(INSTANCE), secrets.USER_PASSWORD))
    stack.callback(ada.close)

    def start(server: str) -> str:
        """Start a server and return the node on which it is ready."""
        ada.start(server, "gpu")
        wait_for(lambda: ada.is_ready(server), f"{server} is ready", 90)
        status, leases = ada.ask(ada.broker, "GET", "/leases")
        assert status == 200
        return next(str(lease["nodes"][0]) for lease in leases if lease["subject"] == server)

    assert start("first") == "rig2", "the least card that will do"
    done = gpuhub("node", "add", rig3.url, "--yes", "--name", "rig3", "--up", file, agent=agent[1])
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: has_free(find_node(ada, "rig3")), lambda: f"it is free: {find_node(ada, 'rig3')}", 30)
    assert start("second") == "rig3"
    assert ada.is_ready("first")

    def containers() -> list[str]:
        with closing(closet.client("rig3")) as client:
            mine = {"label": f"{names.LABEL_INSTANCE}={INSTANCE}"}
            return [each.name for each in client.containers.list(all=True, ignore_removed=True, filters=mine)]

    refused = gpuhub("node", "remove", "rig3", "--yes", file, agent=agent[1])
    assert refused.returncode == 1
    assert "rig3 has leases" in refused.stderr
    assert ada.is_ready("second")
    done = gpuhub("node", "remove", "rig3", "--yes", "--force", file, agent=agent[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rig3 is removed." in done.stdout
    assert containers() == []
    wait_for(lambda: "second" not in (ada.servers() or {"second": {}}), "the hub knows that it has ended", 30)
    assert ada.is_ready("first")
    assert start("third") == "rig1"
