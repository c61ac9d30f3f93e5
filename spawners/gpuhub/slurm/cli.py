"""Slurm asked by its own commands."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpuhub.errors import SetupError
from gpuhub.identity import find_account
from gpuhub.slurm import inventory, parsing, trouble
from gpuhub.slurm.api import SlurmRefused, SlurmUnreachable, require_job
from gpuhub.slurm.ending import signal_until_over
from gpuhub.slurm.people import FindName, People
from gpuhub.slurm.submission import END_SIGNAL, KEPT, format_sbatch
from gpuhub.slurm.values import GpuTime, Job, Look, Site, Submission, Submitter

#: A command gives up on a slurmctld that is not there after 9 s, and says so; without munged it hangs.
PATIENCE_S = 20.0
#: So many commands at once; each waits in a thread, since only threads can start a process as another user here.
_AT_ONCE = 8
_PROGRAMS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue")
_SACCT = "--format=User,Account,Start,End,AllocTRES"


class SlurmCli:
    """`SlurmApi` by sbatch, squeue, scancel, … of the head node. They run as who runs this, sbatch as the submitter:
    root becomes that user, anybody else needs a rule of sudo's for sbatch alone.
    """

    def __init__(
        self,
        *,
        commands: Path | None = None,
        conf: Path | None = None,
        patience_s: float = PATIENCE_S,
        find_name: FindName = find_account,
    ) -> None:
        """`commands`: their folder, or None for PATH; `conf`: slurm.conf, or None for where they look by themselves."""
        path = os.environ.get("PATH", os.defpath)
        self._path = path if commands is None else f"{commands}{os.pathsep}{path}"
        self._commands = commands
        self._conf = conf
        self._patience_s = patience_s
        # Nothing else of the environment: it has gpuhub's own secrets.
        self._environment = {"PATH": self._path, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "SLURM_TIME_FORMAT": "%s"}
        if conf is not None:
            self._environment["SLURM_CONF"] = str(conf)
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="slurm")
        self._people = People(find_name)

    async def look(self) -> Look:
        """See `SlurmApi`."""
        jobs, nodes = await asyncio.gather(self._jobs(), self._document("sinfo"))
        return Look(jobs=jobs, nodes=trouble.read(inventory.parse_nodes, nodes))

    async def job(self, job_id: int, *, name: str | None = None) -> Job | None:
        """See `SlurmApi`."""
        # Slurm 22.05 lists all jobs whichever are asked for.
        jobs = await self._jobs(f"--jobs={job_id}")
        return parsing.pick_job(jobs, job_id, name)

    async def submit(self, submission: Submission) -> int:
        """See `SlurmApi`. Where nobody answers in time the job may yet be there: look for its name."""
        command = format_sbatch(submission)
        said = await self._ask(*command, given=submission.script, submitter=submission.submitter)
        # `42`, or `42;cluster`.
        number = said.strip().partition(";")[0]
        if not number.isdecimal():
            raise SlurmUnreachable(f"sbatch gave no number of a job: {said.strip()[:200]!r}")
        return int(number)

    async def cancel(self, job_id: int, *, name: str | None = None, at_once: bool = False) -> None:
        """See `SlurmApi`."""
        only = () if name is None else (f"--name={name}",)
        if at_once:
            # To the script alone; scancel would try again and again to signal one that waits.
            signal = ("scancel", "--state=RUNNING", "--batch", f"--signal={END_SIGNAL}", *only, f"{job_id}")
            waiting = ("scancel", "--state=PENDING", *only, f"{job_id}")
            await signal_until_over(
                lambda: self.job(job_id, name=name),
                lambda: self._unless_over(*signal),
                lambda: self._unless_over(*waiting),
            )
        await self._unless_over("scancel", *only, f"{job_id}")

    async def keep(self, job_id: int, *, name: str | None = None) -> None:
        """See `SlurmApi`."""
        if name is None or await self.job(job_id, name=name) is not None:
            await self._unless_over("scontrol", "update", f"JobId={job_id}", f"Comment={KEPT}")

    async def set_time_limit(self, job_id: int, seconds: int, *, name: str | None = None) -> None:
        """See `SlurmApi`."""
        await require_job(self, job_id, name)
        await self._ask("scontrol", "update", f"JobId={job_id}", f"TimeLimit={math.ceil(seconds / 60)}")

    async def shrink(self, job_id: int, nodes: Sequence[str], *, name: str | None = None) -> None:
        """See `SlurmApi`."""
        await require_job(self, job_id, name)
        await self._ask("scontrol", "update", f"JobId={job_id}", f"NodeList={','.join(nodes)}")

    async def site(self) -> Site:
        """See `SlurmApi`."""
        self._require_programs()
        trouble.require_version(trouble.parse_version(await self._ask("sbatch", "--version")))
        config = inventory.parse_settings(await self._ask("scontrol", "show", "config"))
        # slurmctld's own, which the commands' need not be.
        trouble.require_version(trouble.parse_version(config.get("SLURM_VERSION", "")))
        partitions = await self._ask("scontrol", "show", "partition", "--oneliner")
        nodes = await self._document("sinfo")
        reservations = await self._ask("scontrol", "show", "reservation", "--oneliner")
        accounts, qos = await self._accounting(config)
        return Site(
            version=trouble.parse_version(config["SLURM_VERSION"]),
            cluster=config.get("ClusterName", ""),
            partitions=trouble.read(inventory.parse_partition_lines, partitions),
            nodes=trouble.read(inventory.parse_nodes, nodes),
            has_accounting=accounts is not None,
            accounts=accounts or (),
            qos=qos or (),
            reservations=inventory.parse_reservation_lines(reservations),
        )

    async def gpu_time(self, since: float, until: float) -> Sequence[GpuTime]:
        """See `SlurmApi`."""
        window = (f"--starttime=uts{math.floor(since)}", f"--endtime=uts{math.ceil(until)}")
        # Those put back into the queue ran before, too.
        options = ("--allusers", "--allocations", "--duplicates", "--noheader", "--parsable2", _SACCT)
        said = await self._ask("sacct", *options, *window)
        return trouble.read(lambda lines: inventory.parse_gpu_time(lines, since, until), said)

    async def close(self) -> None:
        """See `SlurmApi`."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _jobs(self, *options: str) -> tuple[Job, ...]:
        document = await self._document("squeue", "--states=all", *options)
        return await self._people.named(trouble.read(parsing.parse_jobs, document))

    async def _document(self, program: str, *options: str) -> Any:
        """Raises SlurmUnreachable where it complains: 22.05 then lists nothing at all, with exit status 0."""
        said = await self._ask(program, "--json", "--all", *options)
        document = trouble.read(json.loads, said)
        complaints = parsing.errors(document)
        if complaints:
            raise SlurmUnreachable(f"Slurm does not answer: {'; '.join(complaints)}")
        return document

    async def _unless_over(self, *command: str) -> None:
        """Ask for something that nobody misses once the job has ended."""
        try:
            await self._ask(*command)
        except SlurmRefused as refusal:
            if not trouble.is_over(str(refusal)):
                raise

    async def _accounting(self, config: Mapping[str, str]) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
        """Accounts and QOS; None where slurmdbd is not used, or does not answer."""
        if not config.get("AccountingStorageType", "").endswith("slurmdbd") or not self._find("sacctmgr"):
            return None, None
        try:
            found = [
                await self._ask("sacctmgr", "--noheader", "--parsable2", "show", kind, f"format={field}")
                for kind, field in (("account", "Account"), ("qos", "Name"))
            ]
        except (SlurmRefused, SlurmUnreachable):
            return None, None
        return tuple(sorted(set(found[0].split()))), tuple(sorted(set(found[1].split())))

    def _require_programs(self) -> None:
        missing = [program for program in _PROGRAMS if not self._find(program)]
        if missing:
            where = "on PATH" if self._commands is None else f"in {self._commands}"
            raise SetupError(f"Slurm's commands are not {where}: {', '.join(missing)} (Debian: slurm-client)")
        # They would wait a minute for it.
        if self._conf is not None and not self._conf.is_file():
            raise SetupError(f"there is no {self._conf}")

    def _find(self, program: str) -> str | None:
        return shutil.which(program, path=self._path if self._commands is None else str(self._commands))

    async def _ask(self, program: str, *options: str, given: str = "", submitter: Submitter | None = None) -> str:
        """What a command prints.

        Raises:
            SlurmUnreachable: nobody answers, or not in time.
            SlurmRefused: with the command's last words.
        """
        found = self._find(program)
        if found is None:
            raise SlurmUnreachable(f"Slurm's command {program} is not there")
        command, become = _as_submitter([found, *options], submitter)

        def run() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command,
                input=given,
                capture_output=True,
                text=True,
                errors="replace",
                env=self._environment,
                cwd="/",
                timeout=self._patience_s,
                start_new_session=True,
                check=False,
                **become,
            )

        try:
            done = await asyncio.get_running_loop().run_in_executor(self._threads, run)
        except subprocess.TimeoutExpired as error:
            last = trouble.last_words((error.stderr or b"").decode(errors="replace"))
            text = f"Slurm does not answer: {program} took more than {self._patience_s:.0f} s"
            raise SlurmUnreachable(f"{text} ({last})" if last else text) from error
        except OSError as error:
            raise SlurmUnreachable(f"Slurm's command {program} can't be started: {error.strerror}") from error
        if done.returncode:
            raise trouble.parse_refusal(done.stderr or done.stdout)
        return done.stdout


def _as_submitter(command: list[str], submitter: Submitter | None) -> tuple[list[str], dict[str, Any]]:
    """A command, and as whom it is to be started."""
    own = os.geteuid()
    if submitter is None or submitter.uid == own:
        return command, {}
    if own == 0:
        return command, {"user": submitter.uid, "group": submitter.gid, "extra_groups": list(submitter.groups)}
    # By the number: a name could mean an option, or somebody else.
    return ["sudo", "--non-interactive", f"--user=#{submitter.uid}", "--", *command], {}
