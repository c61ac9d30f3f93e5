"""The head node's state is replaced, and what runs on the nodes runs on: by `gpuhub restore` onto an empty head node, and
by an upgrade and its way back.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from gpuhub.common import names, secrets
from gpuhub.common.paths import Paths
from gpuhub.ops.deploy.programs import Supervisor
from tests.support.broker.store_revisions import RELEASED, move_store, read_revision
from tests.support.closet.existing_nodes import INSTANCE, run_gpuhub, write_settings
from tests.support.hub.kernel_client import open_kernel
from tests.support.hub.users import Client, log_in
from tests.support.product import wait_for

HOST = "127.0.0.1:18200"
ADDRESS = f"http://{HOST}"
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


def list_processes() -> list[int]:
    """Return the ids of the head node's processes, supervisord first."""
    supervisor = Supervisor(PATHS)
    pids = [pid for name in supervisor.states() if (pid := supervisor.pid(name))]
    return [int((PATHS.run / "supervisord.pid").read_text()), *pids]


def wait_for_end(pids: list[int]) -> None:
    wait_for(lambda: not any(Path(f"/proc/{pid}/root").exists() for pid in pids), "every process is gone", 20)


def stop_head() -> None:
    """Stop the head node's programs as docs/operations.md does."""
    pids = list_processes()
    program = Path(sys.executable).with_name("supervisorctl")
    subprocess.run([program, "-c", PATHS.run / "supervisord.conf", "shutdown"], check=True)
    wait_for_end(pids)


def lose_head() -> None:
    """Kill every process of the head node, and delete its files other than homes."""
    pids = list_processes()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for_end(pids)
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


def bring_up(cluster_file: Path) -> str:
    """Run `gpuhub up` and return its output."""
    done = run_gpuhub("up", cluster_file)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def list_event_kinds() -> set[str]:
    """Return the kinds of the events that the broker's store has."""
    with closing(sqlite3.connect(PATHS.store)) as database:
        return {kind for (kind,) in database.execute("SELECT kind FROM events")}


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
    bring_up(cluster_file)
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
        bring_up(cluster_file)
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


def test_upgrade_and_its_way_back_end_no_notebook(closet: Any, cluster_file: Path) -> None:
    """A notebook keeps lease, container and variables when the store of the last released version is upgraded, when that
    version's backup is restored, and when it is upgraded again; what started in between ends.
    """
    bring_up(cluster_file)
    with ExitStack() as stack:
        ada = log_in(ADDRESS, "ada", secrets.read_secret(PATHS, secrets.USER_PASSWORD))
        stack.callback(ada.close)
        kept = start(ada, "kept")
        kernel = stack.enter_context(open_kernel(HOST, ada, "kept"))
        kernel.run("answer = 41")
        before = find_containers(closet)

        def check_kept(answer: int) -> None:
            wait_for(lambda: ada.is_ready("kept"), "the notebook is ready", 120)
            wait_for(lambda: answers(ada, "kept"), "the notebook answers through the proxy", 60)
            kernel.reconnect()
            assert kernel.run("answer += 1; print(answer)") == f"{answer}\n"
            lease = read_leases(ada)["kept"]
            assert (lease["id"], lease["gpus"], lease["state"]) == (kept["id"], kept["gpus"], "active")
            assert find_containers(closet)[kept["id"]] == before[kept["id"]]

        stop_head()
        move_store(PATHS.store, RELEASED)
        [backup] = re.findall(r"tables of the databases change .* as they were: (\S+)", bring_up(cluster_file))
        check_kept(42)
        start(ada, "between")
        stop_head()
        done = run_gpuhub("restore", backup, "--replace", "--yes", cluster_file)
        assert done.returncode == 0, done.stdout + done.stderr
        assert read_revision(PATHS.store) == RELEASED
        assert "tables of the databases change" in bring_up(cluster_file)
        check_kept(43)
        wait_for(lambda: set(find_containers(closet)) == {kept["id"]}, lambda: str(find_containers(closet)), 60)
        assert "lease.quarantined" not in list_event_kinds()


def answers(user: Client, server: str) -> bool:
    """Return whether the user's server answers a request through the hub's proxy."""
    web = user.hub.build_request("GET", f"{ADDRESS}/user/{user.name}/{server}/api/status")
    return user.hub.send(web).status_code == 200
