"""A container's confinement: the kernel, the file system, the GPUs, and what it may use up."""

from __future__ import annotations

import pytest

from gpuhub.common import names
from tests.hostile.scene import SERVER, Scene
from tests.support.closet.observer import SeenContainer
from tests.support.product import wait_for

#: What the kernel or seccomp answers to those without rights.
REFUSALS = {"EPERM", "EACCES", "ENOSYS"}


@pytest.fixture(params=["notebook", "worker"])
def seen(scene: Scene, request: pytest.FixtureRequest) -> SeenContainer:
    """Each kind of container that a user has a shell in."""
    if request.param == "notebook":
        return scene.notebooks["ben"]
    return scene.find_containers("ada", names.KIND_WORKER)[0]


def test_kernel_refuses_what_only_root_may(scene: Scene, seen: SeenContainer) -> None:
    """No capability, no system call past seccomp, no process of anybody else."""
    found = scene.probe("kernel_calls", seen=seen)
    assert len(found["calls"]) > 35
    assert {name: answer for name, answer in found["calls"].items() if answer not in REFUSALS} == {}
    assert set(found["capabilities"].values()) == {0}
    assert found["no_new_privileges"] == "1"
    assert found["seccomp"] == "2"
    assert found["uid"] >= 20000
    assert found["owners"] == [found["uid"]]


def test_files_of_the_system_are_closed(scene: Scene, seen: SeenContainer) -> None:
    """Neither the node's kernel nor the image's programs can be changed, and Docker's sockets are absent."""
    reads = ["/etc/shadow", "/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmsg", "/dev/sda", "/proc/1/mem"]
    sockets = [
        "/var/run/docker.sock",
        "/run/docker.sock",
        "/run/containerd/containerd.sock",
        "/run/munge/munge.socket.2",
    ]
    writes = [
        "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/irq/0",
        "/sys/kernel/uevent_helper", "/sys/kernel/mm/hugepages", "/etc/passwd", "/etc/ld.so.preload", "/usr/bin/python3",
    ]  # fmt: skip
    makes = ["/", "/etc", "/usr/local/bin", "/opt", "/opt/gpuhub", "/datasets", "/home", "/sys/fs/cgroup", "/lib"]
    found = scene.probe("files", seen=seen, read=reads + sockets, write=writes, make=makes)
    for verb in ("read", "write", "make"):
        assert {path: answer for path, answer in found[verb].items() if answer == "allowed"} == {}, verb
    assert found["writable in /run"] == []
    assert found["set-user-id"] == []
    listed = scene.shell("ls -A /home", seen=seen)[1].split()
    assert listed == [seen.owner]


def test_only_the_leased_gpu_is_there(scene: Scene) -> None:
    """Whatever the environment asks for, a container sees the GPU of its lease and no other."""
    ben = scene.notebooks["ben"]
    for variables in ("", "NVIDIA_VISIBLE_DEVICES=all ", "CUDA_VISIBLE_DEVICES=0,1,2,3 "):
        status, listed = scene.shell(f"{variables}nvidia-smi -L")
        assert status == 0, listed
        assert [line for line in listed.splitlines() if "UUID" in line] == [
            line for line in listed.splitlines() if ben.uuids[0] in line
        ]
        assert listed.count("UUID") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"profile": "part", "image": "evil:1"},
        {"profile": "part", "gpu_count": 8},
        {"profile": "part", "privileged": True},
        {"profile": "part", "mounts": ["/:/host"]},
        {"profile": "part", "environment": {"NVIDIA_VISIBLE_DEVICES": "all"}},
        {"profile": ["part", "cpu"]},
    ],
)
def test_options_of_a_start_cannot_widen_it(scene: Scene, options: dict[str, object]) -> None:
    """A start with other options than the form's is refused before anything is made."""
    status, answer = scene.ben.ask(scene.ben.hub, "POST", "/users/ben/servers/wide", options)
    assert status == 400, answer
    servers = scene.ben.servers()
    assert servers is not None
    assert list(servers) == [SERVER]


def test_a_fork_bomb_hits_its_own_container_only(scene: Scene) -> None:
    """Processes end at the container's limit, while everybody else gets answers."""
    with scene.everybody_works_on():
        found = scene.probe("exhaustion", kind="processes", seconds=15)
    limit = scene.inspect(scene.notebooks["ben"])["HostConfig"]["PidsLimit"]
    assert 0 < found["processes"] < limit
    assert found["refused"] > 0


def test_memory_ends_at_the_containers_limit(scene: Scene) -> None:
    """The kernel kills the program that allocates without end; the container and its neighbours continue."""
    ben = scene.notebooks["ben"]
    with scene.everybody_works_on():
        found = scene.probe("exhaustion", kind="memory")
    assert found == {"signal": -9}
    assert ben in scene.observer.running()


def test_shared_memory_ends_at_its_size(scene: Scene) -> None:
    """/dev/shm has the profile's size."""
    size = scene.inspect(scene.notebooks["ben"])["HostConfig"]["ShmSize"]
    found = scene.probe("exhaustion", kind="/dev/shm", bytes=2 * size)
    assert found["error"] == "ENOSPC"
    assert found["written"] <= size


def test_output_without_end_fills_no_disk(scene: Scene) -> None:
    """Docker keeps the last of a container's output, at most as much as its log's limit."""
    ben = scene.notebooks["ben"]
    config = scene.inspect(ben)["HostConfig"]["LogConfig"]["Config"]
    assert config == {"max-size": "10m", "max-file": "3"}
    with scene.everybody_works_on():
        scene.probe("exhaustion", kind="output", bytes=60 * 2**20)
    log = scene.docker_folder(ben)
    # The file that is being written may pass its limit by a line's length.
    wait_for(
        lambda: 0 < sum(file.stat().st_size for file in log.glob("*-json.log*")) < 31 * 2**20, "the log is cut", 30
    )
