"""The scripts of Slurm jobs that are notebooks or workers; every inserted text is quoted for the shell.

A script runs the program `node_main`, whose text is in it, with instructions as JSON on its standard input.

A notebook's script has the notebook's token in these instructions. Only the user and root can read it there: slurmctld
and slurmd store scripts in folders that only they and the job's user can read, and neither `ps` nor /proc shows a
standard input. The alternatives are worse: all users could read it on sbatch's command line (`--export=NAME=value`),
and a file in the home needs a head node that sees all homes as root, which NFS servers refuse. Slurm's operators can
read scripts (`scontrol write batch_script`), and a site with `AccountingStoreFlags=job_script` stores them, but a token
is void once its server has ended.

The script of a launch contains no secret, because a worker calls no API and finds its launch through files in its
user's home.
"""

from __future__ import annotations

import json
import shlex
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from gpuhub.config.settings import ClusterSettings
from gpuhub.tls.notebook_certificate import NotebookCertificate

_WORKER_PROGRAM = "gpu-launch-worker"
_COURIER_MODULE = "gpu_launch.courier"
#: Folder in the home; the notebook has created it before it requests workers.
_WORKER_LOGS = ".gpu_launch/jobs/{run}/logs"
_HERE = Path(__file__).parent
#: Standard input of `node_main` in a script.
_INSTRUCTIONS = '<<<"$instructions"'
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
_DATASETS = "/datasets"
_MODELS = "/models"
#: Option for kernels without ports: other users of the node could connect to these, and messages of kernels are signed
#: but not encrypted.
_KERNELS_WITHOUT_PORTS = "--KernelManager.transport=ipc"
#: Variables with a job's GPUs and nodes that are passed into the container.
_FORWARDED = ("CUDA_VISIBLE_DEVICES", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_JOB_ID", "SLURMD_NODENAME")


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
    #: The address on which the notebook listens, by Slurm's name of the node.
    listen: Mapping[str, str]
    #: URL to which the port is reported.
    report_url: str
    #: The path of the notebook's own URL.
    prefix: str
    #: None without TLS.
    certificates: NotebookCertificate | None = None


def build_notebook_script(spec: NotebookScriptSpec) -> str:
    """Build the job's script for bash."""
    runtime = _build_runtime(spec.cluster, spec.user, has_gpus=spec.has_gpus)
    texts = {
        "home": runtime.home,
        "user": spec.user,
        "path": runtime.path,
        "log": build_log_name(spec.server),
        "instructions": json.dumps(_build_notebook_instructions(spec, runtime), sort_keys=True),
    }
    return _fill_template("notebook.template", texts=texts, lines={"run": runtime.format_run()})


def build_log_name(server: str) -> str:
    """Return the name of the notebook's log file in `~/.gpuhub`."""
    return f"notebook-{server}.log" if server else "notebook.log"


def _build_notebook_instructions(spec: NotebookScriptSpec, runtime: _JobRuntime) -> dict[str, object]:
    """Build the instructions for `node_main`."""
    program = str(spec.cluster.slurm.command) if runtime.programs else "jupyterhub-singleuser"
    certificates = spec.certificates
    return _build_node_tables(spec.cluster) | {
        "scheme": "http" if certificates is None else "https",
        "prefix": spec.prefix,
        "report": spec.report_url,
        "listen": dict(spec.listen),
        "command": [program, *spec.arguments, _KERNELS_WITHOUT_PORTS],
        "environment": {**spec.environment, **_build_user_environment(spec.cluster, spec.user, runtime)},
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerScriptSpec:
    """Content of the script of one job."""

    cluster: ClusterSettings
    user: str
    #: The run whose folder the workers read.
    run_id: str
    #: Index of the job's first worker among the workers of the run.
    first_worker: int
    has_gpus: bool
    #: CPUs of each worker.
    cpus: int
    #: Whether the job continues when one of its nodes fails.
    survives_nodes: bool
    #: Whether its first worker leads the others, and the job ends with it.
    is_detached: bool


def build_log_path(run_id: str, slurm_job: int) -> str:
    """Return the path of the log of Slurm and the workers' starts, for users."""
    return f"~/{_WORKER_LOGS.format(run=run_id)}/slurm-{slurm_job}.log"


def build_worker_script(spec: WorkerScriptSpec) -> str:
    """Build the job's script for bash."""
    runtime = _build_runtime(spec.cluster, spec.user, has_gpus=spec.has_gpus, forwarded=("GPUHUB_JOB_NODES",))
    commands = spec.cluster.slurm.commands
    texts = {
        "home": runtime.home,
        "user": spec.user,
        # srun and scontrol are in the same folder as on the head node, or on the usual PATH.
        "path": runtime.path if commands is None else f"{runtime.path}:{commands}",
        "logs": _WORKER_LOGS.format(run=spec.run_id),
        "instructions": json.dumps(_build_worker_instructions(spec, runtime), sort_keys=True),
    }
    run = _format_detached(spec, runtime) if spec.is_detached else _format_step(spec, runtime)
    return _fill_template("workers.template", texts=texts, lines={"run": run})


def _format_step(spec: WorkerScriptSpec, runtime: _JobRuntime) -> str:
    """Return the command that runs one task per node. It replaces the script, so signals reach the workers."""
    count = "$SLURM_JOB_NUM_NODES"
    return f"exec {_format_srun(spec, count)} {shlex.join(runtime.build_step_command())} {_INSTRUCTIONS}"


def _format_detached(spec: WorkerScriptSpec, runtime: _JobRuntime) -> str:
    """Return the commands of a detached job, whose own process is the first worker.

    Slurm ends the whole job with this process and reports its exit code.
    """
    count = "$((SLURM_JOB_NUM_NODES - 1))"
    others = f"{_format_srun(spec, count)} --relative=1 {shlex.join(runtime.build_step_command())} {_INSTRUCTIONS} &"
    lines = (
        'if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then',
        f"  {others}",
        "fi",
        runtime.format_run(),
    )
    return "\n".join(lines)


def _format_srun(spec: WorkerScriptSpec, count: str) -> str:
    words = (
        *("srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--cpus-per-task={spec.cpus}"),
        # The launch handles the end of a worker, so the others continue without a time limit.
        *("--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--export=ALL"),
        *(["--no-kill"] if spec.survives_nodes else []),
    )
    return " ".join(words)


def _build_worker_instructions(spec: WorkerScriptSpec, runtime: _JobRuntime) -> dict[str, object]:
    """Build the instructions for `node_main`."""
    return _build_node_tables(spec.cluster) | {
        "first_worker": spec.first_worker,
        "is_detached": spec.is_detached,
        "command": [f"{runtime.programs}{_WORKER_PROGRAM}"],
        "environment": {
            "OMP_NUM_THREADS": str(spec.cpus),
            "GPU_LAUNCH_RUN": spec.run_id,
            **_build_user_environment(spec.cluster, spec.user, runtime),
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class CourierCommand:
    """A command line with the environment that it needs."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CourierStepSpec:
    """Where a courier runs next to a worker."""

    cluster: ClusterSettings
    user: str
    #: The Slurm job, its node by Slurm's name, and the run of the worker.
    slurm_job: int
    node: str
    run_id: str
    has_gpus: bool
    #: CPUs of the worker, which the step shares with it.
    cpus: int


def build_head_command(cluster: ClusterSettings, user: str, arguments: Sequence[str]) -> CourierCommand:
    """Build the command line of a courier on the head node, in the environment or image of the site's jobs."""
    runtime = _build_runtime(cluster, user, has_gpus=False)
    words = (*runtime.container, *runtime.image, *_build_courier(runtime, arguments))
    return CourierCommand(words=words, environment=_build_shell_environment(runtime, user))


def build_step_command(spec: CourierStepSpec, arguments: Sequence[str]) -> CourierCommand:
    """Build the arguments of `srun` for a courier in a running job, with all that the worker of its node has."""
    runtime = _build_runtime(spec.cluster, spec.user, has_gpus=spec.has_gpus)
    instructions = _build_node_tables(spec.cluster) | {
        "command": _build_courier(runtime, arguments),
        "environment": {
            "OMP_NUM_THREADS": str(spec.cpus),
            "GPU_LAUNCH_RUN": spec.run_id,
            **_build_user_environment(spec.cluster, spec.user, runtime),
        },
    }
    step = (
        *(f"--jobid={spec.slurm_job}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={spec.node}"),
        *(f"--cpus-per-task={spec.cpus}", "--mem=0", "--mpi=none", "--unbuffered", "--quiet", "--export=ALL"),
    )
    return CourierCommand(
        words=(*step, *runtime.build_step_command(json.dumps(instructions, sort_keys=True))),
        environment=_build_shell_environment(runtime, spec.user),
    )


def _build_courier(runtime: _JobRuntime, arguments: Sequence[str]) -> list[str]:
    return [runtime.python, "-I", "-m", _COURIER_MODULE, *arguments]


def _build_shell_environment(runtime: _JobRuntime, user: str) -> dict[str, str]:
    """Build the variables that the scripts of jobs set themselves."""
    names = {"USER": user, "LOGNAME": user, "SHELL": "/bin/bash", "LANG": "C.UTF-8"}
    return {"HOME": runtime.home, "PATH": runtime.path, **names}


class _Template(string.Template):
    """A template with placeholders `%{name}`, because `$` belongs to the shell."""

    delimiter = "%"


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobRuntime:
    """Home, paths and commands with which a user's job runs on every node."""

    #: The user's home on the node, and as the programs see it.
    home: str
    inner_home: str
    path: str
    #: Folder of gpuhub's programs with a final slash; empty if they are on PATH.
    programs: str
    #: The interpreter, in the container if there is one.
    python: str
    #: Command line of Apptainer up to the image; empty without a container.
    container: tuple[str, ...] = ()
    #: The image's path, if there is a container.
    image: tuple[str, ...] = ()
    #: Variables of the script that the container gets.
    forwarded: tuple[str, ...] = ()

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command line of `node_main`, after the image. With `-I` Python imports no module of the user's."""
        return (*self.image, self.python, "-I", "-c", (_HERE / "node_main.py").read_text(encoding="utf-8"))

    def format_run(self, *arguments: str, stdin: str = _INSTRUCTIONS) -> str:
        """Return the shell text that runs `command` with this redirection and ends the shell with its exit code."""
        command = shlex.join((*self.command, *arguments))
        if not self.container:
            return f"exec {command} {stdin}"
        lines = {
            "variables": "\n".join(
                f'[ -z "${{{name}+set}}" ] || export APPTAINERENV_{name}="${name}"' for name in self.forwarded
            ),
            "container": shlex.join(self.container),
            "command": command,
            "stdin": stdin,
        }
        return _fill_template("apptainer.template", texts={}, lines=lines).rstrip()

    def build_step_command(self, *arguments: str) -> tuple[str, ...]:
        """Return the command line for `srun`, which passes on its standard input."""
        if not self.container:
            return (*self.command, *arguments)
        return ("/bin/bash", "-c", self.format_run(*arguments, stdin="<&0"))


def _build_runtime(
    cluster: ClusterSettings, user: str, *, has_gpus: bool, forwarded: tuple[str, ...] = ()
) -> _JobRuntime:
    """Build the runtime of a user's jobs.

    Args:
        forwarded: Further variables of the script that its container gets.
    """
    home = cluster.storage.format_home(user)
    if cluster.slurm.runtime == "plain":
        folder = PurePosixPath(str(cluster.slurm.command)).parent
        return _JobRuntime(
            home=home,
            inner_home=home,
            path=f"{folder}:{_SYSTEM_PATH}",
            programs=f"{folder}/",
            # The notebook's own interpreter has everything that is needed.
            python=f"{folder}/python3",
        )
    inner_home = f"/home/{user}"
    mounted = ((cluster.storage.datasets, _DATASETS), (cluster.storage.models, _MODELS))
    binds = [word for source, target in mounted if source for word in ("--bind", f"{source}:{target}:ro")]
    return _JobRuntime(
        home=home,
        inner_home=inner_home,
        path=_SYSTEM_PATH,
        programs="",
        python="python3",
        container=(
            *("apptainer", "--quiet", "exec", "--containall", "--cleanenv", "--no-privs"),
            *(["--nv"] if has_gpus else []),
            *("--home", f"{home}:{inner_home}", "--pwd", inner_home, *binds),
        ),
        image=(str(cluster.slurm.image),),
        forwarded=(*_FORWARDED, *forwarded),
    )


def _build_node_tables(cluster: ClusterSettings) -> dict[str, dict[str, str]]:
    """Build the tables with which `node_main` finds its node's name and address."""
    return {
        "addresses": {node.slurm_name: node.rank_address for node in cluster.nodes},
        "names": {node.slurm_name: node.name for node in cluster.nodes},
    }


def _build_user_environment(cluster: ClusterSettings, user: str, runtime: _JobRuntime) -> dict[str, str]:
    # Without a container, the folder is where it is on the node.
    models = cluster.storage.models if cluster.slurm.runtime == "plain" else _MODELS
    return {
        "HOME": runtime.inner_home,
        "USER": user,
        "SHELL": "/bin/bash",
        **({"GPUHUB_MODELS": str(models)} if cluster.storage.models is not None else {}),
    }


def _fill_template(template: str, *, texts: Mapping[str, str], lines: Mapping[str, str]) -> str:
    """Fill in a template of this folder; `texts` are quoted for the shell, `lines` are inserted as they are."""
    quoted = {key: shlex.quote(value) for key, value in texts.items()}
    return _Template((_HERE / template).read_text(encoding="utf-8")).substitute({**quoted, **lines})
