"""Setting up and taking down a practice closet: what the command line and the tests call."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from gpuhub.closet import cards, cleanup, daemons, dns, driver, network, slurm_daemons
from gpuhub.closet.cleanup import leftovers
from gpuhub.closet.cluster_file import write_cluster_file
from gpuhub.closet.daemons import dockerd_command, wait_ready
from gpuhub.closet.places import node_places, run_folder
from gpuhub.closet.plan import Plan
from gpuhub.errors import SetupError
from gpuhub.paths import Paths

__all__ = [
    "dockerd_command",
    "ensure_down",
    "ensure_up",
    "leftovers",
    "prepare",
    "wait_ready",
    "write_cluster_file",
]

#: Program → the Debian package that brings it.
_PROGRAMS = {
    "dockerd": "docker.io",
    "dnsmasq": "dnsmasq-base",
    "docker-init": "docker.io",
    "ip": "iproute2",
    "tc": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "flock": "util-linux",
    "hostname": "hostname",
}


def prepare(plan: Plan, paths: Paths) -> None:
    """Make everything but the daemons: network, driver, cards, hooks; may be called again at any time.

    Raises:
        SetupError: when this is not run by root, or something is not installed.
    """
    _check_machine()
    compiled = driver.ensure_driver(paths)
    for node in plan.nodes:
        places = node_places(paths, node)
        places.run.mkdir(parents=True, exist_ok=True)
        places.state.mkdir(parents=True, exist_ok=True)
        places.daemon_file.write_text(json.dumps({"dns": [str(plan.head)]}) + "\n")
        cards.ensure_cards(plan, node, paths)
        driver.install_hook(places, compiled)
    run_folder(paths).chmod(0o755)
    network.ensure_network(plan)
    dns.ensure_dns(plan, paths)


def ensure_up(plan: Plan, paths: Paths) -> None:
    """Have the whole closet run without a supervisor, and return when all daemons answer."""
    prepare(plan, paths)
    for node in plan.nodes:
        if not daemons.processes(plan, node):
            daemons.start(plan, node, paths)
    wait_ready(plan, paths)


def ensure_down(plan: Plan, paths: Paths, *, purge: bool = False) -> None:
    """Remove the closet from this machine; images stay for a quick next start unless `purge`.

    A supervisor of the daemons must have been stopped, or at least told to leave them, before.
    """
    answering = [node for node in plan.nodes if daemons.is_answering(node, paths)]
    if answering:
        with ThreadPoolExecutor(len(answering)) as pool:
            list(pool.map(lambda node: cleanup.clear_daemon(node, paths), answering))
    # The jobs of its Slurm run in the nodes' networks.
    slurm_daemons.stop(plan, paths)
    daemons.stop(plan, plan.nodes)
    dns.stop_dns(paths)
    network.remove_network(plan)
    cleanup.remove_control_groups(plan)
    for node in plan.nodes:
        cleanup.clear_data(node, paths)
    shutil.rmtree(run_folder(paths), ignore_errors=True)
    with suppress(OSError):  # other parts of the instance may still be there
        paths.run.rmdir()
    if purge:
        shutil.rmtree(paths.closet, ignore_errors=True)


def _check_machine() -> None:
    if os.geteuid() != 0:
        raise SetupError("the practice closet makes network namespaces and must be run by root: use sudo")
    missing = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        raise SetupError(f"the practice closet needs programs that are missing: apt-get install {' '.join(missing)}")
