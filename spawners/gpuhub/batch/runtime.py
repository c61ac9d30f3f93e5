"""How a program of ours runs on a node without Docker, as shell text; shared by the scripts of all jobs. Pure.

The program is `on_node`, whose text stands in the script, and what it is to do comes as JSON on its standard input.
"""

from __future__ import annotations

import shlex
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpuhub.settings import Cluster

_HERE = Path(__file__).parent
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_DATASETS = "/datasets"
#: What Slurm says of a job's GPUs, and a script of its nodes, goes into the container as it is.
_PASSED_ON = ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_JOB_ID", "SLURMD_NODENAME")


class _Template(string.Template):
    """`%{name}`, since `$` is the shell's."""

    delimiter = "%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """What a user's job runs by, on every node."""

    #: The user's home: on the node, and where the programs are.
    home: str
    inner_home: str
    path: str
    #: The folder of the programs beside the notebook's, with its slash; empty where they are found on PATH.
    programs: str
    #: Runs before `command`, on the same node; empty for nothing.
    prepare: str
    #: `on_node`; told what to do on its standard input.
    command: tuple[str, ...]

    def on_each_node(self) -> tuple[str, ...]:
        """`command` with all that it needs there, for `srun`."""
        if not self.prepare:
            return self.command
        return ("/bin/bash", "-c", f"{self.prepare}\nexec {shlex.join(self.command)}")


def find_runtime(cluster: Cluster, user: str, *, has_gpus: bool, passed_on: tuple[str, ...] = ()) -> Runtime:
    """How this user's jobs run; `passed_on` are further variables of the script's that its container is to have."""
    home = cluster.storage.home.replace("{username}", user)
    # `-I`: nothing of the user's is imported.
    python = ("python3", "-I", "-c", (_HERE / "on_node.py").read_text(encoding="utf-8"))
    if cluster.slurm.runtime == "plain":
        folder = PurePosixPath(str(cluster.slurm.command)).parent
        return Runtime(
            home=home,
            inner_home=home,
            path=f"{folder}:{_SYSTEM_PATH}",
            programs=f"{folder}/",
            prepare="",
            # The interpreter that has the notebook has what is needed.
            command=(f"{folder}/{python[0]}", *python[1:]),
        )
    inner_home = f"/home/{user}"
    binds = [] if cluster.storage.datasets is None else ["--bind", f"{cluster.storage.datasets}:{_DATASETS}:ro"]
    names = (*_PASSED_ON, *passed_on)
    return Runtime(
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


def tell_places(cluster: Cluster) -> dict[str, dict[str, str]]:
    """By what `on_node` knows where it is."""
    return {
        "addresses": {node.slurm_name: node.address for node in cluster.nodes},
        "names": {node.slurm_name: node.name for node in cluster.nodes},
    }


def tell_user(user: str, runtime: Runtime) -> dict[str, str]:
    """A user's own variables."""
    return {"HOME": runtime.inner_home, "USER": user, "SHELL": "/bin/bash"}


def fill(template: str, *, texts: Mapping[str, str], lines: Mapping[str, str]) -> str:
    """The script that a template of this folder makes: `texts` stand in it quoted, `lines` as they are."""
    quoted = {key: shlex.quote(value) for key, value in texts.items()}
    return _Template((_HERE / template).read_text(encoding="utf-8")).substitute({**quoted, **lines})
