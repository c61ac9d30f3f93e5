"""The closet's Slurm, used directly: its commands as users type them, and the GPUs that its jobs have."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass

from gpuhub.common import names
from gpuhub_closet.layouts import build_plan
from gpuhub_closet.slurm.slurm_setup import build_slurm_config
from gpuhub_closet.topology import ClosetPlan
from tests.support.closet.observer import Observer, find_overused_gpus
from tests.support.hub.browser import Product
from tests.support.slurm.daemons import wait_saved


@dataclass(frozen=True, slots=True)
class SqueueRow:
    """A job in squeue."""

    id: int
    name: str
    state: str
    node: str
    reason: str


class SlurmCommands:
    """Runs Slurm's commands."""

    def __init__(self, product: Product) -> None:
        self._paths = product.paths
        self._plan = build_plan(product.paths.instance)
        self._environment = {"PATH": os.environ["PATH"], "SLURM_CONF": str(product.cluster.slurm.conf)}

    @property
    def plan(self) -> ClosetPlan:
        """The closet's plan."""
        return self._plan

    def ask(self, *command: str, user: str | None = None, text: str = "") -> str:
        """Run a command as root, or as a user with the number that gpuhub has given, and return its output."""
        number = 0 if user is None else json.loads((self._paths.state / "uids.json").read_text())[user]
        done = subprocess.run(
            command,
            input=text,
            env=self._environment,
            cwd="/",
            user=number,
            group=number,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, user: str, *options: str, script: str = "exec sleep 600") -> int:
        """Submit a plain user's batch job and return its number."""
        quiet = ("--output=/dev/null", "--error=/dev/null")
        return int(self.ask("sbatch", "--parsable", *quiet, *options, user=user, text=f"#!/bin/sh\n{script}\n"))

    def list_jobs(self) -> list[SqueueRow]:
        """Return all jobs that wait, run or complete."""
        lines = self.ask("squeue", "--noheader", "--format=%i|%j|%T|%N|%r").splitlines()
        return [SqueueRow(int(number), *rest) for number, *rest in (line.split("|") for line in lines)]

    def state(self, job: int) -> str:
        """Return a job's state in Slurm; empty when it has ended."""
        return next((row.state for row in self.list_jobs() if row.id == job), "")

    def list_lease_jobs(self) -> list[SqueueRow]:
        """Return the jobs of leases."""
        return [row for row in self.list_jobs() if row.name.startswith(names.slurm_job_name(self._paths.instance, ""))]

    def wait_saved(self, job: int) -> None:
        """Wait until slurmctld has saved its state."""
        wait_saved(self.ask, build_slurm_config(self._plan, self._paths).state, job)

    def end_plain_jobs(self) -> None:
        """Cancel the jobs that do not belong to leases."""
        list_lease_jobs = self.list_lease_jobs()
        for row in self.list_jobs():
            if row not in list_lease_jobs:
                self.ask("scancel", str(row.id))

    def find_gpus_of_plain_jobs(self) -> dict[str, int]:
        """Return the whole GPUs of plain jobs: UUID → job number."""
        held = {}
        for text in self.ask("scontrol", "--details", "--oneliner", "show", "job").splitlines():
            if " JobState=RUNNING " not in text or f" JobName={names.slurm_job_name(self._paths.instance, '')}" in text:
                continue
            job = int(re.search(r"JobId=(\d+)", text)[1])
            for node, index in re.findall(r" Nodes=(\S+) \S+ \S+ GRES=gpu:\w+:1\(IDX:(\d+)\)", text):
                held[self._plan.gpu_uuids(self._plan.node(node))[int(index)]] = job
        return held


@dataclass(slots=True)
class SlurmObserver(Observer):
    """An observer that also detects a container with a GPU that Slurm has given to a plain job."""

    queue: SlurmCommands | None = None
    #: The largest numbers of GPUs of plain jobs and of containers in one poll.
    most: tuple[int, int] = (0, 0)

    def find(self) -> set[str]:
        """Return GPUs in use twice; only a container that runs before and after the query certainly ran during it."""
        assert self.queue is not None
        before = {seen.id for seen in self.running()}
        try:
            held = self.queue.find_gpus_of_plain_jobs()
        except (AssertionError, subprocess.TimeoutExpired):
            held = {}  # slurmctld is restarting
        after = self.running()
        self.most = max(self.most[0], len(held)), max(self.most[1], sum(bool(seen.uuids) for seen in after))
        return find_overused_gpus(after) | {
            f"{uuid}: {seen.owner}'s {seen.kind} {seen.id[:12]}, and Slurm's job {held[uuid]}"
            for seen in after
            if seen.id in before
            for uuid in seen.uuids
            if uuid in held
        }
