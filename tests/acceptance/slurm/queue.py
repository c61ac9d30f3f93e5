"""The closet's Slurm past the product: its own commands as its users type them, and who has which GPU by its word."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass

from gpuhub import names
from gpuhub.closet.plan import Plan, practice_plan
from gpuhub.closet.slurm import build_files
from tests.support.observer import Observer, doubles
from tests.support.slurm_saved import wait_saved

from ..conftest import Product


@dataclass(frozen=True, slots=True)
class Row:
    """A job in squeue."""

    id: int
    name: str
    state: str
    node: str
    reason: str


class Queue:
    """Slurm's commands."""

    def __init__(self, product: Product) -> None:
        self._paths = product.paths
        self._plan = practice_plan(product.paths.instance)
        self._environment = {"PATH": os.environ["PATH"], "SLURM_CONF": str(product.cluster.slurm.conf)}

    @property
    def plan(self) -> Plan:
        """The closet."""
        return self._plan

    def ask(self, *command: str, user: str | None = None, text: str = "") -> str:
        """What a command prints; as root, or as a user with the number that gpuhub has given."""
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
        """A plain user's batch job; its number."""
        quiet = ("--output=/dev/null", "--error=/dev/null")
        return int(self.ask("sbatch", "--parsable", *quiet, *options, user=user, text=f"#!/bin/sh\n{script}\n"))

    def rows(self) -> list[Row]:
        """All jobs that wait, run or complete."""
        lines = self.ask("squeue", "--noheader", "--format=%i|%j|%T|%N|%r").splitlines()
        return [Row(int(number), *rest) for number, *rest in (line.split("|") for line in lines)]

    def state(self, job: int) -> str:
        """Slurm's word; empty when it is over."""
        return next((row.state for row in self.rows() if row.id == job), "")

    def ours(self) -> list[Row]:
        """Those that stand for leases."""
        return [row for row in self.rows() if row.name.startswith(names.slurm_job(self._paths.instance, ""))]

    def wait_saved(self, job: int) -> None:
        """Until slurmctld has written what it knows."""
        wait_saved(self.ask, build_files(self._plan, self._paths).state, job)

    def end_plain_jobs(self) -> None:
        """Those of people who use sbatch."""
        ours = self.ours()
        for row in self.rows():
            if row not in ours:
                self.ask("scancel", str(row.id))

    def strangers(self) -> dict[str, int]:
        """Whole GPUs that run other jobs have, by UUID."""
        held = {}
        for text in self.ask("scontrol", "--details", "--oneliner", "show", "job").splitlines():
            if " JobState=RUNNING " not in text or f" JobName={names.slurm_job(self._paths.instance, '')}" in text:
                continue
            job = int(re.search(r"JobId=(\d+)", text)[1])
            for node, index in re.findall(r" Nodes=(\S+) \S+ \S+ GRES=gpu:\w+:1\(IDX:(\d+)\)", text):
                held[self._plan.gpu_uuids(self._plan.node(node))[int(index)]] = job
        return held


@dataclass(slots=True)
class SlurmObserver(Observer):
    """Sees also what plain jobs have: a GPU in a container, while Slurm has given it to somebody else's job."""

    queue: Queue | None = None
    #: Most GPUs that plain jobs had at one look, and containers.
    most: tuple[int, int] = (0, 0)

    def find(self) -> set[str]:
        """Only a container that runs before and after Slurm was asked is sure to have run meanwhile."""
        assert self.queue is not None
        before = {seen.id for seen in self.running()}
        try:
            held = self.queue.strangers()
        except (AssertionError, subprocess.TimeoutExpired):
            held = {}  # slurmctld is being started anew
        after = self.running()
        self.most = max(self.most[0], len(held)), max(self.most[1], sum(bool(seen.uuids) for seen in after))
        return doubles(after) | {
            f"{uuid}: {seen.owner}'s {seen.kind} {seen.id[:12]}, and Slurm's job {held[uuid]}"
            for seen in after
            if seen.id in before
            for uuid in seen.uuids
            if uuid in held
        }
