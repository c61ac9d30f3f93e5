"""The runtime of gpuhub's programs on nodes without Docker, as shell text that the scripts of all jobs share.

The program is `node_main`, whose text is in the script; it reads its instructions as JSON from its standard input.
"""

from __future__ import annotations

import shlex
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpuhub.config.settings import ClusterSettings

_HERE = Path(__file__).parent
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_DATASETS = "/datasets"
#: Variables with a job's GPUs and nodes that are passed into the container.
_FORWARDED = ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_JOB_ID", "SLURMD_NODENAME")


class _Template(string.Template):
    """A template with placeholders `%{name}`, because `$` belongs to the shell."""

    delimiter = "%"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRuntime:
    """Home, paths and commands with which a user's job runs on every node."""

    #: The user's home on the node, and as the programs see it.
    home: str
    inner_home: str
    path: str
    #: Folder of gpuhub's programs with a final slash; empty if they are on PATH.
    programs: str
    #: Shell text that runs before `command` on the same node; may be empty.
    prepare: str
    #: Command line of `node_main`.
    command: tuple[str, ...]

    def build_step_command(self) -> tuple[str, ...]:
        """Return `command` together with `prepare`, for `srun`."""
        if not self.prepare:
            return self.command
        return ("/bin/bash", "-c", f"{self.prepare}\nexec {shlex.join(self.command)}")


def build_runtime(
    cluster: ClusterSettings, user: str, *, has_gpus: bool, forwarded: tuple[str, ...] = ()
) -> JobRuntime:
    """Build the runtime of a user's jobs.

    Args:
        forwarded: Further variables of the script that its container gets.
    """
    home = cluster.storage.home.replace("{username}", user)
    # With `-I` Python imports no module of the user's.
    python = ("python3", "-I", "-c", (_HERE / "node_main.py").read_text(encoding="utf-8"))
    if cluster.slurm.runtime == "plain":
        folder = PurePosixPath(str(cluster.slurm.command)).parent
        return JobRuntime(
            home=home,
            inner_home=home,
            path=f"{folder}:{_SYSTEM_PATH}",
            programs=f"{folder}/",
            prepare="",
            # The notebook's own interpreter has everything that is needed.
            command=(f"{folder}/{python[0]}", *python[1:]),
        )
    inner_home = f"/home/{user}"
    binds = [] if cluster.storage.datasets is None else ["--bind", f"{cluster.storage.datasets}:{_DATASETS}:ro"]
    names = (*_FORWARDED, *forwarded)
    return JobRuntime(
        home=home,
        inner_home=inner_home,
        path=_SYSTEM_PATH,
        programs="",
        prepare="\n".join(f'[ -z "${{{name}+set}}" ] || export APPTAINERENV_{name}="${name}"' for name in names),
        command=(
            *("apptainer", "--quiet", "exec", "--containall", "--cleanenv", "--no-privs"),
            *(["--nv"] if has_gpus else []),
            *("--home", f"{home}:{inner_home}", "--pwd", inner_home, *binds),
            *(str(cluster.slurm.image), *python),
        ),
    )


def build_node_tables(cluster: ClusterSettings) -> dict[str, dict[str, str]]:
    """Build the tables with which `node_main` finds its node's name and address."""
    return {
        "addresses": {node.slurm_name: node.address for node in cluster.nodes},
        "names": {node.slurm_name: node.name for node in cluster.nodes},
    }


def build_user_environment(user: str, runtime: JobRuntime) -> dict[str, str]:
    return {"HOME": runtime.inner_home, "USER": user, "SHELL": "/bin/bash"}


def fill_template(template: str, *, texts: Mapping[str, str], lines: Mapping[str, str]) -> str:
    """Fill in a template of this folder; `texts` are quoted for the shell, `lines` are inserted as they are."""
    quoted = {key: shlex.quote(value) for key, value in texts.items()}
    return _Template((_HERE / template).read_text(encoding="utf-8")).substitute({**quoted, **lines})
