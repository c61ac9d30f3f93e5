"""Setup and removal of a practice closet on this machine, and the search for leftovers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import docker
import requests

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.common.required_programs import find_missing_packages
from gpuhub_closet import docker_daemons, driver, gpu_state, network, real_gpus
from gpuhub_closet.paths import cgroup_name, node_paths, run_folder
from gpuhub_closet.slurm import slurm_daemons
from gpuhub_closet.topology import ClosetNode, ClosetPlan

_CGROUPS = Path("/sys/fs/cgroup")
_MOUNTS = Path("/proc/self/mountinfo")


def prepare_closet(plan: ClosetPlan, paths: Paths) -> None:
    """Make everything except the daemons: network, driver, GPUs, hooks; safe to call again at any time.

    Raises:
        SetupError: The caller is not root, a program is not installed, or a file of Docker's settings is broken.
    """
    _check_machine()
    compiled = driver.ensure_driver(paths)
    for node in plan.nodes:
        files = node_paths(paths, node)
        files.run.mkdir(parents=True, exist_ok=True)
        files.docker_settings.mkdir(mode=0o700, parents=True, exist_ok=True)
        # With CDI, newer Docker Engines prefer the machine's own GPUs to the node's hook.
        toolkit = real_gpus.read_daemon_settings() if node.real_gpus else {"features": {"cdi": False}}
        files.daemon_file.write_text(json.dumps({"dns": [str(plan.head)], **toolkit}) + "\n")
        gpu_state.ensure_gpus(plan, node, paths)
        if node.real_gpus:
            # The daemon finds NVIDIA's own hook on the rest of its PATH.
            shutil.rmtree(files.toolkit, ignore_errors=True)
        else:
            driver.install_hook(files, compiled)
    run_folder(paths).chmod(0o755)
    network.ensure_network(plan)
    network.ensure_dns(plan, paths)


def ensure_down(plan: ClosetPlan, paths: Paths, *, purge: bool = False) -> None:
    """Remove the closet from this machine; images stay for a quick next start, unless `purge` is set.

    A supervisor of the daemons must have been stopped before.
    """
    answering = [node for node in plan.nodes if docker_daemons.is_answering(node, paths)]
    if answering:
        with ThreadPoolExecutor(len(answering)) as pool:
            list(pool.map(lambda node: clean_daemon(node, paths), answering))
    # Slurm first: its jobs run in the nodes' networks.
    slurm_daemons.stop_daemons(plan, paths)
    docker_daemons.stop_daemons(plan, plan.nodes)
    network.stop_dns(paths)
    network.remove_network(plan)
    remove_control_groups(plan)
    for node in plan.nodes:
        clean_data(node, paths)
    shutil.rmtree(run_folder(paths), ignore_errors=True)
    with suppress(OSError):  # other parts of the instance may still use it
        paths.run.rmdir()
    if purge:
        shutil.rmtree(paths.closet, ignore_errors=True)


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise SetupError("the practice closet makes network namespaces and needs root: run it with sudo")
    missing = find_missing_packages({"closet"})
    if missing:
        raise SetupError(f"the practice closet needs programs that are missing: apt-get install {' '.join(missing)}")


def find_leftovers(plan: ClosetPlan, paths: Paths) -> list[str]:
    """Return a line for each thing of the closet that is still on this machine, except images for the next start."""
    names = (
        [] if network.find_dns_process(paths) is None else [f"name server, process {network.find_dns_process(paths)}"]
    )
    names += slurm_daemons.find_leftovers(paths)
    return sorted(
        {*names, *_find_processes(plan), *_find_network(plan), *_find_mounts(plan, paths), *_find_files(plan, paths)}
    )


def _find_processes(plan: ClosetPlan) -> Iterator[str]:
    for node in plan.nodes:
        for pid, name in docker_daemons.find_processes(plan, node).items():
            yield f"process {pid} ({name}) of {node.name}"


def _find_network(plan: ClosetPlan) -> Iterator[str]:
    for node in plan.nodes:
        if network.has_netns(plan, node):
            yield f"network namespace {plan.netns_name(node)}"
    for link in (plan.bridge, *(plan.netns_name(node) for node in plan.nodes)):
        if network.has_link(link):
            yield f"network interface {link}"
    if network.has_forward_rule(plan):
        yield f"firewall rule for {plan.bridge}"


def _find_mounts(plan: ClosetPlan, paths: Paths) -> Iterator[str]:
    names = {str(network.NETNS_FOLDER / plan.netns_name(node)) for node in plan.nodes}
    folders = (f"{run_folder(paths)}/", f"{paths.closet}/")
    for line in _MOUNTS.read_text().splitlines():
        point = line.split(" ")[4]
        if point in names or point.startswith(folders):
            yield f"mount {point}"


def _find_files(plan: ClosetPlan, paths: Paths) -> Iterator[str]:
    if run_folder(paths).exists():
        yield f"folder {run_folder(paths)}"
    for group in find_control_groups(plan):
        yield f"control group {group}"
    for node in plan.nodes:
        root = node_paths(paths, node).data_root
        for container in _entries(root / "containers"):
            yield f"container {container.name[:12]} on {node.name}"
        if (root / "swarm/docker-state.json").exists():
            yield f"swarm membership of {node.name}"


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def find_control_groups(plan: ClosetPlan) -> list[Path]:
    """Return the control groups of the closet, in every hierarchy."""
    name = cgroup_name(plan.instance)
    return [group for group in (_CGROUPS / name, *_CGROUPS.glob(f"*/{name}")) if group.is_dir()]


def clean_daemon(node: ClosetNode, paths: Paths) -> None:
    """Let a daemon remove its containers and networks and leave its Swarm; `clean_data` removes what this cannot."""
    files = node_paths(paths, node)
    failures = (docker.errors.DockerException, requests.RequestException)
    with closing(docker.APIClient(base_url=files.docker_url, timeout=20, version="auto")) as client:
        with suppress(*failures):
            for container in client.containers(all=True):
                client.remove_container(container["Id"], force=True)
        with suppress(*failures):
            client.leave_swarm(force=True)
        with suppress(*failures):
            client.prune_networks()


def clean_data(node: ClosetNode, paths: Paths) -> None:
    """Remove containers, networks and Swarm from the files of a daemon that does not run, and keep its images."""
    root = node_paths(paths, node).data_root
    for container in _entries(root / "containers"):
        _remove_layer(root, container.name)
        shutil.rmtree(container)
    for folder in (root / "swarm", root / "network"):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_layer(root: Path, container: str) -> None:
    """Remove a container's writable layer (overlay2; with other storage drivers the space is lost until a purge)."""
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


def remove_control_groups(plan: ClosetPlan) -> None:
    """Remove the closet's empty control groups, the innermost first."""
    for group in find_control_groups(plan):
        inner = sorted((entry for entry in group.rglob("*") if entry.is_dir()), reverse=True)
        for folder in (*inner, group):
            folder.rmdir()
