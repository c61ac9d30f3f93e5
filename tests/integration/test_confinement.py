"""What holds a user's container in on the closet's real daemons: rights, devices, limits, and an image that wants more."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpuhub import names, settings
from gpuhub.closet import cards
from gpuhub.closet.plan import Card
from gpuhub.containers import creation, networks
from gpuhub.containers.arguments import ContainerSpec, build_worker
from gpuhub.containers.daemons import Daemons
from gpuhub.errors import GpuhubError
from gpuhub.settings import Cluster
from tests.integration import guarded
from tests.integration.conftest import INSTANCE, Closet

ADA = guarded.person("ada", 20001)
NODE = "rig3"
#: What the image says of itself.
GREEDY = """
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=all NVIDIA_MOFED=enabled NVIDIA_IMEX_CHANNELS=0
USER 0:0
VOLUME /datasets /data /home/ada/.cache
ENTRYPOINT ["/usr/bin/sh", "-c", "exec \\"$@\\"", "sh"]
"""
LOOK = """
import errno, json, os, subprocess
def attempt(work):
    try:
        work()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
print(json.dumps({
    **{key: status[key].strip() for key in ("CapEff", "CapBnd", "NoNewPrivs", "Seccomp", "Uid")},
    "setuid": subprocess.run(["/setuid-id", "-u"], capture_output=True, text=True).stdout.strip(),
    "devices": sorted(name for name in os.listdir("/dev") if name.startswith("nvidia")),
    "gpus": subprocess.run(["sh", "-c", "nvidia-smi -L || true"], capture_output=True, text=True).stdout.count("UUID: GPU-"),
    "asked": {key: value for key, value in os.environ.items() if key.startswith("NVIDIA_")},
    "own GPU": attempt(lambda: os.close(os.open("/dev/nvidia0", os.O_RDWR))),
    "another's GPU": attempt(lambda: os.close(os.open("/home/ada/nvidia1", os.O_RDWR))),
    "a disk": attempt(lambda: os.close(os.open("/home/ada/disk", os.O_RDONLY))),
    "null": attempt(lambda: os.close(os.open("/home/ada/null", os.O_RDWR))),
    "mknod": attempt(lambda: os.mknod("/home/ada/made", 0o20666, os.makedev(195, 1))),
    "datasets": attempt(lambda: os.close(os.open("/datasets/x", os.O_CREAT | os.O_WRONLY))),
    "mount": subprocess.run(["python3", "-c", "import ctypes; print(ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, None))"], capture_output=True, text=True).stdout.strip(),
    "core": open("/proc/self/limits").read().split("Max core file size")[1].split()[:2],
}))
"""


@pytest.fixture
async def daemons(closet: Closet) -> AsyncIterator[Daemons]:
    cluster = settings.load(closet.cluster_file)
    daemons = Daemons(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)
    yield daemons
    daemons.close()


@pytest.fixture
def cluster(closet: Closet, tmp_path: Path) -> Cluster:
    """With a home and datasets of the test's own; in the home are nodes that only root can have put there."""
    home, datasets = tmp_path / "homes" / "ada", tmp_path / "datasets"
    home.mkdir(parents=True)
    datasets.mkdir(mode=0o777)
    datasets.chmod(0o777)
    os.chown(home, ADA.uid, ADA.gid)
    for name, major, minor in (("nvidia1", 195, 1), ("disk", 254, 0), ("null", 1, 3)):
        kind = stat.S_IFBLK if name == "disk" else stat.S_IFCHR
        os.mknod(home / name, kind | 0o666, os.makedev(major, minor))
        (home / name).chmod(0o666)
    found = settings.load(closet.cluster_file)
    storage = found.storage.model_copy(
        update={"home": f"{tmp_path}/homes/{{username}}", "home_create": None, "datasets": str(datasets)}
    )
    return found.model_copy(update={"storage": storage})


@pytest.fixture
def greedy_image(closet: Closet, tiny_image: str) -> Iterator[str]:
    """The tiny image, with all that an image can ask for."""
    name = f"{INSTANCE}/greedy:latest"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        program = Path("/usr/bin/id").read_bytes()
        entry = tarfile.TarInfo("setuid-id")
        entry.size, entry.mode = len(program), 0o4755
        tar.addfile(entry, io.BytesIO(program))
    with closing(closet.client(NODE)) as client:
        made = client.containers.create(tiny_image, ["true"])
        made.put_archive("/", packed.getvalue())
        made.commit(*name.split(":"), changes=GREEDY.strip())
        made.remove()
        yield name
        client.images.remove(name, force=True)


@pytest.fixture
def two_cards(closet: Closet) -> Iterator[tuple[str, str]]:
    """A node with two GPUs; their UUIDs."""
    node = closet.plan.node(NODE)
    card = Card(model="RTX 5060", memory_mib=8151)
    double = dataclasses.replace(node, cards=(card, card))
    cards.ensure_cards(closet.plan, double, closet.paths)
    wider = dataclasses.replace(
        closet.plan, nodes=tuple(double if one.name == NODE else one for one in closet.plan.nodes)
    )
    first, second = wider.gpu_uuids(double)
    yield first, second
    cards.ensure_cards(closet.plan, node, closet.paths)


def build(cluster: Cluster, image: str, uuids: tuple[str, ...]) -> ContainerSpec:
    place = dataclasses.replace(guarded.place(cluster, NODE, "10.0.0.1"), gpu_uuids=uuids)
    spec = build_worker(
        place=place, identity=ADA, image=image, lease_id="l", epoch=1, job_id="j", run_id="run-1", index=0, number=0
    )
    return dataclasses.replace(spec, command=("sleep", "300"))


async def look(closet: Closet, daemons: Daemons, cluster: Cluster, spec: ContainerSpec) -> dict[str, object]:
    """What a container of it finds, made as the product does; nothing is left of it."""
    await networks.ensure_access_network(daemons, cluster, INSTANCE, NODE)
    with closing(closet.client(NODE)) as client:
        before = {one.name for one in client.volumes.list()}
        made = await creation.ensure_created(daemons, NODE, spec, adopt=False)
        try:
            await creation.name_user(daemons, NODE, made.id, ADA, cluster.storage)
            await daemons.call(NODE, "start", made.id)
            done = client.containers.get(made.id).exec_run(["python3", "-c", LOOK])
            assert done.exit_code == 0, done.output
            return dict(json.loads(done.output))
        finally:
            await creation.remove(daemons, NODE, made.id)
            left = {one.name for one in client.volumes.list()} - before - {names.scratch_volume(INSTANCE, "ada")}
            assert left == set(), "an image's own volumes go with the container"


async def test_an_image_that_wants_more_gets_nothing(
    closet: Closet, daemons: Daemons, cluster: Cluster, greedy_image: str, two_cards: tuple[str, str]
) -> None:
    """One GPU of two is leased: whatever the image asks for, that one is there; no other can be opened or made."""
    found = await look(closet, daemons, cluster, build(cluster, greedy_image, two_cards[:1]))
    asked = found.pop("asked")
    assert found == {
        "CapEff": "0000000000000000",
        "CapBnd": "0000000000000000",
        "NoNewPrivs": "1",
        "Seccomp": "2",
        "Uid": "20001\t20001\t20001\t20001",
        "setuid": "20001",
        "devices": ["nvidia0", "nvidiactl"],
        "gpus": 1,
        "own GPU": "done",
        # By its own number, from a file system that allows devices: the container's device list forbids it.
        "another's GPU": "EPERM",
        "a disk": "EPERM",
        "null": "done",
        "mknod": "EPERM",
        "datasets": "EROFS",
        "mount": "-1",
        "core": ["0", "0"],
    }
    assert asked == {
        "NVIDIA_VISIBLE_DEVICES": two_cards[0],
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "NVIDIA_MOFED": "disabled",
        "NVIDIA_GDS": "disabled",
        "NVIDIA_GDRCOPY": "disabled",
        "NVIDIA_NVSWITCH": "disabled",
        "NVIDIA_IMEX_CHANNELS": "void",
    }


async def test_without_a_lease_of_gpus_there_is_none(
    closet: Closet, daemons: Daemons, cluster: Cluster, greedy_image: str
) -> None:
    """The image asks for all."""
    found = await look(closet, daemons, cluster, build(cluster, greedy_image, ()))
    assert (found["devices"], found["gpus"], found["own GPU"]) == ([], 0, "ENOENT")
    assert dict(found["asked"])["NVIDIA_VISIBLE_DEVICES"] == "void"  # type: ignore[call-overload]


async def test_a_disk_that_cannot_be_limited_is_told(
    closet: Closet, daemons: Daemons, cluster: Cluster, tiny_image: str
) -> None:
    """Docker's data is not on XFS here: no container starts without its limit."""
    limited = cluster.model_copy(update={"jobs": cluster.jobs.model_copy(update={"disk": 1024**3})})
    await networks.ensure_access_network(daemons, cluster, INSTANCE, NODE)
    with pytest.raises(GpuhubError, match=r"node rig3: its Docker cannot limit what a container writes.*pquota"):
        await creation.ensure_created(daemons, NODE, build(limited, tiny_image, ()), adopt=False)
