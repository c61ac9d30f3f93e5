"""Copies of datasets on the disks of real nodes: made once, passed on, checked, mounted and removed."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpuhub.backends.builtin import BuiltinBackend
from gpuhub.broker.db.store import Store
from gpuhub.broker.files.dataset_stager import DatasetStager
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.common import names
from gpuhub.config.settings import StorageSettings
from gpuhub.docker.containers import container_lifecycle, staging_container
from gpuhub.docker.containers.staging_container import StagingFailed
from gpuhub.docker.containers.user_containers import WorkerSpec, start_worker
from gpuhub.nodes.inventory import build_inventory
from tests.support.closet.head_node import OWNER, HeadNode
from tests.support.closet.practice_closet import INSTANCE

NODES = ("rig1", "rig2", "rig3")
DIGITS = "datasets/digits"


@pytest.fixture(autouse=True)
def _small_image(monkeypatch: pytest.MonkeyPatch, tiny_image: str) -> None:
    """Use the small image: nodes of these tests have no gpuhub/base."""
    monkeypatch.setattr(staging_container, "BASE_IMAGE", tiny_image)
    monkeypatch.setattr("gpuhub.docker.containers.container_spec.WORKER_COMMAND", ("sleep", "1000"))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Path]:
    """The folder of datasets, with one of them; every node sees it at the same path."""
    os.umask(0o022)
    for folder in (tmp_path, *tmp_path.parents[:-1]):
        # pytest's own folders are private, and staging containers are nobody.
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    digits = tmp_path / "datasets" / "digits"
    (digits / "train").mkdir(parents=True)
    for number in range(3):
        (digits / "train" / f"{number}.bin").write_bytes(secrets.token_bytes(300_000))
    (digits / "labels").symlink_to("train/0.bin")
    yield tmp_path / "datasets"


@pytest.fixture
async def staging(head: HeadNode, server: Path, tmp_path: Path) -> AsyncIterator[tuple[HeadNode, DatasetStager]]:
    """The closet with these datasets, and the part of a broker that copies them."""
    storage = head.cluster.storage.model_copy(update={"datasets": str(server), "stage_spare": 1})
    cluster = head.cluster.model_copy(update={"storage": storage})
    yield dataclasses.replace(head, cluster=cluster), build_stager(head, storage, tmp_path)
    for name in NODES:
        with closing(head.closet.client(name)) as client:
            for container in client.containers.list(
                all=True, ignore_removed=True, filters={"label": names.LABEL_INSTANCE}
            ):
                if container.labels.get(names.LABEL_KIND) in {names.KIND_STAGER, names.KIND_WORKER}:
                    container.remove(force=True)
            for volume in client.volumes.list(filters={"label": names.LABEL_DATASET}):
                volume.remove()


def build_stager(head: HeadNode, storage: StorageSettings, folder: Path) -> DatasetStager:
    """Return the stager of a new run of the broker, for which all nodes are up."""
    cluster = head.cluster.model_copy(update={"storage": storage})
    inventory = build_inventory(cluster, {})
    nodes = {name: node.evolve(is_up=True) for name, node in inventory.nodes.items()}
    core = BrokerState(
        cluster=cluster,
        store=Store.open(f"sqlite:///{folder}/{secrets.token_hex(4)}.sqlite", folder / secrets.token_hex(4)),
        scheduler=BuiltinBackend(cluster).scheduler,
        inventory=dataclasses.replace(inventory, nodes=nodes),
    )
    return DatasetStager(core=core, daemons=head.daemons)


def read_copy(head: HeadNode, node: str, volume: str) -> dict[str, str]:
    """Return the hash of each file of a copy."""
    with closing(head.closet.client(node)) as client:
        root = Path(client.volumes.get(volume).attrs["Mountpoint"])
    return hash_files(root)


def hash_files(root: Path) -> dict[str, str]:
    return {
        str(file.relative_to(root)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(root.rglob("*"))
        if file.is_file()
    }


def move(folder: Path, target: Path) -> None:
    folder.rename(target)


def change_mode(path: Path, mode: int) -> None:
    path.chmod(mode)


def stager_containers(head: HeadNode) -> list[str]:
    return head.containers(names.KIND_STAGER)


async def test_nodes_pass_a_dataset_on(staging: tuple[HeadNode, DatasetStager], server: Path) -> None:
    """All nodes get the files in one transfer, a later node from a node that has them, and nothing is left running."""
    head, stager = staging
    reports: list[str] = []
    volumes = await stager.stage([DIGITS], NODES[:2], reports.append)
    volume = volumes[DIGITS]
    original = hash_files(server / "digits")
    assert read_copy(head, "rig1", volume) == read_copy(head, "rig2", volume) == original
    assert reports[0] == f"Copying {DIGITS} to rig1, rig2: 0 B of 879 KiB"
    # The server is gone: what rig3 gets, it gets from another node.
    move(server / "digits", server / "elsewhere")
    assert await stager.stage([DIGITS], ["rig3", "rig1"]) == volumes
    assert read_copy(head, "rig3", volume) == original
    assert stager_containers(head) == []


async def test_containers_see_the_copy_at_the_path_of_the_dataset(
    staging: tuple[HeadNode, DatasetStager], server: Path, tiny_image: str
) -> None:
    """The user reads the node's own disk, can change nothing, and other datasets are the file server's."""
    head, stager = staging
    (server / "other").mkdir()
    volumes = await stager.stage([DIGITS], ["rig1"])
    spec = WorkerSpec(
        instance=INSTANCE,
        owner=OWNER,
        job_id="job-staged",
        run_id="run-000001",
        index=0,
        run_index=0,
        lease_id="lease-staged",
        epoch=1,
        node="rig1",
        gpu_uuids=(),
        image=tiny_image,
        staged=volumes,
    )
    container = await start_worker(head.daemons, head.cluster, head.closet.paths, spec)

    def run(command: str) -> bytes:
        with closing(head.closet.client("rig1")) as client:
            done = client.containers.get(container).exec_run(["sh", "-c", command], user="1000:1000")
            return bytes(done.output)

    assert run("ls /datasets") == b"digits\nother\n"
    assert hashlib.sha256(run("cat /datasets/digits/labels")).hexdigest() == hash_files(server / "digits")["labels"]
    assert b"Read-only file system" in run("echo > /datasets/digits/new")
    (server / "digits" / "train" / "late.bin").write_bytes(b"late")
    assert run("ls /datasets/digits/train") == b"0.bin\n1.bin\n2.bin\n"
    # A copy that a container has is never removed, however old it is.
    removals = await stager.copies.find_removals("rig1", keep_s=-1, missing_bytes=10**12)
    assert removals == []
    await container_lifecycle.remove_container(head.daemons, "rig1", container)


async def test_changed_dataset_is_copied_again(staging: tuple[HeadNode, DatasetStager], server: Path) -> None:
    """Sizes and times of the files name the copy, so that nobody reads the copy of an earlier state."""
    head, stager = staging
    before = (await stager.stage([DIGITS], ["rig1"]))[DIGITS]
    (server / "digits" / "train" / "new.bin").write_bytes(b"new")
    later = build_stager(head, head.cluster.storage, server.parent)
    after = (await later.stage([DIGITS], ["rig1"]))[DIGITS]
    assert after != before
    assert read_copy(head, "rig1", after) == hash_files(server / "digits")


async def test_copy_of_an_earlier_run_of_the_broker_is_checked(
    staging: tuple[HeadNode, DatasetStager], server: Path
) -> None:
    """A whole copy is used again; one that lacks a file, as after a power failure, is made again."""
    head, stager = staging
    volume = (await stager.stage([DIGITS], ["rig1"]))[DIGITS]
    with closing(head.closet.client("rig1")) as client:
        root = Path(client.volumes.get(volume).attrs["Mountpoint"])
    inode = (root / "train" / "0.bin").stat().st_ino
    again = build_stager(head, head.cluster.storage, server.parent)
    assert (await again.stage([DIGITS], ["rig1"]))[DIGITS] == volume
    assert (root / "train" / "0.bin").stat().st_ino == inode
    (root / "train" / "1.bin").write_bytes(b"")
    third = build_stager(head, head.cluster.storage, server.parent)
    await third.stage([DIGITS], ["rig1"])
    assert read_copy(head, "rig1", volume) == hash_files(server / "digits")


async def test_private_dataset_is_refused(staging: tuple[HeadNode, DatasetStager], server: Path) -> None:
    """All users would read the copy: the refusal names the file that some may not read, and nothing is written."""
    head, stager = staging
    change_mode(server / "digits" / "train" / "1.bin", 0o640)
    with pytest.raises(StagingFailed, match=r"datasets/digits cannot be copied.*train/1.bin \(mode 0640\)"):
        await stager.stage([DIGITS], NODES)
    change_mode(server / "digits" / "train" / "1.bin", 0o644)
    change_mode(server, 0o750)
    with pytest.raises(StagingFailed, match="may not be read by all users"):
        await stager.stage([DIGITS], NODES)
    change_mode(server, 0o755)
    with pytest.raises(StagingFailed, match=r"there is no /datasets/digit$"):
        await stager.stage(["datasets/digit"], NODES)
    for node in NODES:
        with closing(head.closet.client(node)) as client:
            assert client.volumes.list(filters={"label": names.LABEL_DATASET}) == []


async def test_node_without_space_fails_alone(
    staging: tuple[HeadNode, DatasetStager], server: Path, tmp_path: Path
) -> None:
    """The reason names the node and both sizes, and no volume remains."""
    head, _ = staging
    stager = build_stager(head, head.cluster.storage.model_copy(update={"stage_spare": 10**15}), tmp_path)
    with pytest.raises(
        StagingFailed, match=r"node rig1: the copy and the space .* need 1000000.0 GB, and the disk has"
    ):
        await stager.stage([DIGITS], ["rig1"])
    with closing(head.closet.client("rig1")) as client:
        assert client.volumes.list(filters={"label": names.LABEL_DATASET}) == []


async def test_volume_that_docker_made_is_not_taken_for_a_copy(
    staging: tuple[HeadNode, DatasetStager], server: Path
) -> None:
    """After `docker volume rm` by hand, a container's start makes an empty volume of the name."""
    head, stager = staging
    volume = (await stager.stage([DIGITS], ["rig1"]))[DIGITS]
    with closing(head.closet.client("rig1")) as client:
        client.volumes.get(volume).remove()
        client.volumes.create(volume)
    await stager.stage([DIGITS], ["rig1"])
    assert read_copy(head, "rig1", volume) == hash_files(server / "digits")
