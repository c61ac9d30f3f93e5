"""Storage on real daemons and a real NFS server: scratch, homes, and what happens when a file server hangs."""

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

from gpuhub import names
from gpuhub.broker.schemas import LeaseState
from gpuhub.closet import daemons as closet_daemons
from gpuhub.containers import clearing, creation
from gpuhub.containers.courier import CourierSpec, start_courier
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.spawn_page import build_spawn_form
from gpuhub.containers.troubles import SpawnFailed
from gpuhub.containers.workers import WorkerSpec, start_worker
from gpuhub.errors import Conflict, SetupError, StorageUnavailable
from gpuhub.identity import find_identity
from gpuhub.settings import Storage
from gpuhub.storage import preparing
from gpuhub.storage.patience import Patience
from gpuhub.storage.probe import Prober
from gpuhub.storage.volumes import Volume, parse_volumes, used_volumes
from tests.integration.conftest import INSTANCE, Closet
from tests.integration.test_spawner import OWNER, Head, broker, head, until, users
from tests.support.fake_broker import FakeBroker
from tests.support.nfs_server import NfsServer, serving_nfs

__all__ = ["broker", "head", "users"]

#: What a worker of the tiny image does instead of `gpu-launch-worker`.
SLEEP = ("sleep", "1000")


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is remembered from another test, and containers only sleep."""
    patience = Patience()
    monkeypatch.setattr(preparing, "PATIENCE", patience)
    monkeypatch.setattr(preparing, "PROBER", Prober(patience))
    monkeypatch.setattr("gpuhub.containers.arguments.WORKER_COMMAND", SLEEP)


@pytest.fixture
async def clean(head: Head) -> AsyncIterator[Head]:
    """No container and no volume is there: scratch of other tests' users stays when their closet goes down."""
    await clear(head)
    yield head
    await clear(head)


async def clear(head: Head) -> None:
    """Remove what a test has made."""
    head.remove_containers()
    for node in head.cluster.nodes:
        await clearing.remove_definitions(head.daemons, node.name, INSTANCE)
        for name in volumes(head, node.name):
            await head.daemons.call(node.name, "remove_volume", name)


@pytest.fixture(scope="module")
def nfs(closet: Closet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NfsServer]:
    """A server on the closet's own network."""
    with serving_nfs(tmp_path_factory.mktemp("nfs"), str(closet.plan.head)) as server:
        yield server


def volumes(head: Head, node: str) -> list[str]:
    """Names of the instance's volumes on a node."""
    with closing(head.closet.client(node)) as client:
        found = client.volumes.list(filters={"label": f"{names.LABEL_INSTANCE}={INSTANCE}"})
    return [volume.name for volume in found]


def spec(head: Head, image: str, node: str = "rig1", owner: str = OWNER, number: int = 0) -> WorkerSpec:
    return WorkerSpec(
        instance=INSTANCE,
        owner=owner,
        job_id=f"job-{owner}-{number}",
        run_id="run-000001",
        index=number,
        number=number,
        lease_id=f"lease-{owner}-{number}",
        epoch=1,
        node=node,
        gpu_uuids=(),
        image=image,
    )


async def work(head: Head, image: str, node: str = "rig1", owner: str = OWNER, number: int = 0) -> str:
    """Start a worker; its id."""
    given = spec(head, image, node, owner, number)
    return await start_worker(head.daemons, head.cluster, head.closet.paths, given)


def inside(head: Head, node: str, container: str, command: str) -> str:
    """What a shell in a container says, run as its user."""
    with closing(head.closet.client(node)) as client:
        found = client.containers.get(container)
        return str(found.exec_run(["sh", "-c", command], user=found.attrs["Config"]["User"]).output.decode()).strip()


def on_nfs(head: Head, server: NfsServer, **more: Any) -> Head:
    """The closet with homes on a server, made where the server has them."""
    tables = {
        "home": f"nfs://{server.host}/export/home/{{username}}",
        "home_create": f"{server.folder}/home/{{username}}",
        "nfs_options": f"nfsvers=4.2,hard,noatime,port={server.port}",
        "patience": "2s",
        **more,
    }
    return dataclasses.replace(
        head, cluster=head.cluster.model_copy(update={"storage": Storage.model_validate(tables)})
    )


async def test_scratch_is_its_users_alone_and_stays(clean: Head, tiny_image: str) -> None:
    """A new volume is root's; put_archive gives it to the user, without any root in the container. Another container
    of theirs on the node finds the files, other nodes and other users have their own, and a courier has none.
    """
    first = await work(clean, tiny_image)
    uid = inside(clean, "rig1", first, "id -u")
    assert inside(clean, "rig1", first, "ls -ldn /scratch").split()[:4] == ["drwx------", "2", uid, uid]
    assert inside(clean, "rig1", first, "echo kept > /scratch/file && cat /scratch/file") == "kept"
    await creation.remove(clean.daemons, "rig1", first)
    again = await work(clean, tiny_image, number=1)
    assert inside(clean, "rig1", again, "cat /scratch/file") == "kept"
    elsewhere = await work(clean, tiny_image, "rig2", number=2)
    assert inside(clean, "rig2", elsewhere, "ls -A /scratch") == ""
    ben = await work(clean, tiny_image, owner="ben")
    assert inside(clean, "rig1", ben, "ls -A /scratch; id -u; ls -ldn /scratch").split()[:2] != [uid, "drwx------"]
    assert sorted(volumes(clean, "rig1")) == [names.scratch_volume(INSTANCE, owner) for owner in ("ada", "ben")]
    courier = await start_courier(
        clean.daemons, clean.cluster, clean.closet.paths, CourierSpec(owner=OWNER, node="rig1", image=tiny_image)
    )
    found = clean.inspect("rig1", courier)
    assert [mount["Destination"] for mount in found["Mounts"]] == [f"/home/{OWNER}"]
    await creation.remove(clean.daemons, "rig1", courier)


async def test_scratch_that_a_container_has_cannot_be_removed(clean: Head, tiny_image: str) -> None:
    """What a real daemon lists is understood, and it refuses by itself, also while the container only exists."""
    container = await work(clean, tiny_image)
    await clean.daemons.call("rig1", "kill", container)
    found = parse_volumes(await clean.daemons.call("rig1", "volumes"), INSTANCE)
    containers = await clean.daemons.call("rig1", "containers", all=True)
    (scratch,) = found
    assert scratch == Volume(
        name=names.scratch_volume(INSTANCE, OWNER), kind=names.VOLUME_SCRATCH, owner=OWNER, is_nfs=False
    )
    assert scratch.name in used_volumes(containers)
    with pytest.raises(Conflict, match="in use"):
        await clean.daemons.call("rig1", "remove_volume", scratch.name)
    await creation.remove(clean.daemons, "rig1", container)
    assert volumes(clean, "rig1") == [scratch.name]
    await clean.daemons.call("rig1", "remove_volume", scratch.name)
    assert volumes(clean, "rig1") == []


async def test_a_home_made_by_the_head_belongs_to_its_user_over_nfs(clean: Head, nfs: NfsServer) -> None:
    """As libnfs sees it: the owner may write, another user may not even look, and neither may root without rights."""
    there = on_nfs(clean, nfs)
    identity = await preparing.prepare_user(there.cluster.users, there.cluster.storage, there.closet.paths.state, OWNER)
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


async def test_a_kernel_without_nfs_is_told_from_a_server_without(clean: Head, nfs: NfsServer, tiny_image: str) -> None:
    """The server answers, so Docker is asked; what it says is translated, and the container can be removed."""
    there = on_nfs(clean, nfs)
    with pytest.raises(StorageUnavailable, match=r"cannot mount the home of ada .*no NFS client.*nfs-common"):
        await work(there, tiny_image)
    name = names.worker_container(INSTANCE, f"job-{OWNER}-0", 0)
    assert there.inspect("rig1", name)["State"]["Running"] is False
    await creation.remove(there.daemons, "rig1", name)
    definitions = [one for one in volumes(there, "rig1") if "-home-" in one]
    assert len(definitions) == 1
    await clearing.remove_definitions(there.daemons, "rig1", INSTANCE)
    assert [one for one in volumes(there, "rig1") if "-home-" in one] == []
    assert (nfs.folder / "home" / OWNER).is_dir()


async def test_a_hung_server_fails_a_spawn_in_time_and_holds_no_gpu(
    clean: Head, nfs: NfsServer, broker: FakeBroker, users: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user reads which server it is; no lease was asked for, no container made, and the loop went on."""
    there = on_nfs(clean, nfs)
    user = users()
    user.spawner.cluster = there.cluster
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
    monkeypatch.setattr("gpuhub.storage.probe.SILENCE_REMEMBERED_S", 0.0)
    html = await build_spawn_form(user.spawner)
    assert 'type="radio"' in html
    assert "does not answer" not in html
    # It is back: this start gets as far as this kernel goes, and its lease and container are gone as well.
    user.spawner.cluster = there.cluster
    with pytest.raises(SpawnFailed, match="no NFS client"):
        await user.spawn(options={"profile": "cpu"})
    assert [lease.state for lease in broker.known.values()] == [LeaseState.RELEASED]
    assert clean.containers(names.KIND_NOTEBOOK) == []


async def at_last(start: Callable[[], Awaitable[str]]) -> str:
    """What a start gives once the daemon is through with an earlier one."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(StorageUnavailable):
                return await start()
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def over(folder: Path, target: Path, *options: str, daemon: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A file system in user space that shows `folder` at `target`: a real mount, and stopping its process makes it hang
    as a dead file server does. `daemon`: for that process's mounts only.
    """
    enter = () if daemon is None else ("nsenter", "--target", str(daemon), "--mount")
    target.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen((*enter, "bindfs", "-f", "-o", "nonempty", *options, str(folder), str(target)))
    try:
        end = time.monotonic() + 10
        while f" {target} " not in Path(f"/proc/{daemon or 'self'}/mountinfo").read_text():
            assert time.monotonic() < end, "bindfs did not mount"
            time.sleep(0.05)
        yield process
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()  # it unmounts at its end
        process.wait(20)


async def test_a_mount_that_hangs_on_the_head_is_told_in_time(clean: Head, tmp_path: Path) -> None:
    """A folder of homes whose file server is gone: the start is refused, and all is well when it is back."""
    homes, state = tmp_path / "homes", clean.closet.paths.state
    storage = Storage.model_validate({"home": f"{homes}/{{username}}", "patience": "1s"})
    (tmp_path / "disk").mkdir()
    with over(tmp_path / "disk", homes) as server:
        server.send_signal(signal.SIGSTOP)
        for says in ("does not answer within 1 s", "an earlier question to it is still open"):
            with pytest.raises(StorageUnavailable, match=f"The folder of homes {homes} on the head node .*{says}"):
                await preparing.prepare_user(clean.cluster.users, storage, state, OWNER)
        server.send_signal(signal.SIGCONT)
        await until(lambda: not preparing.PATIENCE.stuck(str(homes)))
        identity = await preparing.prepare_user(clean.cluster.users, storage, state, OWNER)
        made = (tmp_path / "disk" / OWNER).stat()
    assert (made.st_uid, made.st_mode & 0o777) == (identity.uid, 0o700)


async def test_an_export_that_squashes_root_is_told(clean: Head, tmp_path: Path) -> None:
    """A file system on which root may make folders and not give them away, as with root_squash."""
    homes = tmp_path / "homes"
    storage = Storage.model_validate({"home": f"{homes}/{{username}}"})
    (tmp_path / "disk").mkdir()
    with over(tmp_path / "disk", homes, "--chown-deny"), pytest.raises(SetupError, match="no_root_squash"):
        await preparing.prepare_user(clean.cluster.users, storage, clean.closet.paths.state, OWNER)
    assert list((tmp_path / "disk").iterdir()) == []


async def test_a_mount_that_hangs_is_no_dead_node(clean: Head, tiny_image: str, tmp_path: Path) -> None:
    """Docker is asked for a container whose home hangs on that node: the error names the storage, the node answers
    meanwhile, another node starts containers, and once the mount is back so does this one.
    """
    daemons = Daemons(clean.cluster.nodes, instance=INSTANCE, run_dir=clean.closet.paths.run, timeout_s=3)
    impatient = dataclasses.replace(clean, daemons=daemons)
    identity = find_identity(clean.cluster.users, clean.closet.paths.state, OWNER)
    (tmp_path / "homes" / OWNER).mkdir(parents=True)
    os.chown(tmp_path / "homes" / OWNER, identity.uid, identity.gid)
    homes = Path(clean.cluster.storage.home.replace("/{username}", ""))
    plan = clean.closet.plan
    (rig1,) = (node for node in plan.nodes if node.name == "rig1")
    (daemon,) = (pid for pid, name in closet_daemons.processes(plan, rig1).items() if name == "dockerd")
    try:
        with over(tmp_path / "homes", homes, daemon=daemon) as server:
            server.send_signal(signal.SIGSTOP)
            starting = asyncio.gather(work(impatient, tiny_image), return_exceptions=True)
            elsewhere = await work(clean, tiny_image, "rig2", number=1)
            assert inside(clean, "rig2", elsewhere, "echo well") == "well"
            assert isinstance(await daemons.call("rig1", "containers", all=True), list)
            (error,) = await starting
            assert isinstance(error, StorageUnavailable)
            assert "Docker on node rig1 answers" in str(error)
            assert f"its storage hangs there, {homes}/{OWNER}" in str(error)
            server.send_signal(signal.SIGCONT)
            # Whatever comes of the first request: the same lease has one container.
            again = await at_last(lambda: work(clean, tiny_image))
            assert inside(clean, "rig1", again, "id -u") == str(identity.uid)
            await creation.remove(daemons, "rig1", again)
    finally:
        daemons.close()
