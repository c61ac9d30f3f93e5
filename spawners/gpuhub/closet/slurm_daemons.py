"""The daemons of the closet's Slurm: what a supervisor runs, waiting for them, and ending them with their jobs.

They must know the closet's users, who have no accounts on this machine: they run in mount namespaces of their own,
where a folder of ours lies over /etc. By that their processes are known, jobs' among them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

from gpuhub.closet import shell
from gpuhub.closet.places import slurm_folder
from gpuhub.closet.plan import Plan
from gpuhub.closet.slurm import REST_USER, build_files, etc_folder, head_name, key_file, marker, rest_socket
from gpuhub.errors import SetupError
from gpuhub.paths import Paths

MUNGED = "munged"
SLURMCTLD = "slurmctld"
SLURMRESTD = "slurmrestd"
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_LOG_LINES = 15

# A supervisor's umask would keep users out of their own jobs' folders. A file bound over /etc/passwd would be lost as
# soon as somebody on this machine adds an account: the machine's is replaced then, and the mount goes with it.
_START = """\
umask 022
mount -t overlay -o "ro,lowerdir=$1:/etc" closet /etc
[ -z "$2" ] || hostname "$2"
shift 2
exec "$@"
"""


def build_command(plan: Plan, paths: Paths, program: str, *, forget: bool = False) -> list[str]:
    """What a supervisor runs in the foreground: `munged`, `slurmctld`, `slurmrestd` or, by its name, a node's slurmd.

    `forget`: slurmctld drops the jobs of an earlier closet, and goes on counting where it was. SIGTERM or SIGKILL ends
    the daemon only: jobs go on. `SLURM_CONF` must be set.
    """
    folder = slurm_folder(paths)
    if program == MUNGED:
        at = folder / "munge"
        files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={at}/munge.{end}" for option, end in files.items()]
        return [*_inside(paths), MUNGED, "--foreground", f"--key-file={key_file(paths)}", *options]
    if program == SLURMCTLD:
        return [*_inside(paths, hostname=head_name(plan)), SLURMCTLD, "-D", *(["-c"] if forget else [])]
    if program == SLURMRESTD:
        number = REST_USER.uid
        become = ["setpriv", f"--reuid={number}", f"--regid={number}", "--clear-groups", "env", "SLURM_JWT=daemon"]
        listen = ["slurmrestd", "-a", "rest_auth/jwt", "-s", "openapi/v0.0.38", f"unix:{rest_socket(paths)}"]
        return [*_inside(paths), *become, *listen]
    node = plan.node(program)
    return [
        *("nsenter", f"--net=/run/netns/{plan.netns(node)}"),
        *_inside(paths, hostname=node.name),
        *("slurmd", "-D", "-N", node.name),
    ]


def _inside(paths: Paths, hostname: str = "") -> list[str]:
    own = ["unshare", "--mount", "--propagation", "slave", *(["--uts"] if hostname else [])]
    return [*own, "sh", "-euc", _START, "sh", str(etc_folder(paths)), hostname]


def wait_ready(plan: Plan, paths: Paths, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Return when slurmctld answers and has heard of every node; SetupError with the end of its log otherwise."""
    if not shell.wait_until(lambda: not silent_nodes(plan, paths), timeout_s=timeout_s, interval_s=0.2):
        log = paths.log / f"{SLURMCTLD}.log"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]) if log.exists() else ""
        silent = ", ".join(silent_nodes(plan, paths))
        raise SetupError(
            f"the practice closet's Slurm is not ready after {timeout_s:.0f} s: nothing was heard of {silent}; "
            f"the end of {log}:\n{tail}"
        )


def silent_nodes(plan: Plan, paths: Paths) -> list[str]:
    """Nodes of which slurmctld has heard nothing lately; all of them while it does not answer itself."""
    environment = {**os.environ, "SLURM_CONF": str(build_files(plan, paths).conf)}
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%N %T"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    states = dict(line.split() for line in done.stdout.splitlines()) if done.returncode == 0 else {}
    return [node.name for node in plan.nodes if not is_heard(states.get(node.name, ""))]


def is_heard(state: str) -> bool:
    """Whether sinfo's word for a node's state, such as `idle`, `down*` or `unknown`, means that its slurmd answers."""
    return bool(state) and not state.endswith("*") and state not in {"unknown", "down"}


def processes(paths: Paths) -> dict[int, str]:
    """The processes of the closet's Slurm, jobs' among them (process id → name)."""
    mark = Path("root/etc", marker(paths).name)
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it ended while it was looked at
            if (entry / mark).exists():
                found[int(entry.name)] = (entry / "comm").read_text().strip()
    return found


def stop(plan: Plan, paths: Paths) -> None:
    """End all of it, jobs too, and remove all but what makes numbers go on; a supervisor must have been stopped."""
    if not shell.wait_until(lambda: not _kill(paths), timeout_s=STOP_TIMEOUT_S):
        raise SetupError("\n".join(["these of the closet's Slurm do not end:", *leftovers(paths)]))
    folder = slurm_folder(paths)
    kept = {build_files(plan, paths).state, etc_folder(paths), key_file(paths)}
    for entry in set(folder.iterdir()) - kept if folder.is_dir() else ():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _kill(paths: Paths) -> bool:
    """Whether there was anything to end."""
    found = processes(paths)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def leftovers(paths: Paths) -> list[str]:
    """What of it still runs on this machine, one line each."""
    return [f"process {pid} ({name}) of Slurm" for pid, name in processes(paths).items()]
