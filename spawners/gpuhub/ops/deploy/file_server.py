"""The head node as file server (`[storage] serve`): exports, server and packet filter follow cluster.toml.

The kernel's server is used where the kernel has one; otherwise nfs-ganesha serves in user space, kept running by
supervisord.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.head_address import find_head_address
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.deploy.programs import Program, Supervisor
from gpuhub.storage.exports import (
    MARKER,
    ExportList,
    build_table_name,
    find_exports,
    format_exports_file,
    format_firewall,
    format_ganesha_config,
    list_folders,
)
from gpuhub.storage.probe import NfsServer, probe_server

#: The supervised program's name.
FILE_SERVER = "file-server"
EXPORTS_FILE = Path("/etc/exports.d/gpuhub.exports")
_FILE_SYSTEMS = Path("/proc/filesystems")
_COMMAND_S = 60.0
#: Time for a server to answer after its start; a restarted one first waits for its clients (seconds).
_READY_S = 30.0
_POLL_S = 0.2
_INSTALL = (
    "`apt-get install nfs-kernel-server`; where the kernel has no NFS server (`modprobe nfsd` fails), "
    "`apt-get install nfs-ganesha-vfs`"
)

#: Runs a command with a text as its input.
Run = Callable[[list[str], str], None]


def has_kernel_server(file_systems: Path = _FILE_SYSTEMS) -> bool:
    """Return whether the kernel has an NFS server, with the commands for it; loads its module."""
    if shutil.which("exportfs") is None:
        return False
    if shutil.which("modprobe") is not None:
        subprocess.run(["modprobe", "--quiet", "nfsd"], check=False, capture_output=True, timeout=_COMMAND_S)
    return "nfsd" in file_systems.read_text(encoding="ascii").split()


def build_file_server(cluster: ClusterSettings, paths: Paths) -> list[Program]:
    """Write nfs-ganesha's configuration and return it as a program; nothing if the kernel serves, or `serve` is off.

    Raises:
        SetupError: There is no NFS server on this machine.
    """
    exports = find_exports(cluster)
    if not exports.exports or has_kernel_server():
        return []
    program = shutil.which("ganesha.nfsd")
    if program is None:
        raise SetupError(f"storage.serve = true, and this machine has no NFS server: {_INSTALL}")
    folder = paths.state / FILE_SERVER
    folder.mkdir(mode=0o700, exist_ok=True)
    config = folder / "ganesha.conf"
    config.write_text(format_ganesha_config(exports, state=folder, bind=find_head_address(cluster)), encoding="utf-8")
    command = (program, "-F", "-f", str(config), "-L", str(paths.log / f"{FILE_SERVER}-nfs.log"))
    return [
        Program(
            name=FILE_SERVER,
            command=(*command, "-p", str(folder / "pid")),
            directory=folder,
            priority=50,
            stop_wait_s=20,
        )
    ]


def ensure_exports(
    cluster: ClusterSettings,
    paths: Paths,
    supervisor: Supervisor,
    *,
    exports_file: Path = EXPORTS_FILE,
    run: Run | None = None,
) -> None:
    """Serve what the settings say to the nodes that they name, and nothing to others.

    Raises:
        SetupError: The server does not answer, or a command failed.
    """
    run = run or run_command
    exports = find_exports(cluster)
    for folder in list_folders(exports):
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    ensure_firewall(exports, cluster, paths, run)
    if exports.exports and not has_kernel_server():
        _reload_ganesha(supervisor)
    else:
        ensure_exports_file(exports, exports_file, run)
    if exports.exports:
        _wait_for_server(NfsServer(host=find_head_address(cluster), port=exports.port, version=4))


def ensure_exports_file(exports: ExportList, file: Path, run: Run) -> None:
    """Write the kernel server's exports, or remove them, and let it read them if they changed.

    Raises:
        SetupError: The file is not gpuhub's.
    """
    before = file.read_text(encoding="utf-8") if file.exists() else None
    after = format_exports_file(exports) if exports.exports else None
    if before == after:
        return
    if before is not None and not before.startswith(MARKER):
        raise SetupError(f"{file} was not written by gpuhub: move its lines to /etc/exports, and remove it")
    if after is None:
        file.unlink()
    else:
        file.parent.mkdir(exist_ok=True)
        file.write_text(after, encoding="utf-8")
    run(["exportfs", "-ra"], "")


def ensure_firewall(exports: ExportList, cluster: ClusterSettings, paths: Paths, run: Run) -> None:
    """Let only nodes reach the file server; remove the rules where there is none.

    Raises:
        SetupError: nft is missing, or refuses the rules.
    """
    mark = paths.state / f"{FILE_SERVER}.nft"
    wanted = exports if cluster.network.guard else ExportList(exports=(), clients=(), port=exports.port)
    if not wanted.exports and not mark.exists():
        return
    if shutil.which("nft") is None:
        raise SetupError("storage.serve = true: the file server's packet filter needs nft: `apt-get install nftables`")
    run(["nft", "-f", "-"], format_firewall(wanted, paths.instance))
    if wanted.exports:
        mark.write_text(build_table_name(paths.instance), encoding="utf-8")
    else:
        mark.unlink()


def find_export_problems(cluster: ClusterSettings, paths: Paths, exports_file: Path = EXPORTS_FILE) -> list[str]:
    """Return a line for each thing that the server does not export as the settings say."""
    exports = find_exports(cluster)
    if not exports.exports:
        return []
    config = paths.state / FILE_SERVER / "ganesha.conf"
    if has_kernel_server():
        wanted, file = format_exports_file(exports), exports_file
    else:
        head = find_head_address(cluster)
        wanted, file = format_ganesha_config(exports, state=config.parent, bind=head), config
    if not file.exists():
        return [f"nothing is exported: {file} does not exist"]
    text = file.read_text(encoding="utf-8")
    missing = [folder for folder in map(str, list_folders(exports)) if folder not in text]
    absent = [node.name for node in cluster.own_nodes if node.address not in text]
    problems = [f"{folder} is not exported" for folder in missing]
    problems += [f"{', '.join(absent)} may not mount anything"] if absent else []
    return problems or ([] if text == wanted else [f"{file} is not as the settings say"])


def run_command(command: list[str], text: str) -> None:
    """Run a command with a text as its input.

    Raises:
        SetupError: It failed; the text has its output.
    """
    done = subprocess.run(command, input=text, check=False, capture_output=True, text=True, timeout=_COMMAND_S)
    if done.returncode:
        raise SetupError(f"`{' '.join(command)}` failed: {(done.stderr or done.stdout).strip()}")


def _reload_ganesha(supervisor: Supervisor) -> None:
    if supervisor.state(FILE_SERVER) in {"RUNNING", "STARTING"}:
        # It reads its exports again; mounts and locks of other nodes remain.
        supervisor.signal(FILE_SERVER, signal.SIGHUP)
    else:
        supervisor.ensure_started(FILE_SERVER)


def _wait_for_server(server: NfsServer) -> None:
    end = time.monotonic() + _READY_S
    while (problem := probe_server(server, 2.0)) is not None:
        if time.monotonic() > end:
            raise SetupError(f"{problem}. With the kernel's server: `systemctl enable --now nfs-server`")
        time.sleep(_POLL_S)
