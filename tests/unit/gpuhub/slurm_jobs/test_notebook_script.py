"""The script of a notebook's job, in which the shell interprets no inserted text."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gpuhub.config.settings import ClusterSettings
from gpuhub.slurm_client.submission import END_SIGNAL
from gpuhub.slurm_jobs.notebook_script import NotebookScriptSpec, build_log_name, build_notebook_script
from gpuhub.tls.notebook_certificate import NotebookCertificate
from tests.support.slurm_scripts import APPTAINER, HOSTILE, ON_NODE, PLAIN, cluster

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
        "report_url": "http://10.0.0.1:8081/hub/api/gpuhub-port",
        "prefix": "/user/ada/",
    }
    return NotebookScriptSpec(**(values | changes))


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("plain", notebook(cluster(**PLAIN))),
        ("apptainer", notebook(cluster(**APPTAINER), server="work", certificates=TLS)),
        ("apptainer-cpu", notebook(cluster(**APPTAINER, datasets=None), has_gpus=False)),
    ],
)
def test_the_script_is_as_it_was(name: str, made: NotebookScriptSpec) -> None:
    # Replace the node's program, which has separate tests, by a placeholder.
    text = build_notebook_script(made).replace(shlex.quote(ON_NODE.read_text()), "<node_main.py>")
    file = GOLDEN / f"{name}.sh"
    if os.environ.get("GPUHUB_UPDATE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("runtime", [PLAIN, APPTAINER], ids=["plain", "apptainer"])
@pytest.mark.parametrize("hostile", HOSTILE)
def test_nobodys_text_reaches_the_shell(runtime: dict[str, str], hostile: str, tmp_path: Path) -> None:
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
    assert told["command"][-1] == told["prefix"] == told["report"] == text
    assert told["environment"][text] == told["environment"]["USER"] == text
    arguments = (tmp_path / "arguments").read_text().split("\0")
    assert ON_NODE.read_text() in arguments
    assert (home / ".gpuhub" / build_log_name(text)).exists()


def test_neither_arguments_nor_environment_have_the_token(tmp_path: Path) -> None:
    """Others see the arguments of a user's processes; they must not see the token."""
    program = tmp_path / "python3"
    seen = tmp_path / "seen"
    program.write_text(f'#!/bin/bash\ntr "\\0" "\\n" </proc/$$/cmdline >{seen}\nenv >>{seen}\n')
    program.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    made = build_notebook_script(
        notebook(cluster(home=str(home), runtime="plain", command=str(tmp_path / "jupyterhub-singleuser")))
    )
    subprocess.run(["bash"], input=made, text=True, check=True, timeout=30)
    assert "secret-token" not in seen.read_text()
    assert "secret-token" not in (home / ".gpuhub" / "notebook.log").read_text()


@pytest.mark.parametrize(("ends", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", -signal.SIGKILL)])
def test_it_ends_as_the_notebook_does(ends: str, status: int, tmp_path: Path) -> None:
    assert run_with(f"#!/bin/bash\n{ends}\n", tmp_path).wait(30) == status


def test_a_signal_reaches_the_notebook_which_says_how_it_ends(tmp_path: Path) -> None:
    program = f"#!/bin/bash\ntrap 'echo told; exit 7' TERM\ntouch {tmp_path}/ready\nwhile :; do sleep 0.05; done\n"
    running = run_with(program, tmp_path)
    while not (tmp_path / "ready").exists():
        assert running.poll() is None
    running.terminate()
    assert running.wait(30) == 7
    assert (tmp_path / "home" / ".gpuhub" / "notebook.log").read_text() == "told\n"


def test_what_ignores_sigterm_is_ended_at_once_when_gpuhub_says_so(tmp_path: Path) -> None:
    program = f"#!/bin/bash\ntrap '' TERM\ntouch {tmp_path}/ready\nwhile :; do sleep 0.05; done\n"
    running = run_with(program, tmp_path)
    while not (tmp_path / "ready").exists():
        assert running.poll() is None
    running.terminate()
    number = signal.Signals[f"SIG{END_SIGNAL}"]
    running.send_signal(number)
    assert running.wait(30) == -number


def run_with(program: str, tmp_path: Path) -> subprocess.Popen[bytes]:
    """The script as a process, with this program in the notebook's place."""
    (tmp_path / "python3").write_text(program)
    (tmp_path / "python3").chmod(0o755)
    (tmp_path / "home").mkdir()
    made = build_notebook_script(
        notebook(cluster(home=str(tmp_path / "home"), runtime="plain", command=str(tmp_path / "jupyterhub-singleuser")))
    )
    file = tmp_path / "script"
    file.write_text(made)
    return subprocess.Popen(["bash", str(file)])
