"""The daemons of the closet's Slurm: their commands, waiting until they answer, and stopping them with their jobs.

The daemons must know the closet's users, who have no accounts on this machine. They run in mount namespaces of their
own, where a folder of the closet is mounted over /etc; this mount also identifies their processes and those of jobs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub_closet import shell
from gpuhub_closet.paths import slurm_folder
from gpuhub_closet.slurm.slurm_setup import (
    REST_USER,
    build_slurm_config,
    closet_marker,
    etc_folder,
    head_name,
    key_file,
    rest_socket,
)
from gpuhub_closet.topology import ClosetPlan

MUNGED = "munged"
SLURMCTLD = "slurmctld"
SLURMRESTD = "slurmrestd"
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_LOG_LINES = 15

# With a supervisor's umask, users could not enter their own jobs' folders. All of /etc is an overlay: a mount over the
# file /etc/passwd would be lost when an account is added to this machine, because the file is replaced then.
_START = """\
umask 022
mount -t overlay -o "ro,lowerdir=$1:/etc" closet /etc
[ -z "$2" ] || hostname "$2"
shift 2
exec "$@"
"""


def build_command(plan: ClosetPlan, paths: Paths, program: str, *, drop_jobs: bool = False) -> list[str]:
    """Return the command that a supervisor runs in the foreground; SIGTERM and SIGKILL end the daemon, but not jobs.

    `SLURM_CONF` must be set.

    Args:
        program: `munged`, `slurmctld`, `slurmrestd`, or a node's name for its slurmd.
        drop_jobs: slurmctld drops the jobs of an earlier closet, and continues its numbers of jobs.
    """
    folder = slurm_folder(paths)
    if program == MUNGED:
        munge_folder = folder / "munge"
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={munge_folder}/munge.{end}" for option, end in files.items()]
        return [*_inside(paths), MUNGED, "--foreground", f"--key-file={key_file(paths)}", *options]
    if program == SLURMCTLD:
        return [*_inside(paths, hostname=head_name(plan)), SLURMCTLD, "-D", *(["-c"] if drop_jobs else [])]
    if program == SLURMRESTD:
        number = REST_USER.uid
        become = ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups", "env", "SLURM_JWT=daemon"]
        listen = ["slurmrestd", "-a", "rest_auth/jwt", "-s", "openapi/v0.0.38", f"unix:{rest_socket(paths)}"]
        return [*_inside(paths), *become, *listen]
    node = plan.node(program)
    return [
        *("nsenter", f"--net=/run/netns/{plan.netns_name(node)}"),
        *_inside(paths, hostname=node.name),
        *("slurmd", "-D", "-N", node.name),
    ]


def _inside(paths: Paths, hostname: str = "") -> list[str]:
    own = ["unshare", "--mount", "--propagation", "slave", *(["--uts"] if hostname else [])]
    return [*own, "sh", "-euc", _START, "sh", str(etc_folder(paths)), hostname]


def wait_ready(plan: ClosetPlan, paths: Paths, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Return when slurmctld answers and every node has registered with it.

    Raises:
        SetupError: This takes too long; the text has the end of slurmctld's log.
    """
    if not shell.wait_until(lambda: not find_silent_nodes(plan, paths), timeout_s=timeout_s, interval_s=0.2):
        log = paths.log / f"{SLURMCTLD}.log"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]) if log.exists() else ""
        silent = ", ".join(find_silent_nodes(plan, paths))
        raise SetupError(
            f"the practice closet's Slurm is not ready after {timeout_s:.0f} s: these nodes did not register: "
            f"{silent}; the end of {log}:\n{tail}"
        )


def find_silent_nodes(plan: ClosetPlan, paths: Paths) -> list[str]:
    """Return the nodes that do not answer slurmctld; all of them while it does not answer itself."""
    environment = {**os.environ, "SLURM_CONF": str(build_slurm_config(plan, paths).conf)}
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%N %T"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    states = dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}
    return [node.name for node in plan.nodes if not is_answering_state(states.get(node.name, ""))]


def is_answering_state(state: str) -> bool:
    """Return whether a node's slurmd answers in a state of sinfo such as `idle`, `down*` or `unknown`."""
    return bool(state) and not state.endswith("*") and state not in {"unknown", "down"}


def find_processes(paths: Paths) -> dict[int, str]:
    """Return the processes of the closet's Slurm and its jobs (process id → name)."""
    mark = Path("root/etc", closet_marker(paths).name)
    processes = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it has ended in the meantime
            if (entry / mark).exists():
                processes[int(entry.name)] = (entry / "comm").read_text().strip()
    return processes


def stop_daemons(plan: ClosetPlan, paths: Paths) -> None:
    """End the daemons and their jobs, and remove their files, except the ones that continue the numbers of jobs.

    A supervisor of the daemons must have been stopped before.
    """
    if not shell.wait_until(lambda: not _kill(paths), timeout_s=STOP_TIMEOUT_S):
        raise SetupError("\n".join(["these processes of the closet's Slurm do not end:", *find_leftovers(paths)]))
    folder = slurm_folder(paths)
    kept_files = {build_slurm_config(plan, paths).state, etc_folder(paths), key_file(paths)}
    for entry in set(folder.iterdir()) - kept_files if folder.is_dir() else ():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _kill(paths: Paths) -> bool:
    """Kill the processes of the closet's Slurm, and return whether there were any."""
    processes = find_processes(paths)
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(processes)


def find_leftovers(paths: Paths) -> list[str]:
    """Return a line for each process of it that still runs on this machine."""
    return [f"process {pid} ({name}) of Slurm" for pid, name in find_processes(paths).items()]
