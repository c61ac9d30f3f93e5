"""The scripts of notebooks' and workers' jobs, in which the shell interprets no inserted text."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuhub.config.settings import ClusterSettings
from gpuhub.slurm_client.submission import END_SIGNAL
from gpuhub.slurm_jobs import scripts
from gpuhub.slurm_jobs.scripts import (
    CourierStepSpec,
    NotebookScriptSpec,
    WorkerScriptSpec,
    build_head_command,
    build_log_name,
    build_notebook_script,
    build_step_command,
    build_worker_script,
)
from gpuhub.tls.notebook_certificate import NotebookCertificate
from tests.support.golden import check_golden
from tests.support.slurm.job_scripts import APPTAINER, HOSTILE, ON_NODE, PLAIN, cluster

pytestmark = pytest.mark.process
GOLDEN = Path(__file__).with_name("golden")
TLS = NotebookCertificate(key=b"KEY\n", certificate=b"CERTIFICATE\n", trust=b"TRUST\n", broker_trust=b"BROKER\n")


def notebook(of: ClusterSettings, **changes: Any) -> NotebookScriptSpec:
    values: dict[str, Any] = {
        "cluster": of,
        "user": "ada",
        "server": "",
        "has_gpus": True,
        "environment": {"JUPYTERHUB_API_TOKEN": "secret-token", "GPUHUB_LEASE": "l1"},
        "arguments": ["--debug"],
        "listen": {"sx1": "10.0.0.11", "rig2": "fd00::12"},
        "report_url": "http://10.0.0.1:8081/hub/api/gpuhub-port",
        "prefix": "/user/ada/",
    }
    return NotebookScriptSpec(**(values | changes))


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("plain", notebook(cluster(**PLAIN))),
        ("apptainer", notebook(cluster(**APPTAINER), server="work", certificates=TLS)),
        ("apptainer-cpu", notebook(cluster(**APPTAINER, datasets=None), has_gpus=False)),
    ],
)
def test_notebook_script_matches_the_golden_file(name: str, spec: NotebookScriptSpec) -> None:
    # Replace the node's program, which has separate tests, by a placeholder.
    text = build_notebook_script(spec).replace(shlex.quote(ON_NODE.read_text()), "<node_main.py>")
    check_golden(text, GOLDEN / f"{name}.sh")


@pytest.mark.parametrize("runtime", [PLAIN, APPTAINER], ids=["plain", "apptainer"])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_notebook_script_does_not_evaluate_user_text(runtime: dict[str, str], hostile: str, tmp_path: Path) -> None:
    """The real bash runs it, with a program in place of Python that writes down what it was given."""
    made = tmp_path / "made"
    text = hostile.format(made=made)
    home = tmp_path / f"home {text}".replace("/", "_")
    home.mkdir()
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("python3", "apptainer"):
        (programs / name).write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" >{tmp_path}/arguments\ncat >{tmp_path}/told\n')
        (programs / name).chmod(0o755)
    of = cluster(**runtime, home=str(home))
    slurm = of.slurm.model_copy(update={"command": programs / "jupyterhub-singleuser"})
    of = of.model_copy(update={"slurm": slurm})
    built = build_notebook_script(
        notebook(
            of,
            user=text,
            server=text,
            environment={"JUPYTERHUB_API_TOKEN": text, text: text},
            arguments=[text],
            report_url=text,
            prefix=text,
        )
    ).replace("PATH=/usr/local/bin", f"PATH={programs}:/usr/local/bin")
    made_by_us = build_log_name(text).rpartition("/")[0]
    (home / ".gpuhub" / made_by_us).mkdir(parents=True)
    done = subprocess.run(["bash"], input=built, text=True, cwd=tmp_path, check=False, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done
    assert not made.exists()
    told = json.loads((tmp_path / "told").read_text())
    assert told["command"][-2] == told["prefix"] == told["report"] == text
    assert told["environment"][text] == told["environment"]["USER"] == text
    arguments = (tmp_path / "arguments").read_text().split("\0")
    assert ON_NODE.read_text() in arguments
    assert (home / ".gpuhub" / build_log_name(text)).exists()


def test_token_is_not_in_arguments_or_environment(tmp_path: Path) -> None:
    """Others see the arguments of a user's processes; they must not see the token."""
    program = tmp_path / "python3"
    seen = tmp_path / "seen"
    program.write_text(f'#!/bin/bash\ntr "\\0" "\\n" </proc/$$/cmdline >{seen}\nenv >>{seen}\n')
    program.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    script = build_notebook_script(
        notebook(cluster(home=str(home), runtime="plain", command=str(tmp_path / "jupyterhub-singleuser")))
    )
    subprocess.run(["bash"], input=script, text=True, check=True, timeout=30)
    assert "secret-token" not in seen.read_text()
    assert "secret-token" not in (home / ".gpuhub" / "notebook.log").read_text()


RUNTIMES = pytest.mark.parametrize("runtime", ["plain", "apptainer"])


@RUNTIMES
@pytest.mark.parametrize(("ends", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", -signal.SIGKILL)])
def test_notebook_script_returns_the_exit_code_of_the_notebook(
    ends: str, status: int, runtime: str, tmp_path: Path
) -> None:
    # The shell that runs Apptainer stays, and exits as shells do after a signal.
    expected = 128 - status if status < 0 and runtime == "apptainer" else status
    assert run_with(f"#!/bin/bash\n{ends}\n", tmp_path, runtime).wait(30) == expected
    assert list((tmp_path / "temporary").iterdir()) == []


@RUNTIMES
def test_signal_is_forwarded_to_the_notebook(runtime: str, tmp_path: Path) -> None:
    program = f"#!/bin/bash\ntrap 'echo told; exit 7' TERM\ntouch {tmp_path}/ready\nwhile :; do sleep 0.05; done\n"
    running = run_with(program, tmp_path, runtime)
    while not (tmp_path / "ready").exists():
        assert running.poll() is None
    running.terminate()
    assert running.wait(30) == 7
    assert (tmp_path / "home" / ".gpuhub" / "notebook.log").read_text() == "told\n"
    assert list((tmp_path / "temporary").iterdir()) == []


@RUNTIMES
def test_end_signal_stops_a_notebook_that_ignores_sigterm(runtime: str, tmp_path: Path) -> None:
    program = f"#!/bin/bash\ntrap '' TERM\ntouch {tmp_path}/ready\nwhile :; do sleep 0.05; done\n"
    running = run_with(program, tmp_path, runtime)
    while not (tmp_path / "ready").exists():
        assert running.poll() is None
    running.terminate()
    number = signal.Signals[f"SIG{END_SIGNAL}"]
    running.send_signal(number)
    assert running.wait(30) == (128 + number if runtime == "apptainer" else -number)


def test_apptainers_folder_replaces_those_of_killed_jobs(tmp_path: Path) -> None:
    """Folders without a lock go, except new ones, which a job is about to lock; what a program made unwritable goes."""
    temporary = tmp_path / "temporary"
    for name in ("gpuhub-job-killed", "gpuhub-job-locked", "gpuhub-job-new", "other"):
        (temporary / name / "tmp").mkdir(parents=True)
        if not name.endswith("new"):
            os.utime(temporary / name, (0, 0))
    (temporary / "gpuhub-job-killed" / "tmp" / "file").touch()
    (temporary / "gpuhub-job-killed" / "tmp").chmod(0)
    lock = os.open(temporary / "gpuhub-job-locked", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        program = (
            f"#!/bin/bash\nls {temporary} >{tmp_path}/during\n"
            'while [ "$1" != --workdir ]; do shift; done; mkdir -p "$2/tmp/deep"; touch "$2/tmp/deep/file"\n'
            'chmod 500 "$2/tmp/deep"; stat -c %a "$2"\n'
        )
        assert run_with(program, tmp_path, "apptainer").wait(30) == 0
    finally:
        os.close(lock)
    kept = {"gpuhub-job-locked", "gpuhub-job-new", "other"}
    during = set((tmp_path / "during").read_text().split())
    assert kept < during
    assert "gpuhub-job-killed" not in during
    assert {path.name for path in temporary.iterdir()} == kept
    assert (tmp_path / "home" / ".gpuhub" / "notebook.log").read_text() == "700\n"


def run_with(program: str, tmp_path: Path, runtime: str = "plain") -> subprocess.Popen[bytes]:
    """The script as a process, with this program in the place of the notebook or Apptainer."""
    name = "python3" if runtime == "plain" else "apptainer"
    (tmp_path / name).write_text(program)
    (tmp_path / name).chmod(0o755)
    (tmp_path / "home").mkdir()
    (tmp_path / "temporary").mkdir(exist_ok=True)
    slurm = (
        {"runtime": "plain", "command": str(tmp_path / "jupyterhub-singleuser")} if runtime == "plain" else APPTAINER
    )
    script = build_notebook_script(notebook(cluster(home=str(tmp_path / "home"), **slurm)))
    file = tmp_path / "script"
    file.write_text(script.replace("PATH=/usr/local/bin", f"PATH={tmp_path}:/usr/local/bin"))
    return subprocess.Popen(["bash", str(file)], env={**os.environ, "TMPDIR": str(tmp_path / "temporary")})


def build_spec(of: ClusterSettings, **changes: Any) -> WorkerScriptSpec:
    values: dict[str, Any] = {
        "cluster": of,
        "user": "ada",
        "run_id": "run-1",
        "first_worker": 0,
        "has_gpus": True,
        "cpus": 4,
        "survives_nodes": False,
        "is_detached": False,
    }
    return WorkerScriptSpec(**(values | changes))


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("plain", build_spec(cluster(**PLAIN))),
        ("plain-elastic", build_spec(cluster(**PLAIN, commands="/opt/slurm/bin"), survives_nodes=True, first_worker=2)),
        ("plain-detached", build_spec(cluster(**PLAIN), is_detached=True)),
        ("apptainer", build_spec(cluster(**APPTAINER))),
        ("apptainer-detached", build_spec(cluster(**APPTAINER), is_detached=True, has_gpus=False)),
    ],
)
def test_worker_script_matches_the_golden_file(name: str, asked: WorkerScriptSpec) -> None:
    # Replace the node's program, which has separate tests, by a placeholder.
    program = ON_NODE.read_text()
    text = build_worker_script(asked)
    text = text.replace(shlex.quote(program), "<node_main.py>")
    # In a script within the script it is quoted twice.
    text = text.replace(shlex.quote(shlex.quote(program))[1:-1], "<node_main.py>")
    check_golden(text, GOLDEN / f"workers-{name}.sh")


SRUN = """#!/bin/bash
printf '%s\\0' "$@" >{folder}/srun
export SLURMD_NODENAME=sx2
while [[ $1 == --* ]]; do shift; done
"$@"
"""


ON_PATH = """#!/bin/bash
{{ printf '%s\\0' "$@"; env -0; }} >{folder}/{name}
cat >{folder}/told-$SLURMD_NODENAME
"""


class ScriptNode:
    """A folder with programs in place of Slurm's and of the job's own."""

    def __init__(self, folder: Path, runtime: dict[str, str], home: str = "home") -> None:
        self.folder = folder
        self.home = folder / home
        (self.home / ".gpu_launch" / "jobs" / "run-1" / "logs").mkdir(parents=True)
        programs = folder / "bin"
        programs.mkdir()
        texts = {
            "srun": SRUN,
            "scontrol": "#!/bin/bash\n[ \"$*\" = 'show hostnames sx[1-2]' ] && printf 'sx1\\nsx2\\n'\n",
            "python3": ON_PATH,
            "apptainer": ON_PATH,
        }
        for name, text in texts.items():
            (programs / name).write_text(text.format(folder=folder, name=name) if "{folder}" in text else text)
            (programs / name).chmod(0o755)
        of = cluster(**runtime, home=str(self.home))
        slurm = of.slurm.model_copy(update={"command": programs / "jupyterhub-singleuser"})
        self.cluster = of.model_copy(update={"slurm": slurm})

    def run(self, text: str, nodes: int = 2) -> subprocess.CompletedProcess[str]:
        """A script as Slurm runs it on the first node."""
        environment = {
            "PATH": os.environ["PATH"],
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "sx[1-2]",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURMD_NODENAME": "sx1",
        }
        text = text.replace("PATH=/usr/local/bin", f"PATH={self.folder}/bin:/usr/local/bin")
        return subprocess.run(
            ["bash"],
            input=text,
            text=True,
            check=False,
            capture_output=True,
            timeout=30,
            cwd=self.folder,
            env=environment,
        )

    def read_arguments(self, name: str) -> list[str]:
        """The arguments and the environment of a program that ran."""
        return (self.folder / name).read_text().split("\0")


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("runtime", [PLAIN, APPTAINER], ids=["plain", "apptainer"])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_worker_script_does_not_evaluate_user_text(
    runtime: dict[str, str], hostile: str, is_detached: bool, tmp_path: Path
) -> None:
    """The real bash runs it."""
    text = hostile.format(made=tmp_path / "made")
    node = ScriptNode(tmp_path, runtime, f"home {text}".replace("/", "_"))
    logs = scripts._WORKER_LOGS.format(run=text)
    (node.home / logs).mkdir(parents=True)
    asked = build_spec(node.cluster, user=text, run_id=text, is_detached=is_detached)
    done = node.run(build_worker_script(asked))
    log = node.home / logs / "slurm-7.log"
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done
    assert log.read_text() == ""
    assert not (tmp_path / "made").exists()
    told = json.loads((tmp_path / f"told-{'sx1' if is_detached else 'sx2'}").read_text())
    assert told["environment"]["GPU_LAUNCH_RUN"] == told["environment"]["USER"] == text


def test_each_node_runs_one_task_with_its_slurm_environment(tmp_path: Path) -> None:
    node = ScriptNode(tmp_path, APPTAINER)
    assert node.run(build_worker_script(build_spec(node.cluster))).returncode == 0
    assert node.read_arguments("srun")[:4] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=4"]
    given = node.read_arguments("apptainer")
    assert given[:3] == ["--quiet", "exec", "--containall"]
    assert json.loads((tmp_path / "told-sx2").read_text())["environment"]["GPU_LAUNCH_RUN"] == "run-1"
    # Of the node of the task, not of that on which the script runs.
    assert "APPTAINERENV_SLURMD_NODENAME=sx2" in given
    assert "APPTAINERENV_GPUHUB_JOB_NODES=sx1\nsx2" in given


def test_first_worker_of_a_detached_job_is_the_batch_script(tmp_path: Path) -> None:
    """Slurm ends the job with this process and reports its exit code; the other nodes have a step."""
    node = ScriptNode(tmp_path, PLAIN)
    program = tmp_path / "bin" / "python3"
    program.write_text(
        f"#!/bin/bash\n[ $SLURMD_NODENAME = sx2 ] && exec touch {tmp_path}/other\n"
        f"while [ ! -e {tmp_path}/other ]; do sleep 0.05; done; exit 3\n"
    )
    assert node.run(build_worker_script(build_spec(node.cluster, is_detached=True))).returncode == 3
    assert node.read_arguments("srun")[:2] == ["--nodes=1", "--ntasks=1"]
    assert "--relative=1" in node.read_arguments("srun")


def test_single_worker_needs_no_job_step(tmp_path: Path) -> None:
    node = ScriptNode(tmp_path, PLAIN)
    assert node.run(build_worker_script(build_spec(node.cluster, is_detached=True)), nodes=1).returncode == 0
    assert not (tmp_path / "srun").exists()


def test_worker_script_fails_without_the_home(tmp_path: Path) -> None:
    """It makes the folder of its logs, as a job from a laptop has none, but no home where that is not mounted."""
    node = ScriptNode(tmp_path, PLAIN)
    script = build_worker_script(build_spec(node.cluster, run_id="run-2"))
    assert node.run(script).returncode == 0
    logs = node.home / ".gpu_launch" / "jobs" / "run-2" / "logs"
    assert [path.name for path in logs.iterdir()] == ["slurm-7.log"]
    (tmp_path / "srun").unlink()
    shutil.rmtree(node.home)
    done = node.run(script)
    assert done.returncode == 1
    assert str(node.home) in done.stderr
    assert not node.home.exists()
    assert not (tmp_path / "srun").exists()


@pytest.mark.parametrize("runtime", [PLAIN, APPTAINER], ids=["plain", "apptainer"])
def test_courier_commands_match_the_golden_file(runtime: dict[str, str]) -> None:
    of = cluster(**runtime)
    step = CourierStepSpec(cluster=of, user="ada", slurm_job=17, node="sx1", run_id="run-1", has_gpus=True, cpus=4)
    text = ""
    for command in (
        build_head_command(of, "ada", ("put", "--limit=5", "--", "work")),
        build_step_command(step, ("shell", "--columns=80", "--rows=24", "--run=echo '$HOME'")),
    ):
        text += json.dumps(command.environment, sort_keys=True) + "\n"
        text += "".join(f"{word}\n" for word in command.words).replace(ON_NODE.read_text(), "<node_main.py>") + "\n"
    text = text.replace(shlex.quote(ON_NODE.read_text()), "<node_main.py>")
    check_golden(text, GOLDEN / f"couriers-{runtime['runtime']}.txt")


@pytest.mark.parametrize(("runtime", "folder"), [(PLAIN, "/srv/models"), (APPTAINER, "/models")])
def test_jobs_know_the_models(runtime: dict[str, str], folder: str) -> None:
    """In a container at their usual place, read-only; without one where they are on the node."""
    text = build_notebook_script(notebook(cluster(**runtime, models="/srv/models")))
    assert f'"GPUHUB_MODELS": "{folder}"' in text
    assert ("--bind /srv/models:/models:ro" in text) is (runtime is APPTAINER)
    assert "GPUHUB_MODELS" not in build_notebook_script(notebook(cluster(**runtime)))
