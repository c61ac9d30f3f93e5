"""The limits of users' containers on real daemons: rights, devices, quotas, and an image that requests more."""

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

from gpuhub.common import names
from gpuhub.common.errors import GpuhubError
from gpuhub.config import settings
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker import networks
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers import container_lifecycle
from gpuhub.docker.containers.container_spec import ContainerSpec, build_worker_spec
from gpuhub.docker.containers.security import WorkerSize
from gpuhub_closet import gpu_state
from gpuhub_closet.topology import SimulatedGpu
from tests.support.closet.practice_closet import INSTANCE, Closet
from tests.support.docker import user_containers

ADA = user_containers.build_identity("ada", 20001)
NODE = "rig3"
#: The instructions of the image.
GREEDY = """
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=all NVIDIA_MOFED=enabled NVIDIA_IMEX_CHANNELS=0
USER 0:0
VOLUME /datasets /data /home/ada/.cache
ENTRYPOINT ["/usr/bin/sh", "-c", "exec \\"$@\\"", "sh"]
"""
PROBE = """
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

#: Writes until it is refused; prints bytes and reason for each folder, and what a program that is stored there returns.
FILL = """
import errno, json, os, shutil, subprocess
def fill(folder):
    written = 0
    try:
        with open(folder + "/file", "wb", buffering=0) as file:
            while written < 64 << 20:
                written += file.write(b"x" * 65536)
    except OSError as error:
        return [written, errno.errorcode[error.errno]]
    finally:
        if os.path.exists(folder + "/file"):
            os.unlink(folder + "/file")
    return [written, "done"]
filled = {folder: fill(folder) for folder in ("/", "/etc", "/usr", "/run", "/var/lib", "/tmp", "/var/tmp")}
shutil.copy("/usr/bin/sh", "/tmp/sh")
print(json.dumps({**filled, "program": subprocess.run(["/tmp/sh", "-c", "exit 7"]).returncode}))
"""


@pytest.fixture
async def daemons(closet: Closet) -> AsyncIterator[DockerClients]:
    cluster = settings.load(closet.cluster_file)
    daemons = DockerClients(cluster.nodes, instance=INSTANCE, run_dir=closet.paths.run)
    yield daemons
    daemons.close()


@pytest.fixture
def cluster(closet: Closet, tmp_path: Path) -> ClusterSettings:
    """Settings whose home and datasets belong to the test; the home has device nodes that only root can create."""
    home, datasets = tmp_path / "homes" / "ada", tmp_path / "datasets"
    home.mkdir(parents=True)
    datasets.mkdir(mode=0o777)
    datasets.chmod(0o777)
    os.chown(home, ADA.uid, ADA.gid)
    for name, major, minor in (("nvidia1", 195, 1), ("disk", 254, 0), ("null", 1, 3)):
        kind = stat.S_IFBLK if name == "disk" else stat.S_IFCHR
        os.mknod(home / name, kind | 0o666, os.makedev(major, minor))
        (home / name).chmod(0o666)
    loaded = settings.load(closet.cluster_file)
    storage = loaded.storage.model_copy(
        update={"home": f"{tmp_path}/homes/{{username}}", "home_create": None, "datasets": str(datasets)}
    )
    return loaded.model_copy(update={"storage": storage})


@pytest.fixture
def greedy_image(closet: Closet, tiny_image: str) -> Iterator[str]:
    """The tiny image with every privilege that an image can request."""
    name = f"{INSTANCE}/greedy:latest"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        program = Path("/usr/bin/id").read_bytes()
        entry = tarfile.TarInfo("setuid-id")
        entry.size, entry.mode = len(program), 0o4755
        tar.addfile(entry, io.BytesIO(program))
    with closing(closet.client(NODE)) as client:
        container = client.containers.create(tiny_image, ["true"])
        container.put_archive("/", packed.getvalue())
        container.commit(*name.split(":"), changes=GREEDY.strip())
        container.remove()
        yield name
        client.images.remove(name, force=True)


@pytest.fixture
def two_cards(closet: Closet) -> Iterator[tuple[str, str]]:
    """A node with two GPUs; their UUIDs."""
    node = closet.plan.node(NODE)
    card = SimulatedGpu(model="RTX 5060", memory_mib=8151)
    double = dataclasses.replace(node, gpus=(card, card))
    gpu_state.ensure_gpus(closet.plan, double, closet.paths)
    wider = dataclasses.replace(
        closet.plan, nodes=tuple(double if one.name == NODE else one for one in closet.plan.nodes)
    )
    first, second = wider.gpu_uuids(double)
    yield first, second
    gpu_state.ensure_gpus(closet.plan, node, closet.paths)


def build(cluster: ClusterSettings, image: str, uuids: tuple[str, ...]) -> ContainerSpec:
    context = dataclasses.replace(user_containers.build_context(cluster, NODE, "10.0.0.1"), gpu_uuids=uuids)
    spec = build_worker_spec(
        context=context,
        identity=ADA,
        image=image,
        lease_id="l",
        epoch=1,
        job_id="j",
        run_id="run-1",
        index=0,
        run_index=0,
        size=WorkerSize(),
    )
    return dataclasses.replace(spec, command=("sleep", "300"))


async def run_probe(
    closet: Closet, daemons: DockerClients, cluster: ClusterSettings, spec: ContainerSpec, probe: str = PROBE
) -> dict[str, object]:
    """Run a container as the product does, return what its probe prints, and remove it."""
    await networks.ensure_access_network(daemons, cluster, INSTANCE, NODE)
    with closing(closet.client(NODE)) as client:
        before = {volume.name for volume in client.volumes.list()}
        container = await container_lifecycle.ensure_created(daemons, NODE, spec, adopt=False)
        try:
            await container_lifecycle.inject_identity(daemons, NODE, container.id, ADA, cluster.storage)
            await daemons.call(NODE, "start", container.id)
            done = client.containers.get(container.id).exec_run(["python3", "-c", probe])
            assert done.exit_code == 0, done.output
            return dict(json.loads(done.output))
        finally:
            await container_lifecycle.remove_container(daemons, NODE, container.id)
            left = (
                {volume.name for volume in client.volumes.list()}
                - before
                - {names.scratch_volume_name(INSTANCE, "ada")}
            )
            assert left == set(), "an image's own volumes go with the container"


async def test_image_cannot_widen_the_lease(
    closet: Closet, daemons: DockerClients, cluster: ClusterSettings, greedy_image: str, two_cards: tuple[str, str]
) -> None:
    """With one of two GPUs leased, the container has that GPU and can neither open nor create another device."""
    facts = await run_probe(closet, daemons, cluster, build(cluster, greedy_image, two_cards[:1]))
    asked = facts.pop("asked")
    assert facts == {
        "CapEff": "0000000000000000",
        "CapBnd": "0000000000000000",
        "NoNewPrivs": "1",
        "Seccomp": "2",
        "Uid": "20001\t20001\t20001\t20001",
        "setuid": "20001",
        "devices": ["nvidia0", "nvidiactl"],
        "gpus": 1,
        "own GPU": "done",
        # The home's file system allows devices: only the container's device list forbids this one.
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


async def test_container_without_gpu_lease_has_no_gpu(
    closet: Closet, daemons: DockerClients, cluster: ClusterSettings, greedy_image: str
) -> None:
    """A container without a GPU lease has no GPU, although the image requests all of them."""
    facts = await run_probe(closet, daemons, cluster, build(cluster, greedy_image, ()))
    assert (facts["devices"], facts["gpus"], facts["own GPU"]) == ([], 0, "ENOENT")
    assert dict(facts["asked"])["NVIDIA_VISIBLE_DEVICES"] == "void"  # type: ignore[call-overload]


async def test_disk_limit_that_cannot_be_set_is_refused(
    closet: Closet, daemons: DockerClients, cluster: ClusterSettings, tiny_image: str
) -> None:
    """Where Docker's data is not on XFS, no container starts without its disk limit."""
    limited = cluster.model_copy(update={"jobs": cluster.jobs.model_copy(update={"disk": 1024**3})})
    await networks.ensure_access_network(daemons, cluster, INSTANCE, NODE)
    with pytest.raises(GpuhubError, match=r"node rig3: its Docker cannot limit what a container writes.*pquota"):
        await container_lifecycle.ensure_created(daemons, NODE, build(limited, tiny_image, ()), adopt=False)


async def test_users_cannot_fill_the_disk_of_docker(
    closet: Closet, daemons: DockerClients, cluster: ClusterSettings, tiny_image: str
) -> None:
    """Outside of mounts, a user can write into two folders, which end at their size; programs run from there."""
    limited = cluster.model_copy(update={"jobs": cluster.jobs.model_copy(update={"tmp": 4 << 20})})
    found = await run_probe(closet, daemons, limited, build(limited, tiny_image, ()), FILL)
    assert found == {
        **{folder: [0, "EACCES"] for folder in ("/", "/etc", "/usr", "/run", "/var/lib")},
        **{folder: [4 << 20, "ENOSPC"] for folder in ("/tmp", "/var/tmp")},
        "program": 7,
    }
