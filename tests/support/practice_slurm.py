"""A real Slurm on this machine: one slurmctld, many slurmds with a GPU each, munge. Loopback and one folder only."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

#: slurmctld's port; node I listens on the I-th after it.
PORT = 27000
#: Program → Debian package.
PACKAGES = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
_SETTINGS = """
ClusterName=gpuhub-bench
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool/%n
SlurmdLogFile={folder}/%n.log
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters={scheduler}
SlurmdParameters=config_overrides
ReturnToService=2
GresTypes=gpu
MinJobAge=2
MaxArraySize=100001
MaxJobCount=200000
NodeName=sx[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=1 RealMemory=1000 Gres=gpu:1
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""
#: The quickest of those tried for many short jobs: no delay after a submission, a full pass each second.
SCHEDULER = "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1"


@dataclass(slots=True)
class PracticeSlurm:
    """A running Slurm."""

    folder: Path
    nodes: int
    environment: dict[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str) -> None:
        """A daemon in the foreground; its output goes to the folder."""
        with (self.folder / f"{len(self.processes)}-{command[0]}.out").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=self.environment, cwd=self.folder)
        self.processes.append(process)

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=self.environment, timeout=60)
        return done.stdout

    def stop(self) -> None:
        """End every process that was started here, by its id, and wait for it."""
        for process in reversed(self.processes):
            process.terminate()
        end = time.monotonic() + 15
        for process in reversed(self.processes):
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)

    def run_jobs(self, count: int, deadline_s: float = 300.0) -> float:
        """Submit so many one-GPU jobs that run `true`, in one array; seconds until none waits, runs or completes."""
        began = time.monotonic()
        last = f"--array=0-{count - 1}"
        self.ask("sbatch", "-Q", last, "--gres=gpu:1", "-o", "/dev/null", "-e", "/dev/null", "--wrap", "true")
        _wait(lambda: not self._unfinished(), f"{count} jobs are done", deadline_s)
        return time.monotonic() - began

    def _unfinished(self) -> str:
        return self.ask("squeue", "--noheader", "--array", "--format=%i").strip()


@contextmanager
def practice_slurm(nodes: int) -> Iterator[PracticeSlurm]:
    """Slurm with so many nodes of one (fake) GPU each, all idle; nothing is left of it afterwards.

    Raises:
        RuntimeError: a program is missing; its Debian package is named.
    """
    missing = {package for program, package in PACKAGES.items() if shutil.which(program) is None}
    if missing:
        raise RuntimeError(f"slurmctld is measured beside the broker: apt-get install {' '.join(sorted(missing))}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp", prefix="gpuhub-slurm-")))
        # munged wants its socket's folder reachable by everybody.
        folder.chmod(0o711)
        environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        slurm = PracticeSlurm(folder=folder, nodes=nodes, environment=environment)
        stack.callback(slurm.stop)
        _write_settings(slurm)
        _start(slurm)
        yield slurm


def _write_settings(slurm: PracticeSlurm) -> None:
    text = _SETTINGS.format(
        folder=slurm.folder,
        port=PORT,
        first=PORT + 1,
        last=PORT + slurm.nodes,
        nodes=slurm.nodes,
        scheduler=SCHEDULER,
    )
    (slurm.folder / "slurm.conf").write_text(text, encoding="ascii")
    gres = f"NodeName=sx[1-{slurm.nodes}] Name=gpu File=/dev/null\n"
    (slurm.folder / "gres.conf").write_text(gres, encoding="ascii")
    for name in ("state", "spool"):
        (slurm.folder / name).mkdir()
    key = slurm.folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(1024))


def _start(slurm: PracticeSlurm) -> None:
    at = slurm.folder
    paths = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    slurm.start("munged", "--foreground", *(f"--{option}={at}/munge.{end}" for option, end in paths.items()))
    _wait((at / "munge.socket").exists, "munged listens", 10)
    slurm.start("slurmctld", "-D")
    for number in range(1, slurm.nodes + 1):
        slurm.start("slurmd", "-D", "-N", f"sx{number}")
    _wait(lambda: _idle(slurm) == slurm.nodes, f"{slurm.nodes} nodes are idle", 60)


def _idle(slurm: PracticeSlurm) -> int:
    done = subprocess.run(
        ["sinfo", "-h", "-N", "-t", "idle"], env=slurm.environment, capture_output=True, text=True, check=False
    )
    return len(done.stdout.splitlines())


def _wait(is_true: Callable[[], bool], what: str, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while not is_true():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {deadline_s:.0f} s: {what}")
        time.sleep(0.05)
