"""The practice closet on real daemons."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import docker
import pytest
from docker.models.containers import Container
from docker.types import DeviceRequest, IPAMConfig, IPAMPool

from gpuhub.common.gpu import GpuSpec
from gpuhub.nodes import agent_container
from gpuhub.nodes.agent_container import agent_script, build_container, build_host_config, find_last_line
from gpuhub.nodes.status import AgentReading, GpuProcess
from gpuhub_closet import docker_daemons, gpu_state, lifecycle, network, real_gpus, shell
from gpuhub_closet.paths import node_paths
from gpuhub_closet.topology import ClosetNode, SimulatedGpu, SimulatedMigDevice, mig_uuid
from tests.support.closet import practice_closet
from tests.support.closet.practice_closet import INSTANCE
from tests.support.docker.simulated_nodes import wait_until

READINGS = """
import pynvml as nvml
nvml.nvmlInit()
for index in range(nvml.nvmlDeviceGetCount()):
    card = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(card)
    print(nvml.nvmlDeviceGetName(card), nvml.nvmlDeviceGetUUID(card), memory.total >> 20, memory.used >> 20,
          nvml.nvmlDeviceGetUtilizationRates(card).gpu, sep="|")
"""
LOCKED_DOWN = {"user": "1000:1000", "cap_drop": ["ALL"], "security_opt": ["no-new-privileges"], "init": True}


def request(*devices: str) -> list[DeviceRequest]:
    return [DeviceRequest(device_ids=list(devices), capabilities=[["gpu"]])]


def run(client: docker.DockerClient, image: str, *command: str, **options) -> str:
    return client.containers.run(image, list(command), remove=True, **options).decode().strip()


@contextmanager
def running(client: docker.DockerClient, image: str, *command: str, **options) -> Iterator[Container]:
    container = client.containers.run(image, list(command), detach=True, **options)
    try:
        yield container
    finally:
        container.remove(force=True)


def execute(closet, container: Container, *command: str) -> subprocess.CompletedProcess[str]:
    # Docker's own client: docker-py's exec leaves its socket open, which is a warning, hence an error here.
    docker_url = node_paths(closet.paths, "rig1").docker_url
    line = ["docker", "--host", docker_url, "exec", container.id, *command]
    return subprocess.run(line, check=False, capture_output=True, text=True, timeout=30)


def kill_dockerd(closet, node: ClosetNode) -> None:
    dockerd = next(pid for pid, name in docker_daemons.find_processes(closet.plan, node).items() if name == "dockerd")
    os.kill(dockerd, signal.SIGKILL)
    assert shell.wait_until(lambda: not docker_daemons.find_processes(closet.plan, node), timeout_s=60)


@pytest.fixture
def rig1(closet) -> Iterator[docker.DockerClient]:
    with closing(closet.client("rig1")) as client:
        yield client


@pytest.fixture
def uuid(closet) -> str:
    return closet.plan.gpu_uuids(closet.plan.node("rig1"))[0]


def test_device_request_shows_exactly_that_gpu(rig1, tiny_image, uuid):
    """A container that requests a GPU by UUID reads its name, memory and UUID through NVIDIA's own package."""
    output = run(rig1, tiny_image, "python3", "-c", READINGS, device_requests=request(uuid), **LOCKED_DOWN)
    assert output == f"NVIDIA GeForce RTX 5090|{uuid}|32607|0|0"


def test_nvidia_smi_in_a_read_only_container(rig1, tiny_image, uuid):
    """nvidia-smi lists the GPU and marks it as simulated, in a container whose root is read-only."""
    options = {"device_requests": request(uuid), "read_only": True, **LOCKED_DOWN}
    assert run(rig1, tiny_image, "nvidia-smi", "-L", **options) == f"GPU 0: NVIDIA GeForce RTX 5090 (UUID: {uuid})"
    assert "simulated" in run(rig1, tiny_image, "nvidia-smi", **options)


def test_unknown_gpu_is_refused(rig1, tiny_image, closet):
    """A GPU of another node is refused at the start, with a message that names it."""
    other = closet.plan.gpu_uuids(closet.plan.node("rig2"))[0]
    with pytest.raises(docker.errors.APIError, match=f"{other}: unknown device"):
        run(rig1, tiny_image, "nvidia-smi", "-L", device_requests=request(other))


def test_container_without_request_sees_no_gpu(rig1, tiny_image):
    """Without a device request there is no library, no tool and no device."""
    script = "ls /dev/nvidia* /usr/bin/nvidia-smi /usr/lib/*/libnvidia-ml* /usr/share/nvidia-simulated; true"
    listing = run(rig1, tiny_image, "sh", "-c", f"{script} 2>/dev/null", environment={"NVIDIA_VISIBLE_DEVICES": "all"})
    assert listing == ""


def test_own_environment_does_not_widen_the_request(rig1, tiny_image, uuid):
    """Setting NVIDIA_VISIBLE_DEVICES by hand changes nothing about what was requested."""
    options = {"device_requests": request(uuid), "environment": {"NVIDIA_VISIBLE_DEVICES": "GPU-of-somebody-else"}}
    assert uuid in run(rig1, tiny_image, "nvidia-smi", "-L", **options)


def test_load_and_faults_are_live(rig1, tiny_image, uuid, closet):
    """A running container sees a changed load and a lost GPU, and a new container does not get a lost GPU."""
    with running(rig1, tiny_image, "sleep", "60", device_requests=request(uuid)) as container:
        practice_closet.set_load(closet.paths, "rig1", 0, utilisation_percent=73, memory_used_mib=20000)
        assert execute(closet, container, "python3", "-c", READINGS).stdout.strip().endswith("|20000|73")
        practice_closet.set_fault(closet.paths, "rig1", 0, "lost")
        try:
            broken = execute(closet, container, "nvidia-smi")
            assert (broken.returncode, "GPU is lost" in broken.stdout) == (15, True)
            with pytest.raises(docker.errors.APIError, match="gpu is lost"):
                run(rig1, tiny_image, "nvidia-smi", "-L", device_requests=request(uuid))
        finally:
            practice_closet.set_gpu_load(closet.paths, "rig1", 0, gpu_state.GpuLoad())
        assert execute(closet, container, "nvidia-smi").returncode == 0


@contextmanager
def split_rig3(closet) -> Iterator[tuple[str, ...]]:
    """rig3 with a GPU in MIG mode instead of its usual one."""
    node = closet.plan.node("rig3")
    parts = (
        SimulatedMigDevice(profile="3g.71gb", memory_mib=71424),
        SimulatedMigDevice(profile="1g.18gb", memory_mib=16384),
    )
    split = replace(node, gpus=(SimulatedGpu(model="H200", memory_mib=143771, capability=(9, 0), mig_devices=parts),))
    gpu_state.ensure_gpus(closet.plan, split, closet.paths)
    try:
        (uuid,) = closet.plan.gpu_uuids(node)
        yield tuple(mig_uuid(uuid, slot) for slot in range(2))
    finally:
        gpu_state.ensure_gpus(closet.plan, node, closet.paths)


def test_mig_devices_are_requested_by_uuid(closet, tiny_image):
    """A container gets the MIG devices that it requests, and sees no other one of their GPU."""
    with split_rig3(closet) as uuids, closing(closet.client("rig3")) as rig3:
        one = run(rig3, tiny_image, "nvidia-smi", "-L", device_requests=request(uuids[1]), **LOCKED_DOWN)
        assert one.splitlines()[1:] == [f"  MIG 1g.18gb     Device  0: (UUID: {uuids[1]})"]
        every = [DeviceRequest(count=-1, capabilities=[["gpu"]])]
        assert len(run(rig3, tiny_image, "nvidia-smi", "-L", device_requests=every, **LOCKED_DOWN).splitlines()) == 3


@contextmanager
def agent_on(client: docker.DockerClient, image: str) -> Iterator[Callable[[], AgentReading | None]]:
    """Run the GPU agent in a container like the broker's, on another image and with a shorter interval."""
    script = agent_script().replace("PERIOD_S = 2.0", "PERIOD_S = 0.1").replace("HANG_S = 6.0", "HANG_S = 0.5")
    arguments = {**build_container(INSTANCE, "trial", script), "image": image}
    host = client.api.create_host_config(**build_host_config())
    container = client.api.create_container(host_config=host, **arguments)["Id"]
    try:
        client.api.start(container)
        yield lambda: agent_container.parse_agent_line(find_last_line(client.api.logs(container, stderr=False, tail=8)))
    finally:
        client.api.remove_container(container, force=True)


def test_agent_reports_faults_foreign_processes_and_machine_identity(closet, tiny_image, rig1, uuid):
    """As an unprivileged user without network, the agent reports all that the broker decides by."""

    def reads(condition: Callable[[AgentReading], bool]) -> AgentReading:
        def look() -> AgentReading | None:
            reading = read()
            return reading if reading is not None and condition(reading) else None

        return wait_until(look, "the agent reports it", 60)

    with agent_on(rig1, tiny_image) as read:
        try:
            first = reads(lambda reading: bool(reading.gpus))
            assert (first.error, first.gpus[0].uuid, first.gpus[0].processes) == (None, uuid, ())
            assert first.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            assert first.driver is not None
            practice_closet.set_outsiders(closet.paths, "rig1", 0, ((4711, 5000),))
            used = reads(lambda reading: bool(reading.gpus and reading.gpus[0].processes)).gpus[0]
            assert (used.processes, used.memory_used_mib) == ((GpuProcess(pid=4711, memory_mib=5000),), 5000)
            practice_closet.set_outsiders(closet.paths, "rig1", 0, ())
            assert (
                reads(lambda reading: bool(reading.gpus and not reading.gpus[0].processes)).gpus[0].memory_used_mib == 0
            )
            practice_closet.set_gpu_load(closet.paths, "rig1", 0, gpu_state.GpuLoad(xid=79, xid_count=1))
            errors = reads(lambda reading: bool(reading.xids and reading.xids[uuid])).xids[uuid]
            assert [(error.code, error.count) for error in errors] == [(79, 1)]
            practice_closet.set_fault(closet.paths, "rig1", 0, gpu_state.GpuFault.ECC)
            assert reads(lambda reading: bool(reading.gpus and reading.gpus[0].ecc_uncorrected)).error is None
            practice_closet.set_fault(closet.paths, "rig1", 0, gpu_state.GpuFault.HANG)
            assert reads(lambda reading: reading.error is not None).error == "NVML does not answer"
        finally:
            practice_closet.set_gpu_load(closet.paths, "rig1", 0, gpu_state.GpuLoad())
        assert reads(lambda reading: reading.error is None).gpus[0].uuid == uuid


@contextmanager
def machines_toolkit(folder: Path) -> Iterator[None]:
    """Stand-ins for NVIDIA's toolkit on the machine: a hook and a default runtime, which write what they are called with."""
    hook, runtime = folder / "nvidia-container-runtime-hook", folder / "runtime"
    hook.write_text(f'#!/bin/sh\necho "$@" >> {folder}/hooked\n')
    runtime.write_text(f'#!/bin/sh\necho "$@" >> {folder}/ran\nexec runc "$@"\n')
    (folder / "daemon.json").write_text(
        json.dumps({"runtimes": {"gpus": {"path": str(runtime)}}, "default-runtime": "gpus"})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(real_gpus, "MACHINE_DAEMON_FILE", folder / "daemon.json")
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        for file in (hook, runtime):
            file.chmod(0o755)
        yield


def test_node_with_real_gpus_uses_the_machines_toolkit(closet, tiny_image, tmp_path):
    """Its daemon calls the machine's hook and runtime, and nothing simulated is in the containers."""
    node = closet.plan.node("rig3")
    changed = replace(node, gpus=(), real_gpus=(GpuSpec(model="RTX 5060", memory_mib=8151),))
    plan = replace(closet.plan, nodes=(*closet.plan.nodes[:2], changed))
    script = "ls /usr/bin/nvidia-smi /dev/nvidia* /usr/share/nvidia-simulated 2>/dev/null; echo $NVIDIA_VISIBLE_DEVICES"
    docker_daemons.stop_daemons(closet.plan, [node])
    try:
        with machines_toolkit(tmp_path):
            practice_closet.ensure_up(plan, closet.paths)
            with closing(closet.client("rig3")) as rig3:
                assert run(rig3, tiny_image, "sh", "-c", script, device_requests=request("GPU-1")) == "GPU-1"
    finally:
        docker_daemons.stop_daemons(closet.plan, [node])
        practice_closet.ensure_up(closet.plan, closet.paths)
    assert "prestart" in (tmp_path / "hooked").read_text()
    assert " create " in (tmp_path / "ran").read_text()
    with closing(closet.client("rig3")) as rig3:
        [uuid] = closet.plan.gpu_uuids(node)
        assert uuid in run(rig3, tiny_image, "nvidia-smi", "-L", device_requests=request(uuid))


def test_container_cannot_change_a_gpu(rig1, tiny_image, uuid):
    """Even root in a container cannot write a GPU's files."""
    script = "echo fault lost > /usr/share/nvidia-simulated/0/live || echo refused"
    output = run(rig1, tiny_image, "sh", "-c", script, device_requests=request(uuid))
    assert output.endswith("refused")


def test_restarted_container_keeps_its_gpu(rig1, tiny_image, uuid, closet):
    """A stopped container that is started again has its GPU again."""
    with running(rig1, tiny_image, "sleep", "60", init=True, device_requests=request(uuid)) as container:
        container.restart(timeout=5)
        assert uuid in execute(closet, container, "nvidia-smi", "-L").stdout


def test_nodes_have_their_own_names_and_reach_the_head(closet, tiny_image):
    """Each node has its own host name, and its containers reach the head node, and nothing beyond at once."""
    script = "import socket; s = socket.create_server(('{}', 0)); print(s.getsockname()[1], flush=True); s.accept()"
    listening = ["python3", "-c", script.format(closet.plan.head)]
    connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
    for node in closet.plan.nodes:
        with closing(closet.client(node)) as client, subprocess.Popen(listening, stdout=subprocess.PIPE) as head:
            port = head.stdout.readline().decode().strip()
            run(client, tiny_image, "python3", "-c", connect, str(closet.plan.head), port)
            assert head.wait(timeout=30) == 0
            assert client.info()["Name"] == node.name
            with pytest.raises(docker.errors.ContainerError, match=r"unreachable|No route"):
                run(client, tiny_image, "python3", "-c", connect, "192.0.2.1", "80", stderr=True)


def test_swarm_overlay_joins_nodes(closet, tiny_image):
    """Containers on different nodes find each other by name on an attachable overlay and talk."""
    first, second = closet.plan.nodes[:2]
    listen = "import socket; s = socket.create_server(('', 9000)); print('ready', flush=True)"
    serve = f"{listen}; s.accept()[0].send(b'hello')"
    ask = "import socket; print(socket.create_connection(('peer', 9000), 10).recv(9).decode())"
    with closing(closet.client(first)) as one, closing(closet.client(second)) as two:
        one.swarm.init(advertise_addr=str(first.address), listen_addr=f"{first.address}:2377")
        try:
            token = one.swarm.attrs["JoinTokens"]["Worker"]
            two.swarm.join([f"{first.address}:2377"], token, advertise_addr=str(second.address))
            ipam = IPAMConfig(pool_configs=[IPAMPool(subnet="10.201.7.0/24")])
            net = one.networks.create("trial", driver="overlay", attachable=True, ipam=ipam)
            with running(two, tiny_image, "python3", "-c", serve, name="peer", network="trial") as peer:
                assert shell.wait_until(lambda: b"ready" in peer.logs(), timeout_s=60)
                assert run(one, tiny_image, "python3", "-c", ask, network="trial") == "hello"
            net.remove()
        finally:
            two.swarm.leave(force=True)
            one.swarm.leave(force=True)


def test_killed_daemon_starts_again(closet, tiny_image):
    """After a SIGKILL of dockerd no process of the node is left, and the next start ends its containers."""
    node = closet.plan.node("rig3")
    with closing(closet.client(node)) as client:
        container = client.containers.run(tiny_image, ["sleep", "600"], detach=True)
        kill_dockerd(closet, node)
        practice_closet.ensure_up(closet.plan, closet.paths)
        container.reload()
        assert container.status == "exited"
        container.start()
        container.remove(force=True)


def test_supervised_daemon_ends_on_sigterm(closet):
    """The supervised command runs in the foreground, and SIGTERM to its one process ends the whole node."""
    node = closet.plan.node("rig3")
    docker_daemons.stop_daemons(closet.plan, [node])
    command = docker_daemons.build_foreground_command(closet.plan, node, closet.paths)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        docker_daemons.wait_ready(closet.plan, closet.paths)
        process.terminate()
        assert process.wait(timeout=60) == 0
    assert docker_daemons.find_processes(closet.plan, node) == {}
    practice_closet.ensure_up(closet.plan, closet.paths)


def test_links_have_the_planned_speed(closet):
    """Both ends of each node's link are shaped to 2.5 Gbit/s."""
    for node in closet.plan.nodes:
        name = closet.plan.netns_name(node)
        outside = shell.run_command(("tc", "qdisc", "show", "dev", name))
        inside = shell.run_command(("tc", "-netns", name, "qdisc", "show", "dev", "eth0"))
        assert "rate 2500Mbit" in outside
        assert "rate 2500Mbit" in inside


def read_identities(closet) -> dict[str, str]:
    identities = {}
    for node in closet.plan.nodes:
        with closing(closet.client(node)) as client:
            identities[node.name] = client.info()["ID"]
    return identities


def test_each_daemon_has_an_identity_of_its_own(closet):
    """Without any file of an earlier start, as on a new machine, and the same one after a restart."""
    docker_daemons.stop_daemons(closet.plan, closet.plan.nodes)
    for node in closet.plan.nodes:
        files = node_paths(closet.paths, node)
        for file in (*files.docker_settings.iterdir(), files.data_root / "engine-id"):
            file.unlink(missing_ok=True)
    machine = Path("/etc/docker/key.json")
    machine_key = machine.read_bytes() if machine.exists() else None
    practice_closet.ensure_up(closet.plan, closet.paths)
    first = read_identities(closet)
    assert len(set(first.values())) == 3
    docker_daemons.stop_daemons(closet.plan, closet.plan.nodes)
    practice_closet.ensure_up(closet.plan, closet.paths)
    assert read_identities(closet) == first
    assert (machine.read_bytes() if machine.exists() else None) == machine_key


def test_down_leaves_nothing_even_of_killed_nodes(closet, tiny_image):
    """Taking down ends containers, swarm and network of nodes that answer and of one that was killed; images stay."""
    with closing(closet.client("rig1")) as one, closing(closet.client("rig2")) as two:
        one.swarm.init(advertise_addr=str(closet.plan.node("rig1").address))
        for client in (one, two):
            client.containers.run(tiny_image, ["sleep", "600"], detach=True)
    node = closet.plan.node("rig2")
    kill_dockerd(closet, node)
    assert lifecycle.find_leftovers(closet.plan, closet.paths) != []
    try:
        lifecycle.ensure_down(closet.plan, closet.paths)
        assert lifecycle.find_leftovers(closet.plan, closet.paths) == []
        assert lifecycle.find_control_groups(closet.plan) == []
        assert not network.has_link(closet.plan.bridge)
    finally:
        practice_closet.ensure_up(closet.plan, closet.paths)
    with closing(closet.client(node)) as client:
        assert client.images.list(tiny_image) != []
        assert client.containers.list(all=True, ignore_removed=True) == []
    layers = [entry.name for entry in (node_paths(closet.paths, node).data_root / "overlay2").iterdir()]
    assert [name for name in layers if name.endswith("-init")] == []
