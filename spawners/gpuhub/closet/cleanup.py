"""What a closet leaves behind: finding it, and removing what the daemons themselves could not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import docker
import requests

from gpuhub.closet import daemons, dns, network, slurm_daemons
from gpuhub.closet.places import cgroup, node_places, run_folder
from gpuhub.closet.plan import ClosetNode, Plan
from gpuhub.paths import Paths

_CGROUPS = Path("/sys/fs/cgroup")
_MOUNTS = Path("/proc/self/mountinfo")


def leftovers(plan: Plan, paths: Paths) -> list[str]:
    """What of the closet is still on this machine, one line each; images kept for the next start don't count."""
    names = [] if dns.running(paths) is None else [f"name server, process {dns.running(paths)}"]
    names += slurm_daemons.leftovers(paths)
    return sorted({*names, *_processes(plan), *_network(plan), *_mounts(plan, paths), *_files(plan, paths)})


def _processes(plan: Plan) -> Iterator[str]:
    for node in plan.nodes:
        for pid, name in daemons.processes(plan, node).items():
            yield f"process {pid} ({name}) of {node.name}"


def _network(plan: Plan) -> Iterator[str]:
    for node in plan.nodes:
        if network.has_netns(plan, node):
            yield f"network namespace {plan.netns(node)}"
    for link in (plan.bridge, *(plan.netns(node) for node in plan.nodes)):
        if network.has_link(link):
            yield f"network interface {link}"
    if network.has_forward_rule(plan):
        yield f"firewall rule for {plan.bridge}"


def _mounts(plan: Plan, paths: Paths) -> Iterator[str]:
    names = {str(network.NETNS_FOLDER / plan.netns(node)) for node in plan.nodes}
    folders = (f"{run_folder(paths)}/", f"{paths.closet}/")
    for line in _MOUNTS.read_text().splitlines():
        point = line.split(" ")[4]
        if point in names or point.startswith(folders):
            yield f"mount {point}"


def _files(plan: Plan, paths: Paths) -> Iterator[str]:
    if run_folder(paths).exists():
        yield f"folder {run_folder(paths)}"
    for group in control_groups(plan):
        yield f"control group {group}"
    for node in plan.nodes:
        root = node_places(paths, node).data_root
        for container in _entries(root / "containers"):
            yield f"container {container.name[:12]} on {node.name}"
        if (root / "swarm/docker-state.json").exists():
            yield f"swarm membership of {node.name}"


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def control_groups(plan: Plan) -> list[Path]:
    """The control groups of the closet, in every hierarchy."""
    name = cgroup(plan.instance)
    return [group for group in (_CGROUPS / name, *_CGROUPS.glob(f"*/{name}")) if group.is_dir()]


def clear_daemon(node: ClosetNode, paths: Paths) -> None:
    """Have a daemon remove its containers and networks and leave its swarm; what fails is left to `clear_data`."""
    places = node_places(paths, node)
    failures = (docker.errors.DockerException, requests.RequestException)
    with closing(docker.APIClient(base_url=places.docker_url, timeout=20, version="auto")) as client:
        with suppress(*failures):
            for container in client.containers(all=True):
                client.remove_container(container["Id"], force=True)
        with suppress(*failures):
            client.leave_swarm(force=True)
        with suppress(*failures):
            client.prune_networks()


def clear_data(node: ClosetNode, paths: Paths) -> None:
    """Remove containers, networks and swarm from the files of a daemon that is not running, and keep its images."""
    root = node_places(paths, node).data_root
    for container in _entries(root / "containers"):
        _remove_layer(root, container.name)
        shutil.rmtree(container)
    for folder in (root / "swarm", root / "network"):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_layer(root: Path, container: str) -> None:
    """Remove a container's writable layer (overlay2; other storage drivers only waste the space until a purge)."""
    mount = root / "image/overlay2/layerdb/mounts" / container
    for name in ("mount-id", "init-id"):
        file = mount / name
        if file.is_file():
            layer = root / "overlay2" / file.read_text().strip()
            link = layer / "link"
            if link.is_file():
                (root / "overlay2/l" / link.read_text().strip()).unlink(missing_ok=True)
            shutil.rmtree(layer, ignore_errors=True)
    shutil.rmtree(mount, ignore_errors=True)


def remove_control_groups(plan: Plan) -> None:
    """Remove the closet's empty control groups, the innermost first."""
    for group in control_groups(plan):
        inner = sorted((entry for entry in group.rglob("*") if entry.is_dir()), reverse=True)
        for folder in (*inner, group):
            folder.rmdir()
