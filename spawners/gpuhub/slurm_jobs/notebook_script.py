"""Builds the script of a notebook's Slurm job; every inserted text is quoted for the shell.

The notebook's token is in the script, as JSON on the standard input of the program that it starts. Only the user and
root can read it there: slurmctld and slurmd store scripts in folders that only they and the job's user can read, and
neither `ps` nor /proc shows a standard input. The alternatives are worse: all users could read it on sbatch's command
line (`--export=NAME=value`), and a file in the home needs a head node that sees all homes as root, which NFS servers
refuse. Slurm's operators can read scripts (`scontrol write batch_script`), and a site with
`AccountingStoreFlags=job_script` stores them, but a token is void once its server has ended.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuhub.config.settings import ClusterSettings
from gpuhub.slurm_jobs.runtime import (
    JobRuntime,
    build_node_tables,
    build_runtime,
    build_user_environment,
    fill_template,
)
from gpuhub.tls.notebook_certificate import NotebookCertificate


@dataclass(frozen=True, slots=True, kw_only=True)
class NotebookScriptSpec:
    """Content of the script of one start."""

    cluster: ClusterSettings
    user: str
    #: Empty for the default server.
    server: str
    has_gpus: bool
    #: JupyterHub's variables, among them the token, and gpuhub's own.
    environment: Mapping[str, str]
    #: The notebook's command line after its program.
    arguments: Sequence[str]
    #: URL to which the port is reported.
    report_url: str
    #: The path of the notebook's own URL.
    prefix: str
    #: None without TLS.
    certificates: NotebookCertificate | None = None


def build_notebook_script(spec: NotebookScriptSpec) -> str:
    """Build the job's script for bash."""
    runtime = build_runtime(spec.cluster, spec.user, has_gpus=spec.has_gpus)
    texts = {
        "home": runtime.home,
        "user": spec.user,
        "path": runtime.path,
        "log": build_log_name(spec.server),
        "instructions": json.dumps(_build_instructions(spec, runtime), sort_keys=True),
    }
    return fill_template(
        "notebook.template", texts=texts, lines={"prepare": runtime.prepare, "command": shlex.join(runtime.command)}
    )


def build_log_name(server: str) -> str:
    """Return the name of the notebook's log file in `~/.gpuhub`."""
    return f"notebook-{server}.log" if server else "notebook.log"


def _build_instructions(spec: NotebookScriptSpec, runtime: JobRuntime) -> dict[str, object]:
    """Build the instructions for `node_main`."""
    program = str(spec.cluster.slurm.command) if runtime.programs else "jupyterhub-singleuser"
    certificates = spec.certificates
    return build_node_tables(spec.cluster) | {
        "scheme": "http" if certificates is None else "https",
        "prefix": spec.prefix,
        "report": spec.report_url,
        "command": [program, *spec.arguments],
        "environment": {**spec.environment, **build_user_environment(spec.user, runtime)},
        "certificates": None if certificates is None else _list_certificate_texts(certificates),
    }


def _list_certificate_texts(issued: NotebookCertificate) -> dict[str, str]:
    """Return the PEM texts by the variables that name their files."""
    return {
        "JUPYTERHUB_SSL_KEYFILE": issued.key.decode(),
        "JUPYTERHUB_SSL_CERTFILE": issued.certificate.decode(),
        "JUPYTERHUB_SSL_CLIENT_CA": issued.trust.decode(),
        "GPUHUB_BROKER_CA": issued.broker_trust.decode(),
    }
