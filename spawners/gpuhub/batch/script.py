"""The script of a notebook's job. Pure: every text that is not this module's own stands in it quoted for the shell.

The notebook's token is in the script, as JSON on the standard input of what it starts. There it is the user's own and
root's: slurmctld and slurmd keep scripts in folders that only they and the job's user can read, and neither `ps` nor
/proc shows a standard input. The two other ways are worse: on sbatch's command line (`--export=NAME=value`) everybody
could read it, and a file in the home needs a head node that sees all homes, as root, which NFS servers refuse. Slurm's
operators can ask for scripts (`scontrol write batch_script`), and a site with `AccountingStoreFlags=job_script` keeps
them; a token opens nothing any more once its server has ended.
"""

from __future__ import annotations

import json
import shlex
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpuhub.settings import Cluster
from gpuhub.trust.notebooks import Issued

_HERE = Path(__file__).parent
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_DATASETS = "/datasets"
#: What Slurm says of a job's GPUs goes into the container as it is.
_PASSED_ON = ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_JOB_ID", "SLURMD_NODENAME")


class _Template(string.Template):
    """`%{name}`, since `$` is the shell's."""

    delimiter = "%"


@dataclass(frozen=True, slots=True, kw_only=True)
class Notebook:
    """What one start's script is made of."""

    cluster: Cluster
    user: str
    #: Empty for the default server.
    server: str
    has_gpus: bool
    #: JupyterHub's, its token among it, and gpuhub's own.
    environment: Mapping[str, str]
    #: The notebook's options, after its program.
    arguments: Sequence[str]
    #: Where the port is reported.
    report_url: str
    #: The path of the notebook's own URL.
    prefix: str
    #: None without TLS.
    certificates: Issued | None = None


def build_script(notebook: Notebook) -> str:
    """The job's whole script, for bash."""
    values = _apptainer(notebook) if notebook.cluster.slurm.runtime == "apptainer" else _plain(notebook)
    template = _Template((_HERE / "notebook.template").read_text(encoding="utf-8"))
    quoted = {
        "home": node_home(notebook.cluster, notebook.user),
        "user": notebook.user,
        "log": log_name(notebook.server),
    }
    return template.substitute({key: shlex.quote(value) for key, value in quoted.items()} | values)


def node_home(cluster: Cluster, user: str) -> str:
    """The user's home on the nodes themselves."""
    return cluster.storage.home.replace("{username}", user)


def log_name(server: str) -> str:
    """The file in `~/.gpuhub` with what the notebook says."""
    return f"notebook-{server}.log" if server else "notebook.log"


def _plain(notebook: Notebook) -> dict[str, str]:
    program = PurePosixPath(str(notebook.cluster.slurm.command))
    home = node_home(notebook.cluster, notebook.user)
    told = _told(notebook, [str(program), *notebook.arguments], home)
    # The interpreter that has the notebook has what a report needs; `-I`: nothing of the user's is imported.
    command = [str(program.with_name("python3")), "-I", "-c", _on_node()]
    return {
        "path": shlex.quote(f"{program.parent}:{_SYSTEM_PATH}"),
        "prepare": "",
        "command": shlex.join(command),
        "told": shlex.quote(told),
    }


def _apptainer(notebook: Notebook) -> dict[str, str]:
    cluster, home = notebook.cluster, f"/home/{notebook.user}"
    told = _told(notebook, ["jupyterhub-singleuser", *notebook.arguments], home)
    binds = [] if cluster.storage.datasets is None else ["--bind", f"{cluster.storage.datasets}:{_DATASETS}:ro"]
    command = [
        *("apptainer", "--quiet", "exec", "--containall", "--cleanenv", "--no-privs"),
        *(["--nv"] if notebook.has_gpus else []),
        *("--home", f"{node_home(cluster, notebook.user)}:{home}", "--pwd", home, *binds),
        *(str(cluster.slurm.image), "python3", "-I", "-c", _on_node()),
    ]
    passed_on = [f'[ -z "${{{name}+set}}" ] || export APPTAINERENV_{name}="${name}"' for name in _PASSED_ON]
    return {
        "path": shlex.quote(_SYSTEM_PATH),
        "prepare": "\n".join(passed_on),
        "command": shlex.join(command),
        "told": shlex.quote(told),
    }


def _told(notebook: Notebook, command: Sequence[str], home: str) -> str:
    """What `on_node` reads."""
    nodes = notebook.cluster.nodes
    own = {"HOME": home, "USER": notebook.user, "SHELL": "/bin/bash"}
    told = {
        "addresses": {node.slurm_name: node.address for node in nodes},
        "names": {node.slurm_name: node.name for node in nodes},
        "scheme": "http" if notebook.certificates is None else "https",
        "prefix": notebook.prefix,
        "report": notebook.report_url,
        "command": list(command),
        "environment": {**notebook.environment, **own},
        "certificates": None if notebook.certificates is None else _files(notebook.certificates),
    }
    return json.dumps(told, sort_keys=True)


def _files(issued: Issued) -> dict[str, str]:
    """PEM texts by the variable that names their file."""
    return {
        "JUPYTERHUB_SSL_KEYFILE": issued.key.decode(),
        "JUPYTERHUB_SSL_CERTFILE": issued.certificate.decode(),
        "JUPYTERHUB_SSL_CLIENT_CA": issued.trust.decode(),
        "GPUHUB_BROKER_CA": issued.broker_trust.decode(),
    }


def _on_node() -> str:
    return (_HERE / "on_node.py").read_text(encoding="utf-8")
