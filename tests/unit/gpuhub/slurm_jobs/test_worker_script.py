"""The script of a launch's job, in which the shell interprets no inserted text."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuhub.config.settings import ClusterSettings
from gpuhub.slurm_jobs import scripts
from gpuhub.slurm_jobs.scripts import WorkerScriptSpec, build_worker_script
from tests.support.slurm.job_scripts import APPTAINER, HOSTILE, ON_NODE, PLAIN, cluster

pytestmark = pytest.mark.process

GOLDEN = Path(__file__).with_name("golden")


def made(of: ClusterSettings, **changes: Any) -> WorkerScriptSpec:
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
        ("plain", made(cluster(**PLAIN))),
        ("plain-elastic", made(cluster(**PLAIN, commands="/opt/slurm/bin"), survives_nodes=True, first_worker=2)),
        ("plain-detached", made(cluster(**PLAIN), is_detached=True)),
        ("apptainer", made(cluster(**APPTAINER))),
        ("apptainer-detached", made(cluster(**APPTAINER), is_detached=True, has_gpus=False)),
    ],
)
def test_the_script_is_as_it_was(name: str, asked: WorkerScriptSpec) -> None:
    # Replace the node's program, which has separate tests, by a placeholder.
    program = ON_NODE.read_text()
    text = build_worker_script(asked)
    text = text.replace(shlex.quote(program), "<node_main.py>")
    # In a script within the script it is quoted twice.
    text = text.replace(shlex.quote(shlex.quote(program))[1:-1], "<node_main.py>")
    file = GOLDEN / f"workers-{name}.sh"
    if os.environ.get("GPUHUB_UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


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


class Node:
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

    def given(self, name: str) -> list[str]:
        """The arguments and the environment of a program that ran."""
        return (self.folder / name).read_text().split("\0")


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("runtime", [PLAIN, APPTAINER], ids=["plain", "apptainer"])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_nobodys_text_reaches_the_shell(
    runtime: dict[str, str], hostile: str, is_detached: bool, tmp_path: Path
) -> None:
    """The real bash runs it."""
    text = hostile.format(made=tmp_path / "made")
    node = Node(tmp_path, runtime, f"home {text}".replace("/", "_"))
    logs = scripts._LOGS.format(run=text)
    (node.home / logs).mkdir(parents=True)
    asked = made(node.cluster, user=text, run_id=text, is_detached=is_detached)
    done = node.run(build_worker_script(asked))
    log = node.home / logs / "slurm-7.log"
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done
    assert log.read_text() == ""
    assert not (tmp_path / "made").exists()
    told = json.loads((tmp_path / f"told-{'sx1' if is_detached else 'sx2'}").read_text())
    assert told["environment"]["GPU_LAUNCH_RUN"] == told["environment"]["USER"] == text


def test_each_node_has_one_task_in_the_image_with_what_slurm_says_there(tmp_path: Path) -> None:
    node = Node(tmp_path, APPTAINER)
    assert node.run(build_worker_script(made(node.cluster))).returncode == 0
    assert node.given("srun")[:4] == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=4"]
    given = node.given("apptainer")
    assert given[:3] == ["--quiet", "exec", "--containall"]
    # Of the node of the task, not of that on which the script runs.
    assert "APPTAINERENV_SLURMD_NODENAME=sx2" in given
    assert "APPTAINERENV_GPUHUB_JOB_NODES=sx1\nsx2" in given


def test_the_first_worker_of_a_detached_job_is_the_job_itself(tmp_path: Path) -> None:
    """Slurm ends the job with this process and reports its exit code; the other nodes have a step."""
    node = Node(tmp_path, PLAIN)
    program = tmp_path / "bin" / "python3"
    program.write_text(
        f"#!/bin/bash\n[ $SLURMD_NODENAME = sx2 ] && exec touch {tmp_path}/other\n"
        f"while [ ! -e {tmp_path}/other ]; do sleep 0.05; done; exit 3\n"
    )
    assert node.run(build_worker_script(made(node.cluster, is_detached=True))).returncode == 3
    assert node.given("srun")[:2] == ["--nodes=1", "--ntasks=1"]
    assert "--relative=1" in node.given("srun")


def test_alone_it_needs_no_step(tmp_path: Path) -> None:
    node = Node(tmp_path, PLAIN)
    assert node.run(build_worker_script(made(node.cluster, is_detached=True)), nodes=1).returncode == 0
    assert not (tmp_path / "srun").exists()


def test_without_the_runs_folder_nothing_is_started(tmp_path: Path) -> None:
    node = Node(tmp_path, PLAIN)
    done = node.run(build_worker_script(made(node.cluster, run_id="run-2")))
    assert done.returncode == 1
    assert "run-2/logs" in done.stderr
    assert not (tmp_path / "srun").exists()
