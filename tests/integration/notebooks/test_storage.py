"""Storage on real daemons and a real NFS server: scratch, homes, and file servers that hang."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpuhub.broker.controllers.nodes.volume_gc import Volume, parse_volumes
from gpuhub.broker_api.schemas import LeaseState
from gpuhub.common import names
from gpuhub.common.errors import Conflict, SetupError, StorageUnavailable
from gpuhub.config.settings import StorageSettings
from gpuhub.config.users.identity import find_identity
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers import container_lifecycle
from gpuhub.docker.containers.user_containers import CourierSpec, WorkerSpec, start_courier, start_worker
from gpuhub.spawners.base import SpawnFailed
from gpuhub.storage import homes
from gpuhub.storage.blocking_calls import BlockingCallPool
from gpuhub.storage.probe import NfsProber
from gpuhub.web.spawn_form import build_spawn_form
from gpuhub_closet import docker_daemons as closet_daemons
from tests.support.closet.head_node import OWNER, HeadNode, until
from tests.support.closet.practice_closet import INSTANCE, Closet
from tests.support.hub.fake_broker import FakeBroker
from tests.support.nfs import RunningNfsServer, serving_nfs

#: The command of workers in the tiny image instead of `gpu-launch-worker`.
SLEEP = ("sleep", "1000")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the state of other tests, and let containers only sleep."""
    pool = BlockingCallPool()
    monkeypatch.setattr(homes, "BLOCKING_CALLS", pool)
    monkeypatch.setattr(homes, "PROBER", NfsProber(pool))
    monkeypatch.setattr("gpuhub.docker.containers.container_spec.WORKER_COMMAND", SLEEP)


@pytest.fixture
async def clean(head: HeadNode) -> AsyncIterator[HeadNode]:
    """The closet without containers and volumes: other tests' scratch outlives them."""
    await clear(head)
    yield head
    await clear(head)


async def clear(head: HeadNode) -> None:
    """Remove the test's containers and volumes."""
    head.remove_containers()
    for node in head.cluster.nodes:
        await container_lifecycle.remove_nfs_volumes(head.daemons, node.name, INSTANCE)
        for name in volumes(head, node.name):
            await head.daemons.call(node.name, "remove_volume", name)


@pytest.fixture(scope="module")
def nfs(closet: Closet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNfsServer]:
    """An NFS server on the closet's network."""
    with serving_nfs(tmp_path_factory.mktemp("nfs"), str(closet.plan.head)) as server:
        yield server


def volumes(head: HeadNode, node: str) -> list[str]:
    """Return the names of the instance's volumes on a node."""
    with closing(head.closet.client(node)) as client:
        listed = client.volumes.list(filters={"label": f"{names.LABEL_INSTANCE}={INSTANCE}"})
    return [volume.name for volume in listed]


def spec(head: HeadNode, image: str, node: str = "rig1", owner: str = OWNER, number: int = 0) -> WorkerSpec:
    return WorkerSpec(
        instance=INSTANCE,
        owner=owner,
        job_id=f"job-{owner}-{number}",
        run_id="run-000001",
        index=number,
        run_index=number,
        lease_id=f"lease-{owner}-{number}",
        epoch=1,
        node=node,
        gpu_uuids=(),
        image=image,
    )


async def work(head: HeadNode, image: str, node: str = "rig1", owner: str = OWNER, number: int = 0) -> str:
    """Start a worker and return its id."""
    given = spec(head, image, node, owner, number)
    return await start_worker(head.daemons, head.cluster, head.closet.paths, given)


def run_in_container(head: HeadNode, node: str, container: str, command: str) -> str:
    """Run a shell command in a container as its user and return its output."""
    with closing(head.closet.client(node)) as client:
        running = client.containers.get(container)
        return str(
            running.exec_run(["sh", "-c", command], user=running.attrs["Config"]["User"]).output.decode()
        ).strip()


def with_nfs_homes(head: HeadNode, server: RunningNfsServer, **options: Any) -> HeadNode:
    """Return the closet with homes on the server."""
    tables = {
        "home": f"nfs://{server.host}/export/home/{{username}}",
        "home_create": f"{server.folder}/home/{{username}}",
        "nfs_options": f"nfsvers=4.2,hard,noatime,port={server.port}",
        "patience": "2s",
        **options,
    }
    return dataclasses.replace(
        head, cluster=head.cluster.model_copy(update={"storage": StorageSettings.model_validate(tables)})
    )


async def test_scratch_is_private_and_persistent(clean: HeadNode, tiny_image: str) -> None:
    """A new volume is given to the user, shared by the user's containers on that node, and by no others."""
    first = await work(clean, tiny_image)
    uid = run_in_container(clean, "rig1", first, "id -u")
    assert run_in_container(clean, "rig1", first, "ls -ldn /scratch").split()[:4] == ["drwx------", "2", uid, uid]
    assert run_in_container(clean, "rig1", first, "echo kept > /scratch/file && cat /scratch/file") == "kept"
    await container_lifecycle.remove_container(clean.daemons, "rig1", first)
    again = await work(clean, tiny_image, number=1)
    assert run_in_container(clean, "rig1", again, "cat /scratch/file") == "kept"
    elsewhere = await work(clean, tiny_image, "rig2", number=2)
    assert run_in_container(clean, "rig2", elsewhere, "ls -A /scratch") == ""
    ben = await work(clean, tiny_image, owner="ben")
    assert run_in_container(clean, "rig1", ben, "ls -A /scratch; id -u; ls -ldn /scratch").split()[:2] != [
        uid,
        "drwx------",
    ]
    assert sorted(volumes(clean, "rig1")) == [names.scratch_volume_name(INSTANCE, owner) for owner in ("ada", "ben")]
    courier = await start_courier(
        clean.daemons, clean.cluster, clean.closet.paths, CourierSpec(owner=OWNER, node="rig1", image=tiny_image)
    )
    inspected = clean.inspect("rig1", courier)
    assert [mount["Destination"] for mount in inspected["Mounts"]] == [f"/home/{OWNER}"]
    await container_lifecycle.remove_container(clean.daemons, "rig1", courier)


async def test_used_scratch_cannot_be_removed(clean: HeadNode, tiny_image: str) -> None:
    """A real daemon refuses to remove a volume that a container uses, even one that only exists."""
    container = await work(clean, tiny_image)
    await clean.daemons.call("rig1", "kill", container)
    parsed = parse_volumes(await clean.daemons.call("rig1", "volumes"), INSTANCE)
    containers = await clean.daemons.call("rig1", "containers", all=True)
    (scratch,) = parsed
    assert scratch == Volume(
        name=names.scratch_volume_name(INSTANCE, OWNER), kind=names.VOLUME_SCRATCH, owner=OWNER, is_nfs=False
    )
    assert scratch.name in container_lifecycle.find_used_volumes(containers)
    with pytest.raises(Conflict, match="in use"):
        await clean.daemons.call("rig1", "remove_volume", scratch.name)
    await container_lifecycle.remove_container(clean.daemons, "rig1", container)
    assert volumes(clean, "rig1") == [scratch.name]
    await clean.daemons.call("rig1", "remove_volume", scratch.name)
    assert volumes(clean, "rig1") == []


async def test_home_created_by_the_head_node_belongs_to_its_user_over_nfs(
    clean: HeadNode, nfs: RunningNfsServer
) -> None:
    """As libnfs shows, the owner may write, and other users and unprivileged root may not even read."""
    head_on_nfs = with_nfs_homes(clean, nfs)
    identity = await homes.prepare_user(
        head_on_nfs.cluster.users, head_on_nfs.cluster.storage, head_on_nfs.closet.paths.state, OWNER
    )
    listed = nfs.tool("nfs-ls", nfs.url("home", identity.uid)).stdout.split()
    assert (listed[0], listed[2:4], listed[5]) == ("drwx------", [str(identity.uid)] * 2, OWNER)
    text = nfs.folder.parent / "text"
    text.write_text("mine\n")
    copied = nfs.tool("nfs-cp", str(text), nfs.url(f"home/{OWNER}/text", identity.uid))
    assert copied.returncode == 0, copied.stderr
    assert (nfs.folder / "home" / OWNER / "text").stat().st_uid == identity.uid
    assert nfs.tool("nfs-cat", nfs.url(f"home/{OWNER}/text", identity.uid)).stdout == "mine\n"
    other = nfs.tool("nfs-cat", nfs.url(f"home/{OWNER}/text", identity.uid + 1))
    assert (other.stdout, "NFS4ERR_ACCESS" in other.stderr) == ("", True)


async def test_kernel_without_nfs_is_distinguished_from_a_failed_server(
    clean: HeadNode, nfs: RunningNfsServer, tiny_image: str
) -> None:
    """When the server answers, Docker's error is translated, and the container can be removed."""
    head_on_nfs = with_nfs_homes(clean, nfs)
    with pytest.raises(StorageUnavailable, match=r"cannot mount the home of ada .*no NFS client.*nfs-common"):
        await work(head_on_nfs, tiny_image)
    name = names.worker_container_name(INSTANCE, f"job-{OWNER}-0", 0)
    assert head_on_nfs.inspect("rig1", name)["State"]["Running"] is False
    await container_lifecycle.remove_container(head_on_nfs.daemons, "rig1", name)
    definitions = [one for one in volumes(head_on_nfs, "rig1") if "-home-" in one]
    assert len(definitions) == 1
    await container_lifecycle.remove_nfs_volumes(head_on_nfs.daemons, "rig1", INSTANCE)
    assert [one for one in volumes(head_on_nfs, "rig1") if "-home-" in one] == []
    assert (nfs.folder / "home" / OWNER).is_dir()


async def test_hung_server_fails_a_spawn_in_time_and_leases_no_gpu(
    clean: HeadNode, nfs: RunningNfsServer, broker: FakeBroker, users: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user reads the server's name; no lease is requested, no container made, and the event loop keeps running."""
    head_on_nfs = with_nfs_homes(clean, nfs)
    user = users()
    user.spawner.cluster = head_on_nfs.cluster
    nfs.signal(signal.SIGSTOP)
    began, ticks = time.monotonic(), []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.05)

    ticking = asyncio.ensure_future(tick())
    with pytest.raises(SpawnFailed, match=rf"file server {nfs.host} \(port {nfs.port}\) does not answer"):
        await user.spawn(options={"profile": "cpu"})
    ticking.cancel()
    assert time.monotonic() - began < 30
    assert len(ticks) > 5
    assert all(lease.state is LeaseState.RELEASED for lease in broker.known.values())
    assert clean.containers(names.KIND_NOTEBOOK) == []
    nfs.signal(signal.SIGCONT)
    monkeypatch.setattr("gpuhub.storage.probe.FAILURE_CACHE_S", 0.0)
    html = await build_spawn_form(user.spawner)
    assert 'type="radio"' in html
    assert "does not answer" not in html
    # The server is back: this start fails only at this kernel, and its lease and container are gone.
    user.spawner.cluster = head_on_nfs.cluster
    with pytest.raises(SpawnFailed, match="no NFS client"):
        await user.spawn(options={"profile": "cpu"})
    assert [lease.state for lease in broker.known.values()] == [LeaseState.RELEASED]
    assert clean.containers(names.KIND_NOTEBOOK) == []


async def retry_start(start: Callable[[], Awaitable[str]]) -> str:
    """Return a start's result once the daemon has finished an earlier one."""
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(StorageUnavailable):
                return await start()
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def mount_user_file_system(
    folder: Path, target: Path, *options: str, daemon: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Mount `folder` at `target` by a user-space file system; stopping its process hangs it as a dead server does.

    `daemon`: Mount it only in that process's namespace.
    """
    enter = () if daemon is None else ("nsenter", "--target", str(daemon), "--mount")
    target.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen((*enter, "bindfs", "-f", "-o", "nonempty", *options, str(folder), str(target)))
    try:
        end = time.monotonic() + 30
        while f" {target} " not in Path(f"/proc/{daemon or 'self'}/mountinfo").read_text():
            assert time.monotonic() < end, "bindfs did not mount"
            time.sleep(0.05)
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()  # it unmounts when it ends
        process.wait(20)


async def test_hanging_mount_on_the_head_node_is_reported_in_time(clean: HeadNode, tmp_path: Path) -> None:
    """A start is refused while the homes' server hangs, and works when it is back."""
    homes_folder, state = tmp_path / "homes", clean.closet.paths.state
    storage = StorageSettings.model_validate({"home": f"{homes_folder}/{{username}}", "patience": "1s"})
    (tmp_path / "disk").mkdir()
    with mount_user_file_system(tmp_path / "disk", homes_folder) as server:
        server.send_signal(signal.SIGSTOP)
        for reason in ("does not answer within 1 s", "an earlier request to it has not ended"):
            with pytest.raises(
                StorageUnavailable, match=f"The folder of homes {homes_folder} on the head node .*{reason}"
            ):
                await homes.prepare_user(clean.cluster.users, storage, state, OWNER)
        server.send_signal(signal.SIGCONT)
        await until(lambda: not homes.BLOCKING_CALLS.count_overdue(str(homes_folder)))
        identity = await homes.prepare_user(clean.cluster.users, storage, state, OWNER)
        status = (tmp_path / "disk" / OWNER).stat()
    assert (status.st_uid, status.st_mode & 0o777) == (identity.uid, 0o700)


async def test_export_that_squashes_root_is_reported(clean: HeadNode, tmp_path: Path) -> None:
    """The error explains a file system where root may make folders but not give them to users (root_squash)."""
    homes_folder = tmp_path / "homes"
    storage = StorageSettings.model_validate({"home": f"{homes_folder}/{{username}}"})
    (tmp_path / "disk").mkdir()
    with (
        mount_user_file_system(tmp_path / "disk", homes_folder, "--chown-deny"),
        pytest.raises(SetupError, match="no_root_squash"),
    ):
        await homes.prepare_user(clean.cluster.users, storage, clean.closet.paths.state, OWNER)
    assert list((tmp_path / "disk").iterdir()) == []


async def test_hanging_mount_does_not_fail_the_node(clean: HeadNode, tiny_image: str, tmp_path: Path) -> None:
    """The error names the storage, the node still answers, other nodes start containers, and this one does after the
    mount
    is back.
    """
    daemons = DockerClients(clean.cluster.nodes, instance=INSTANCE, run_dir=clean.closet.paths.run, timeout_s=10)
    impatient = dataclasses.replace(clean, daemons=daemons)
    identity = find_identity(clean.cluster.users, clean.closet.paths.state, OWNER)
    (tmp_path / "homes" / OWNER).mkdir(parents=True)
    os.chown(tmp_path / "homes" / OWNER, identity.uid, identity.gid)
    homes_folder = Path(clean.cluster.storage.home.replace("/{username}", ""))
    plan = clean.closet.plan
    (rig1,) = (node for node in plan.nodes if node.name == "rig1")
    (daemon,) = (pid for pid, name in closet_daemons.find_processes(plan, rig1).items() if name == "dockerd")
    try:
        with mount_user_file_system(tmp_path / "homes", homes_folder, daemon=daemon) as server:
            server.send_signal(signal.SIGSTOP)
            starting = asyncio.gather(work(impatient, tiny_image), return_exceptions=True)
            elsewhere = await work(clean, tiny_image, "rig2", number=1)
            assert run_in_container(clean, "rig2", elsewhere, "echo well") == "well"
            assert isinstance(await daemons.call("rig1", "containers", all=True), list)
            (error,) = await starting
            assert isinstance(error, StorageUnavailable)
            assert "Docker on node rig1 answers" in str(error)
            assert f"its storage hangs there, {homes_folder}/{OWNER}" in str(error)
            server.send_signal(signal.SIGCONT)
            # Whatever became of the first request, the same lease has one container.
            again = await retry_start(lambda: work(clean, tiny_image))
            assert run_in_container(clean, "rig1", again, "id -u") == str(identity.uid)
            await container_lifecycle.remove_container(daemons, "rig1", again)
    finally:
        daemons.close()
