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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuhub.batch.runtime import Runtime, fill, find_runtime, tell_places, tell_user
from gpuhub.settings import Cluster
from gpuhub.trust.notebooks import Issued


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
    runtime = find_runtime(notebook.cluster, notebook.user, has_gpus=notebook.has_gpus)
    texts = {
        "home": runtime.home,
        "user": notebook.user,
        "path": runtime.path,
        "log": log_name(notebook.server),
        "told": json.dumps(_told(notebook, runtime), sort_keys=True),
    }
    return fill(
        "notebook.template", texts=texts, lines={"prepare": runtime.prepare, "command": shlex.join(runtime.command)}
    )


def log_name(server: str) -> str:
    """The file in `~/.gpuhub` with what the notebook says."""
    return f"notebook-{server}.log" if server else "notebook.log"


def _told(notebook: Notebook, runtime: Runtime) -> dict[str, object]:
    """What `on_node` reads."""
    program = str(notebook.cluster.slurm.command) if runtime.programs else "jupyterhub-singleuser"
    certificates = notebook.certificates
    return tell_places(notebook.cluster) | {
        "scheme": "http" if certificates is None else "https",
        "prefix": notebook.prefix,
        "report": notebook.report_url,
        "command": [program, *notebook.arguments],
        "environment": {**notebook.environment, **tell_user(notebook.user, runtime)},
        "certificates": None if certificates is None else _files(certificates),
    }


def _files(issued: Issued) -> dict[str, str]:
    """PEM texts by the variable that names their file."""
    return {
        "JUPYTERHUB_SSL_KEYFILE": issued.key.decode(),
        "JUPYTERHUB_SSL_CERTFILE": issued.certificate.decode(),
        "JUPYTERHUB_SSL_CLIENT_CA": issued.trust.decode(),
        "GPUHUB_BROKER_CA": issued.broker_trust.decode(),
    }
