"""The image file that Apptainer runs on the nodes: made of the notebook image, copied to all nodes, and tried there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpuhub.common.errors import GpuhubError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, NodeSettings
from gpuhub.docker.client import DockerClients
from gpuhub.docker.ssh import REMOTE_SOCKET
from gpuhub.ops.console import OperatorConsole
from gpuhub.ops.images import distribution
from gpuhub.ops.images.progress import ProgressCallback
from gpuhub.ops.slurm.machines import HEAD, ScriptRunner, SlurmMachine, on_all, open_machines

#: File in the folder of the images: what the image file was made from.
_RECORD_FILE = "apptainer.json"
#: Time limit of a checksum on a slow disk, seconds.
_CHECKSUM_S = 900.0
#: Minimum speed of a copy that its time limit assumes, bytes per second.
_BYTES_PER_S = 2_000_000
#: Digits of a checksum that tables show.
_DIGITS = 12
#: $1: the image file.
_READ = """\
[ -e "$1" ] || exit 0
stat -L -c %s "$1"
sha256sum <"$1" | cut -c 1-64
"""
#: The copy on standard input becomes $1 if its checksum is $2. Login shells of any kind pass it on to `sh -c`.
_RECEIVE = (
    'set -eu; umask 022; folder=$(dirname "$1"); mkdir -p "$folder"; '
    # Remove what is left of copies that broke off.
    'find "$folder" -maxdepth 1 -name "$(basename "$1").*.partial" -mmin +1440 -delete; '
    'partial=$(mktemp "$1.XXXXXXXX.partial"); trap "rm -f $partial" EXIT; cat >"$partial"; '
    '[ "$(sha256sum <"$partial" | cut -c 1-64)" = "$2" ] || { echo "the copy is incomplete" >&2; exit 1; }; '
    'chmod 644 "$partial"; mv -f "$partial" "$1"'
)
#: $1: the image file. It is tried as `nobody`, with the options of jobs, and the PATH of their scripts.
_TRY = """\
PATH=/usr/local/bin:/usr/bin:/bin
cd /
command -v apptainer >/dev/null || { echo "there is no apptainer in $PATH: install Apptainer" >&2; exit 1; }
apptainer version
output=$(HOME=/ timeout 120 setpriv --reuid=65534 --regid=65534 --clear-groups apptainer exec --containall --cleanenv \\
    --no-privs --no-home --pwd / "$1" sh -c 'command -v python3 && command -v jupyterhub-singleuser' 2>&1) || {
    echo "Apptainer cannot run $1, or it lacks python3 or jupyterhub-singleuser:" \\
        $(printf '%s\\n' "$output" | tail -n 3) >&2
    exit 1
}
case $output in *"temporary sandbox"*)
    echo "Apptainer would unpack the image at each start: install squashfuse, and let users open /dev/fuse (0666)" >&2
    exit 1 ;;
esac
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeImageFile:
    """The image file on a node, and whether Apptainer runs it there."""

    node: str
    #: Size of the image file, bytes; 0 if it is missing.
    size: int = 0
    sha256: str = ""
    #: Apptainer's version; empty if it cannot run the image.
    version: str = ""
    #: Why users could start nothing there; empty if they can.
    problem: str = ""


async def build_image_file(
    cluster: ClusterSettings, paths: Paths, source: Path, progress: ProgressCallback, *, refresh: bool
) -> str:
    """Build the notebook image with this machine's Docker where it is missing, and make the image file of it.

    Args:
        source: The root of gpuhub's source tree.
        refresh: Build all images again, with Debian's current packages.

    Returns:
        A line for the administrator.

    Raises:
        GpuhubError: A step failed; the text names what to install or repair.
    """
    file = find_image_path(cluster)
    _require_apptainer()
    head = NodeSettings(name=HEAD, address="127.0.0.1", docker=f"unix://{REMOTE_SOCKET}")
    daemons = DockerClients((head,), instance=paths.instance, run_dir=paths.run)
    try:
        alone = cluster.model_copy(update={"nodes": (head,)})
        images = await distribution.build(daemons, alone, paths, source, refresh=refresh, progress=progress)
    finally:
        daemons.close()
    notebook, record = images[0], paths.images / _RECORD_FILE
    if file.exists() and _read_record(record) == {"image": notebook.id, "sha256": hash_file(file)}:
        return f"{file} is current."
    convert_image(f"docker-daemon:{notebook.name}", file, paths.images)
    record.write_text(json.dumps({"image": notebook.id, "sha256": hash_file(file)}), encoding="utf-8")
    return f"Built: {file} ({file.stat().st_size / 1e9:.1f} GB). `gpuhub image push` copies it to the nodes."


def find_image_path(cluster: ClusterSettings) -> Path:
    """Return the path of the image file, which is the same on all machines.

    Raises:
        SetupError: The nodes run no image file.
    """
    if cluster.slurm.image is None:
        raise SetupError("[slurm] of cluster.toml has no image")
    return cluster.slurm.image


def _require_apptainer() -> None:
    if shutil.which("apptainer") is None:
        raise SetupError("Apptainer is missing on this machine: install it, as on the nodes (docs/slurm.md)")


def _read_record(file: Path) -> object:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def convert_image(source: str, file: Path, work: Path) -> None:
    """Make an image file that all users can read of a source that Apptainer knows; a file that exists is replaced.

    Args:
        work: A folder with space for the unpacked image.

    Raises:
        SetupError: Apptainer fails; the text has its last lines.
    """
    if not file.parent.is_dir():
        raise SetupError(f"the folder {file.parent} of slurm.image is missing on this machine: create or mount it")
    with tempfile.TemporaryDirectory(dir=work) as folder, tempfile.TemporaryDirectory(dir=file.parent) as new:
        environment = {**os.environ, "APPTAINER_TMPDIR": folder, "APPTAINER_CACHEDIR": folder}
        partial_file = Path(new) / file.name
        done = subprocess.run(
            ["apptainer", "--quiet", "build", str(partial_file), source],
            check=False,
            capture_output=True,
            text=True,
            env=environment,
        )
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()[-3:]
            raise SetupError(f"apptainer could not make {file} of {source}: {' '.join(lines)}")
        partial_file.chmod(0o644)
        partial_file.replace(file)


def hash_file(file: Path) -> str:
    """Return the SHA-256 checksum of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def push_image_file(
    cluster: ClusterSettings, paths: Paths, console: OperatorConsole, head: ScriptRunner, *, yes: bool
) -> None:
    """Copy the image file of this machine to each node that lacks it, and try it there.

    A node that has the same file, such as on a shared file system, gets no copy.

    Args:
        head: The head node.
        yes: Host keys of new machines are accepted without a question.

    Raises:
        GpuhubError: The file is missing here, or users could not start it on a node; the text names each node.
    """
    file = find_image_path(cluster)
    if not file.is_file():
        raise SetupError(f"{file} is missing on this machine: `gpuhub image build` makes it, or copy your own there")
    sha256 = hash_file(file)
    results = _on_nodes(cluster, paths, console, head, partial(send_image_file, file=file, sha256=sha256), yes=yes)
    for result in results:
        console.write(_format_line(result))
    _require_all(results, sha256)


def list_image_files(cluster: ClusterSettings, paths: Paths, console: OperatorConsole, head: ScriptRunner) -> None:
    """Show the image file of each node, and whether Apptainer runs it there.

    Raises:
        GpuhubError: Users could not start it on a node, or nodes have different files; the text names each node.
    """
    file = find_image_path(cluster)
    results = _on_nodes(cluster, paths, console, head, partial(read_image_file, file=file), yes=False)
    for result in results:
        console.write(_format_line(result))
    _require_all(results, hash_file(file) if file.is_file() else results[0].sha256)


def _on_nodes(
    cluster: ClusterSettings,
    paths: Paths,
    console: OperatorConsole,
    head: ScriptRunner,
    action: Callable[[SlurmMachine], NodeImageFile],
    *,
    yes: bool,
) -> list[NodeImageFile]:
    with open_machines(cluster, paths, console, head, is_confirmed=yes) as machines:
        return on_all([machine for machine in machines if machine.node is not None], action)


def _format_line(result: NodeImageFile) -> str:
    if result.problem:
        return f"  ✗ {result.node}: {result.problem}"
    size = f"{result.size / 1e9:.1f} GB"
    return f"  ✓ {result.node}: {size}, {result.sha256[:_DIGITS]}, runs with Apptainer {result.version}"


def _require_all(results: list[NodeImageFile], sha256: str) -> None:
    failed = [result.node for result in results if result.problem]
    if failed:
        raise SetupError(f"users cannot start the image on {', '.join(failed)}")
    different = [result.node for result in results if result.sha256 != sha256]
    if different:
        raise SetupError(f"{', '.join(different)}: another file: `gpuhub image push` replaces it by this machine's")


def send_image_file(machine: SlurmMachine, file: Path, sha256: str) -> NodeImageFile:
    """Copy the file to a machine that has none or another one, and try it there; errors become its problem."""
    try:
        there = _read(machine, file)
        if there.sha256 != sha256:
            timeout_s = _CHECKSUM_S + file.stat().st_size / _BYTES_PER_S
            as_root = not _is_root(machine)
            machine.runner.send_file(file, _RECEIVE, (str(file), sha256), as_root=as_root, timeout_s=timeout_s)
            there = _read(machine, file)
        return _try(machine, file, there)
    except GpuhubError as error:
        return NodeImageFile(node=machine.name, problem=str(error))


def read_image_file(machine: SlurmMachine, file: Path) -> NodeImageFile:
    """Return the state of the file on a machine; errors become its problem."""
    try:
        return _try(machine, file, _read(machine, file))
    except GpuhubError as error:
        return NodeImageFile(node=machine.name, problem=str(error))


def _is_root(machine: SlurmMachine) -> bool:
    return machine.runner.run("id -u\n").strip() == "0"


def _read(machine: SlurmMachine, file: Path) -> NodeImageFile:
    as_root = not _is_root(machine)
    lines = machine.runner.run(_READ, (str(file),), as_root=as_root, timeout_s=_CHECKSUM_S).split()
    there = NodeImageFile(node=machine.name)
    return replace(there, size=int(lines[0]), sha256=lines[1]) if lines else there


def _try(machine: SlurmMachine, file: Path, there: NodeImageFile) -> NodeImageFile:
    if not there.sha256:
        raise SetupError(f"{file} is missing: `gpuhub image push` copies it")
    version = machine.runner.run(_TRY, (str(file),), as_root=not _is_root(machine), timeout_s=180).strip()
    return replace(there, version=version.splitlines()[0])
