"""The head node is lost: `gpuhub restore` puts its backup onto an empty one, and what runs on the nodes runs on."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common import names, secrets
from gpuhub.common.paths import Paths
from gpuhub.ops.deploy.programs import Supervisor
from tests.support.closet.existing_nodes import INSTANCE, run_gpuhub, write_settings
from tests.support.hub.users import Client, log_in
from tests.support.product import wait_for

ADDRESS = "http://127.0.0.1:18200"
PATHS = Paths(INSTANCE)


@pytest.fixture
def cluster_file(closet: Any, tmp_path: Path) -> Iterator[Path]:
    """Settings of the closet's nodes; what the test leaves is taken down at the end."""
    shutil.rmtree(PATHS.state, ignore_errors=True)
    file = write_settings(closet, tmp_path)
    file.write_text(file.read_text().replace('https = "local"\n', ""))
    yield file
    done = run_gpuhub("down", file)
    assert done.returncode == 0, done.stdout + done.stderr


def lose_head() -> None:
    """Kill every process of the head node, and delete its files other than homes."""
    supervisor = Supervisor(PATHS)
    pids = [pid for name in supervisor.states() if (pid := supervisor.pid(name))]
    own = int((PATHS.run / "supervisord.pid").read_text())
    for pid in (own, *pids):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{pid}/root").exists() for pid in (own, *pids)), "every process is gone", 20)
    for path in PATHS.state.iterdir():
        if path.name not in {"homes", "images"}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for folder in (PATHS.run, PATHS.log):
        shutil.rmtree(folder)


def find_containers(closet: Any) -> dict[str, tuple[str, str]]:
    """Return node and start of the notebooks on all nodes by their lease."""
    found = {}
    labels = [f"{names.LABEL_INSTANCE}={INSTANCE}", names.LABEL_LEASE]
    for node in closet.plan.nodes:
        with closing(closet.client(node)) as client:
            for container in client.containers.list(all=True, ignore_removed=True, filters={"label": labels}):
                state = container.attrs["State"]
                found[container.labels[names.LABEL_LEASE]] = (node.name, f"{container.id} {state['StartedAt']}")
    return found


def read_leases(user: Client) -> dict[str, dict[str, Any]]:
    """Return a user's leases by the name of the server."""
    status, leases = user.ask(user.broker, "GET", "/leases")
    assert status == 200
    return {lease["subject"]: lease for lease in leases}


def start(user: Client, server: str) -> dict[str, Any]:
    user.start(server, "gpu")
    wait_for(lambda: user.is_ready(server), f"{server} is ready", 120)
    return read_leases(user)[server]


def test_empty_head_takes_over_running_notebooks(
    closet: Any, cluster_file: Path, tmp_path: Path, record_property: Any
) -> None:
    """A notebook that ran at the backup answers again, in the same container and under the same lease; what changed
    since is settled: a lease that ended is over, and a container that nobody knows is removed before its GPU is
    granted.
    """
    done = run_gpuhub("up", cluster_file)
    assert done.returncode == 0, done.stdout + done.stderr
    file = tmp_path / "head.backup"
    (tmp_path / "passphrase").write_text("four plain words here\n")
    (tmp_path / "passphrase").chmod(0o600)
    phrase = ("--passphrase-file", tmp_path / "passphrase")
    with ExitStack() as stack:
        ada = log_in(ADDRESS, "ada", secrets.read_secret(PATHS, secrets.USER_PASSWORD))
        stack.callback(ada.close)
        kept = start(ada, "kept")
        start(ada, "ended")
        done = run_gpuhub("backup", file, *phrase, cluster_file)
        assert done.returncode == 0, done.stdout + done.stderr
        ada.stop("ended")
        wait_for(lambda: set(read_leases(ada)) == {"kept"}, "the second lease has ended", 60)
        later = start(ada, "later")
        assert later["gpus"] != kept["gpus"]
        before = find_containers(closet)
        assert set(before) == {kept["id"], later["id"]}
        lose_head()
        cluster_file.unlink()
        assert find_containers(closet) == before, "nodes do not need the head node"

        began = time.monotonic()
        done = run_gpuhub("restore", file, *phrase, "--yes", cluster_file)
        assert done.returncode == 0, done.stdout + done.stderr
        done = run_gpuhub("up", cluster_file)
        assert done.returncode == 0, done.stdout + done.stderr
        # The token is of before the loss.
        wait_for(lambda: ada.is_ready("kept"), "the notebook is ready", 120)
        wait_for(lambda: answers(ada, "kept"), "the notebook answers through the proxy", 60)
        seconds = time.monotonic() - began
        print(f"recover.head_s {seconds:.1f} s")
        record_property("figure.head_s", seconds)

        wait_for(lambda: set(find_containers(closet)) == {kept["id"]}, lambda: str(find_containers(closet)), 60)
        assert find_containers(closet)[kept["id"]] == before[kept["id"]]
        wait_for(lambda: set(read_leases(ada)) == {"kept"}, lambda: str(read_leases(ada)), 60)
        restored = read_leases(ada)["kept"]
        assert (restored["id"], restored["gpus"], restored["state"]) == (kept["id"], kept["gpus"], "active")
        # Both other GPUs are free, and used by one container each.
        fresh = [start(ada, "fresh"), start(ada, "another")]
        uuids = [gpu["uuid"] for lease in (kept, *fresh) for gpu in lease["gpus"]]
        assert len(set(uuids)) == len(uuids) == 3
        assert set(find_containers(closet)) == {kept["id"], *(lease["id"] for lease in fresh)}


def answers(user: Client, server: str) -> bool:
    """Return whether the user's server answers a request through the hub's proxy."""
    web = user.hub.build_request("GET", f"{ADDRESS}/user/{user.name}/{server}/api/status")
    return user.hub.send(web).status_code == 200
