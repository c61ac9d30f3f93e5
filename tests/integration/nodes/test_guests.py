"""A friend's machine behind NAT: invitation, tunnel, what it may reach, and leaving. WireGuard runs in user space."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuhub.broker.files.couriers import CourierPool
from gpuhub.broker.files.guest_files import GuestFiles
from gpuhub.common.errors import GpuhubError, NodeUnreachable
from gpuhub.config import settings
from gpuhub.config.settings import ClusterSettings, StorageSettings
from gpuhub.docker.containers import container_spec
from gpuhub.docker.containers.user_containers import WorkerSpec, start_worker
from gpuhub.docker.ssh import ssh_files
from gpuhub.domain.clock import Clock
from gpuhub.domain.models import JobRow, LedgerSnapshot, WorkerRow
from gpuhub.nodes.status import NodeStatus
from gpuhub.ops.guests.invitation import remove_guest
from gpuhub.ops.guests.registry import GuestRegistry
from tests.support.broker.in_process import Couriers
from tests.support.closet.ssh_machines import wait
from tests.support.docker.simulated_nodes import simulated_nodes
from tests.support.guests import (
    FriendsMachine,
    Head,
    Lines,
    MixedDaemons,
    friends_machine,
    head_node,
    run,
    split_command,
)

TUNNEL = "10.213.77.1"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with head_node("ghguest", tmp_path_factory.mktemp("head")) as started:
        yield started


@pytest.fixture(scope="module")
def friend(head: Head, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FriendsMachine]:
    with friends_machine(tmp_path_factory.mktemp("friend") / "machine") as machine:
        yield machine


@pytest.fixture(scope="module")
def joined(head: Head, friend: FriendsMachine) -> str:
    """Join, and return the command that did it."""
    command = head.invite()
    done = friend.run(*split_command(command))
    assert "mia is lent from now on" in done.stdout
    return command


def connects(friend: FriendsMachine, address: str, port: int) -> str:
    return friend.python(
        "import socket\n"
        f"try: socket.create_connection(({address!r}, {port}), 2).close(); print('open')\n"
        "except OSError as error: print(type(error).__name__)"
    )


def list_links(friend: FriendsMachine) -> set[str]:
    return {link["ifname"] for link in json.loads(friend.run("ip", "-json", "link").stdout)}


def post(friend: FriendsMachine, path: str, body: str) -> int:
    done = friend.run(
        *("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-m", "10", "--data-binary", "@-"),
        *(f"http://{TUNNEL}:8012{path}",),
        check=False,
        text=body,
    )
    return int(done.stdout or 0)


def test_a_machine_without_a_driver_is_left_as_it_was(head: Head, friend: FriendsMachine):
    """What is missing is named, and nothing of the attempt remains."""
    program = friend.folder / "sbin/nvidia-smi"
    program.rename(program.with_name("away"))
    done = friend.run(*split_command(head.invite()), check=False)
    program.with_name("away").rename(program)
    assert done.returncode == 1
    assert "✗ NVIDIA's driver, 0 GPUs: install NVIDIA's driver" in done.stdout
    assert "nothing was changed" in done.stderr
    assert list_links(friend) == {"eth0", "lo"}
    for path in ("/etc/gpuhub-node", "/usr/local/sbin/gpuhub-node"):
        assert friend.run("test", "-e", path, check=False).returncode == 1, path


def test_it_joins_through_the_router_with_the_mtu_of_the_line(head: Head, joined: str):
    """The machine dials out, its key is its own, and Docker answers over the restricted SSH account alone."""
    [guest] = GuestRegistry(head.paths).read().values()
    assert (guest.name, guest.has_joined, guest.mtu) == ("mia", True, 1412)
    assert head.peers() == [guest.public_key]
    assert guest.public_key not in joined
    with head.docker() as daemons:
        assert asyncio.run(daemons.call("mia", "info"))["Driver"] == "vfs"
    files = ssh_files(head.paths.instance)
    login = ["ssh", *files.options("mia"), "-o", "BatchMode=yes", "-p", "8022", f"gpuhub-guest@{guest.address}"]
    assert subprocess.run([*login, "id"], check=False, capture_output=True, timeout=30).returncode
    refused = subprocess.run([*login, "-W", "127.0.0.1:22"], check=False, capture_output=True, timeout=30)
    assert b"prohibited" in refused.stderr


def test_an_invitation_serves_once(head: Head, friend: FriendsMachine, joined: str):
    """Its key opens nothing any more, and the machine refuses a second one."""
    again = friend.run(*split_command(joined), check=False)
    assert (again.returncode, "this machine is a guest already" in again.stderr) == (1, True)
    assert post(friend, "/join", json.dumps({"public_key": "A" * 43 + "=", "host_key": "x", "mtu": 1400})) == 403


def test_an_old_invitation_opens_nothing(head: Head):
    """After a day its key is not in WireGuard."""
    head.invite("old", now=1_000_000.0)
    head.invite("late")
    guests = GuestRegistry(head.paths).read()
    wait(lambda: guests["late"].public_key in head.peers(), "the new invitation")
    assert guests["old"].public_key not in head.peers()
    for name in ("old", "late"):
        remove_guest(name, head.paths, head.cluster_file, Lines(), lambda: None)
    wait(lambda: len(head.peers()) == 1, "the removal")


def test_its_root_reaches_one_port(head: Head, friend: FriendsMachine, joined: str):
    """Whatever the guest's root does to routes and keys, no other port, machine or guest answers in the tunnel."""
    friend.run("wg", "set", "gpuhub", "peer", run("wg", "show", "ghguest-guests", "public-key").strip(),
               "allowed-ips", "0.0.0.0/0")  # fmt: skip
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        for address in (TUNNEL, "10.99.0.1"):
            friend.run("ip", "route", "replace", f"{address}/32", "dev", "gpuhub")
        run("ip", "address", "add", "10.99.0.1/32", "dev", "lo")
        try:
            assert connects(friend, TUNNEL, 8012) == "open"
            assert {connects(friend, address, port) for address in (TUNNEL, "10.99.0.1")} == {"TimeoutError"}
            # Another guest's address as its own: WireGuard drops it.
            friend.run("ip", "address", "add", "10.213.77.9/32", "dev", "gpuhub")
            spoofed = friend.python(
                "import socket; s = socket.socket(); s.settimeout(2); s.bind(('10.213.77.9', 0))\n"
                f"try: s.connect(({TUNNEL!r}, 8012)); print('open')\n"
                "except OSError as error: print(type(error).__name__)"
            )
            assert spoofed == "TimeoutError"
        finally:
            run("ip", "address", "del", "10.99.0.1/32", "dev", "lo")
            friend.run("ip", "address", "del", "10.213.77.9/32", "dev", "gpuhub", check=False)


def test_what_it_sends_is_bounded(head: Head, friend: FriendsMachine, joined: str):
    """Bodies that no gpuhub-node sends are refused, and floods are slowed down; the guest stays what it is."""
    assert post(friend, "/state", "x" * 20_000) == 400
    assert post(friend, "/state", '{"available": "yes"}') == 400
    assert post(friend, "/state", "[" * 10_000) == 400
    codes = {post(friend, "/state", '{"available": true}') for _ in range(40)}
    assert 429 in codes
    [guest] = GuestRegistry(head.paths).read().values()
    assert guest.has_joined


def test_the_owner_pauses_and_resumes(head: Head, friend: FriendsMachine, joined: str):
    """Commands of the owner change what the machine reports; hours are checked before they are kept."""

    def read_status() -> dict[str, object]:
        return json.loads(friend.run("cat", "/run/gpuhub-node/status.json").stdout)

    friend.run("gpuhub-node", "pause")
    wait(lambda: read_status()["is_lent"] is False, "the pause")
    assert "paused:     yes" in friend.run("gpuhub-node", "status").stdout
    friend.run("gpuhub-node", "resume")
    wait(lambda: read_status()["is_lent"] is True, "the end of the pause")
    refused = friend.run("gpuhub-node", "hours", "25:00-08:00", check=False)
    assert "are no hours: write such as 22:00-08:00, or always" in refused.stderr
    friend.run("gpuhub-node", "hours", "22:00-08:00")
    assert "hours:      22:00-08:00" in friend.run("gpuhub-node", "status").stdout


@dataclass
class Core:
    """What the transfer reads of a broker's state."""

    cluster: ClusterSettings
    job: JobRow
    events: list[str] = field(default_factory=list)

    @property
    def ledger(self) -> SimpleNamespace:
        return SimpleNamespace(snapshot=LedgerSnapshot(jobs={self.job.id: self.job}))

    @property
    def capacity(self) -> SimpleNamespace:
        return SimpleNamespace(
            inventory=SimpleNamespace(nodes={"rig1": NodeStatus(name="rig1", is_up=True)}), cordons={}
        )

    clock = Clock()

    def add_event(self, kind: str, text: str, **_: object) -> None:
        self.events.append(text)


WORK = """
import os, pathlib
home = pathlib.Path.home()
assert os.environ["GPUHUB_GUEST"] == "1" and "GPUHUB_BROKER_URL" not in os.environ
work = home / "work"
(work / "seen.txt").write_text(f"{sorted(p.name for p in home.iterdir())} {os.getuid()} {(work / 'train.py').read_text()}")
(work / "model.bin").write_bytes(bytes(3_000_000))
(home / ".gpu_launch/jobs/run-000001/output.log").write_text("trained")
"""


async def test_a_worker_has_the_jobs_folder_alone_and_its_results_come_back(
    head: Head, friend: FriendsMachine, joined: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Over the tunnel and the shaped line, with the guest's real Docker: an own volume as home, removed afterwards."""
    friend.import_image("tiny:latest")
    monkeypatch.setattr(container_spec, "WORKER_COMMAND", ("python3", "-c", WORK))
    cluster = settings.load(head.cluster_file)
    storage = StorageSettings(home=f"{tmp_path}/{{username}}", home_create=None)
    cluster = cluster.model_copy(
        update={"storage": storage, "network": cluster.network.model_copy(update={"guard": False})}
    )
    home = tmp_path / "ada"
    run_folder = home / ".gpu_launch/jobs/run-000001"
    for file, text in {
        run_folder / "job.json": json.dumps({"version": 1, "name": "train.py", "folder": "work"}),
        run_folder / "run.json": "{}",
        home / "work/train.py": "print(1)",
        home / "secret": "not for friends",
    }.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for path in (home, *home.rglob("*")):
        os.chown(path, 5000, 5000)
    rig1 = simulated_nodes({"rig1": []})
    rig1["rig1"].homes = tmp_path
    daemons = MixedDaemons(cluster.nodes, rig1, head.paths.run)
    daemons.instance = head.paths.instance
    row = JobRow(
        id="j1", run_id="run-000001", owner="ada", server="", notebook_lease=None, lease_id="l1", image="tiny:latest",
        nnodes=1, nproc_per_node=1, created_at=0.0, since=0.0, detached=True,
    )  # fmt: skip
    core = Core(cluster, row)
    files = GuestFiles(
        core=core, daemons=daemons, couriers=CourierPool(core=core, daemons=daemons, start=Couriers(rig1))
    )
    spec = WorkerSpec(
        instance=head.paths.instance, owner="ada", job_id="j1", run_id="run-000001", index=0, run_index=0, lease_id="l1",
        epoch=1, node="mia", gpu_uuids=(), image="tiny:latest", fill_home=partial(files.send, row, "mia"),
    )  # fmt: skip
    with closing(daemons):
        container = await start_worker(daemons, cluster, head.paths, spec)
        details = await daemons.call("mia", "wait", container)
        assert details["StatusCode"] == 0, await daemons.call("mia", "logs", container)
        core.job = row.evolve(workers=(WorkerRow(index=0, node="mia", container_id=container),))
        await files.fetch("mia", container)
        await daemons.call("mia", "remove_container", container, v=True)
        assert (await daemons.call("mia", "volumes"))["Volumes"] == []
    assert core.events == []
    results = home / "guest-results/run-000001"
    assert (results / "model.bin").stat().st_size == 3_000_000
    assert (results / "seen.txt").read_text() == "['.gpu_launch', 'work'] 5000 print(1)"
    assert (run_folder / "output.log").read_text() == "trained"
    assert not (results / "train.py").exists()


def test_leaving_undoes_everything_on_both_sides(head: Head, friend: FriendsMachine, joined: str):
    """Nothing remains on the machine, and the head node has forgotten it: the same key opens nothing."""
    empty = "tar -c -T /dev/null | docker import"
    friend.run("sh", "-euc", f"{empty} - mine:1; {empty} -c 'LABEL gpuhub.debian=2026-11-01' - lab/llm:latest")
    friend.run("gpuhub-node", "leave")
    images = friend.run("docker", "images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    assert ("mine:1" in images, "lab/llm:latest" in images) == (True, False)
    wait(lambda: not head.peers(), "the peer's removal")
    assert GuestRegistry(head.paths).read() == {}
    assert [node.name for node in settings.load(head.cluster_file).nodes] == ["rig1"]
    assert not ssh_files(head.paths.instance).known_hosts("mia").exists()
    assert list_links(friend) == {"eth0", "lo"}
    for path in ("/etc/gpuhub-node", "/run/gpuhub-node", "/usr/local/sbin/gpuhub-node"):
        assert friend.run("test", "-e", path, check=False).returncode == 1
    assert friend.run("id", "gpuhub-guest", check=False).returncode
    assert "gpuhub" not in friend.run("nft", "list", "tables").stdout
    done = friend.run("pgrep", "-f", "gpuhub-node", check=False)
    assert done.stdout == ""


def test_a_removed_guest_has_no_way_in(head: Head, friend: FriendsMachine):
    """The administrator removes a guest that does not cooperate; its tunnel is dead within a minute."""
    friend.run(*split_command(head.invite()))
    with head.docker() as daemons:
        asyncio.run(daemons.call("mia", "ping"))
    remove_guest("mia", head.paths, head.cluster_file, Lines(), lambda: None)
    wait(lambda: not head.peers(), "the peer's removal")
    assert connects(friend, TUNNEL, 8012) != "open"
    assert "removes this machine there" in friend.run("gpuhub-node", "leave").stdout


def test_the_brokers_key_is_never_roots_own(head: Head):
    """Before a machine has joined, nothing is sent to its address."""
    head.invite("eve")
    try:
        with head.docker() as daemons, pytest.raises((NodeUnreachable, GpuhubError), match="invitation was not used"):
            asyncio.run(daemons.call("eve", "ping"))
    finally:
        remove_guest("eve", head.paths, head.cluster_file, Lines(), lambda: None)
