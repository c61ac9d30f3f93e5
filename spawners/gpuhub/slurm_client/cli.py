"""A Slurm client that runs Slurm's own commands."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpuhub.common.errors import SetupError
from gpuhub.config.users.identity import find_account_name
from gpuhub.slurm_client import inventory, messages, parsers
from gpuhub.slurm_client.interface import UNDRAIN_REASON, SlurmRefused, SlurmUnreachable
from gpuhub.slurm_client.job_control import FindName, UserNames, require_job, signal_until_ended
from gpuhub.slurm_client.models import (
    GpuTime,
    SlurmJob,
    SlurmNode,
    SlurmSite,
    SlurmSnapshot,
    SlurmSubmission,
    Submitter,
)
from gpuhub.slurm_client.programs import SlurmPrograms, build_user_command
from gpuhub.slurm_client.submission import END_SIGNAL, PERSISTED_COMMENT, format_sbatch

#: Time limit of a command, seconds. It fails after 9 s without slurmctld, and hangs without munged.
TIMEOUT_S = 20.0
#: Number of concurrent commands. Each waits in a thread.
_MAX_COMMANDS = 8
_PROGRAMS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue")
_SACCT = "--format=User,Account,Start,End,AllocTRES"


class SlurmCliClient:
    """A `SlurmClient` that runs sbatch, squeue, scancel and so on on the head node.

    They run as the user of this process, except sbatch, which runs as the submitter: root switches to that user, and
    other users need a rule of sudo for sbatch alone.
    """

    def __init__(
        self,
        *,
        commands: Path | None = None,
        conf: Path | None = None,
        timeout_s: float = TIMEOUT_S,
        find_name: FindName = find_account_name,
    ) -> None:
        """Create the client.

        Args:
            commands: Folder of the commands; None for PATH.
            conf: Path of slurm.conf; None for the commands' default.
        """
        self._programs = SlurmPrograms(commands, conf)
        self._environment = self._programs.environment | {"SLURM_TIME_FORMAT": "%s"}
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_MAX_COMMANDS, thread_name_prefix="slurm")
        self._user_names = UserNames(find_name)
        #: Command whose JSON lists the nodes. Since 23.02 sinfo's has the lines of its table in place of them.
        self._list_nodes: tuple[str, ...] = ("sinfo",)

    async def read_snapshot(self) -> SlurmSnapshot:
        jobs, nodes = await asyncio.gather(self._jobs(), self._nodes())
        return SlurmSnapshot(jobs=jobs, nodes=nodes)

    async def find_job(self, job_id: int, *, name: str | None = None) -> SlurmJob | None:
        # Slurm 22.05 lists all jobs in any case; later versions fail for a job that slurmctld does not know.
        try:
            jobs = await self._jobs(f"--jobs={job_id}")
        except SlurmRefused as refusal:
            if not messages.is_job_over(str(refusal)):
                raise
            return None
        return parsers.select_job(jobs, job_id, name)

    async def submit(self, submission: SlurmSubmission) -> int:
        """Submit a job. After a timeout the job may exist nevertheless: search for its name."""
        command = format_sbatch(submission)
        sbatch_output = await self._run(*command, given=submission.script, submitter=submission.submitter)
        # `42`, or `42;cluster`.
        number = sbatch_output.strip().partition(";")[0]
        if not number.isdecimal():
            raise SlurmUnreachable(f"sbatch printed no job number: {sbatch_output.strip()[:200]!r}")
        return int(number)

    async def cancel(self, job_id: int, *, name: str | None = None, at_once: bool = False) -> None:
        only = () if name is None else (f"--name={name}",)
        if at_once:
            # To the script alone, because scancel would retry to signal a pending job.
            signal = ("scancel", "--state=RUNNING", "--batch", f"--signal={END_SIGNAL}", *only, f"{job_id}")
            waiting = ("scancel", "--state=PENDING", *only, f"{job_id}")
            await signal_until_ended(
                lambda: self.find_job(job_id, name=name),
                lambda: self._run_unless_over(*signal),
                lambda: self._run_unless_over(*waiting),
            )
        await self._run_unless_over("scancel", *only, f"{job_id}")

    async def persist_job(self, job_id: int, *, name: str | None = None) -> None:
        if name is None or await self.find_job(job_id, name=name) is not None:
            await self._run_unless_over("scontrol", "update", f"JobId={job_id}", f"Comment={PERSISTED_COMMENT}")

    async def set_time_limit(self, job_id: int, seconds: int, *, name: str | None = None) -> None:
        await require_job(self, job_id, name)
        await self._run("scontrol", "update", f"JobId={job_id}", f"TimeLimit={math.ceil(seconds / 60)}")

    async def shrink(self, job_id: int, nodes: Sequence[str], *, name: str | None = None) -> None:
        await require_job(self, job_id, name)
        await self._run("scontrol", "update", f"JobId={job_id}", f"NodeList={','.join(nodes)}")

    async def drain_node(self, node: str, reason: str) -> None:
        await self._run("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}")

    async def undrain_node(self, node: str) -> None:
        await self._run("scontrol", "update", f"NodeName={node}", "State=UNDRAIN", f"Reason={UNDRAIN_REASON}")

    async def read_site(self) -> SlurmSite:
        self._require_programs()
        messages.require_version(messages.parse_version(await self._run("sbatch", "--version")))
        config = inventory.parse_settings(await self._run("scontrol", "show", "config"))
        # slurmctld's own version, which may differ from the commands'.
        messages.require_version(messages.parse_version(config.get("SLURM_VERSION", "")))
        partitions = await self._run("scontrol", "show", "partition", "--oneliner")
        nodes = await self._nodes()
        reservations = await self._run("scontrol", "show", "reservation", "--oneliner")
        accounts, qos = await self._read_accounting(config)
        return SlurmSite(
            version=messages.parse_version(config["SLURM_VERSION"]),
            cluster=config.get("ClusterName", ""),
            partitions=messages.parse_output(inventory.parse_partition_lines, partitions),
            nodes=nodes,
            has_accounting=accounts is not None,
            accounts=accounts or (),
            qos=qos or (),
            reservations=inventory.parse_reservation_lines(reservations),
        )

    async def read_gpu_time(self, since: float, until: float) -> Sequence[GpuTime]:
        window = (f"--starttime=uts{math.floor(since)}", f"--endtime=uts{math.ceil(until)}")
        # Duplicates are the earlier runs of requeued jobs.
        options = ("--allusers", "--allocations", "--duplicates", "--noheader", "--parsable2", _SACCT)
        output = await self._run("sacct", *options, *window)
        return messages.parse_output(lambda lines: inventory.parse_gpu_time(lines, since, until), output)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _jobs(self, *options: str) -> tuple[SlurmJob, ...]:
        document = await self._run_json("squeue", "--states=all", *options)
        return await self._user_names.add_names(messages.parse_output(parsers.parse_jobs, document))

    async def _nodes(self) -> tuple[SlurmNode, ...]:
        document = await self._run_json(*self._list_nodes)
        if isinstance(document, dict) and "sinfo" in document:
            self._list_nodes = ("scontrol", "show", "nodes")
            document = await self._run_json(*self._list_nodes)
        return messages.parse_output(inventory.parse_nodes, document)

    async def _run_json(self, program: str, *options: str) -> Any:
        """Run a command and return its JSON document.

        Raises:
            SlurmUnreachable: The document reports an error; 22.05 then lists nothing, with exit status 0.
        """
        output = await self._run(program, "--json", "--all", *options)
        document = messages.parse_output(json.loads, output)
        errors = parsers.read_errors(document)
        if errors:
            raise SlurmUnreachable(f"Slurm does not answer: {'; '.join(errors)}")
        return document

    async def _run_unless_over(self, *command: str) -> None:
        """Run a command and ignore a refusal because the job has ended."""
        try:
            await self._run(*command)
        except SlurmRefused as refusal:
            if not messages.is_job_over(str(refusal)):
                raise

    async def _read_accounting(
        self, config: Mapping[str, str]
    ) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
        """Return accounts and QOS, or None if slurmdbd is not used or does not answer."""
        if not config.get("AccountingStorageType", "").endswith("slurmdbd") or not self._programs.find("sacctmgr"):
            return None, None
        try:
            outputs = [
                await self._run("sacctmgr", "--noheader", "--parsable2", "show", kind, f"format={field}")
                for kind, field in (("account", "Account"), ("qos", "Name"))
            ]
        except (SlurmRefused, SlurmUnreachable):
            return None, None
        return tuple(sorted(set(outputs[0].split()))), tuple(sorted(set(outputs[1].split())))

    def _require_programs(self) -> None:
        missing = [program for program in _PROGRAMS if not self._programs.find(program)]
        if missing:
            where = self._programs.place
            raise SetupError(f"Slurm's commands are not {where}: {', '.join(missing)} (Debian: slurm-client)")
        # Without it the commands would wait for a minute.
        conf = self._programs.conf
        if conf is not None and not conf.is_file():
            raise SetupError(f"there is no {conf}")

    async def _run(self, program: str, *options: str, given: str = "", submitter: Submitter | None = None) -> str:
        """Run a command and return its output.

        Raises:
            SlurmUnreachable: Slurm does not answer in time.
            SlurmRefused: The command failed; the text has its message.
        """
        path = self._programs.find(program)
        if path is None:
            raise SlurmUnreachable(f"Slurm's command {program} is not installed")
        command = build_user_command([path, *options], submitter)

        def run() -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                command,
                input=given,
                capture_output=True,
                text=True,
                errors="replace",
                env=self._environment,
                cwd="/",
                timeout=self._timeout_s,
                start_new_session=True,
                check=False,
            )

        try:
            done = await asyncio.get_running_loop().run_in_executor(self._threads, run)
        except subprocess.TimeoutExpired as error:
            last = messages.shorten_error((error.stderr or b"").decode(errors="replace"))
            text = f"Slurm does not answer: {program} took more than {self._timeout_s:.0f} s"
            raise SlurmUnreachable(f"{text} ({last})" if last else text) from error
        except OSError as error:
            raise SlurmUnreachable(f"Slurm's command {program} can't be started: {error.strerror}") from error
        if done.returncode:
            raise messages.parse_refusal(done.stderr or done.stdout)
        return done.stdout
