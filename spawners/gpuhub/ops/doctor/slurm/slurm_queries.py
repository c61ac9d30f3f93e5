"""Queries of Slurm through its commands and its API, and the Slurm part of `gpuhub doctor`."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gpuhub.common.errors import GpuhubError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, NodeSettings, SlurmSettings
from gpuhub.config.users.identity import find_known_uids
from gpuhub.ops.doctor.findings import Finding
from gpuhub.ops.doctor.node_facts import HostFacts
from gpuhub.ops.doctor.nodes.node_checks import NodeEnvironment
from gpuhub.ops.doctor.slurm import slurm_checks
from gpuhub.ops.doctor.slurm.slurm_checks import SlurmFacts, parse_clock, parse_config, parse_slurmds
from gpuhub.slurm_client.factory import make_client
from gpuhub.slurm_client.models import SlurmSite
from gpuhub.slurm_client.programs import SlurmPrograms
from gpuhub.slurm_client.site import check_site

#: The commands that gpuhub runs; `sacctmgr` and `sacct` only where there is accounting.
_COMMANDS = ("sbatch", "squeue", "sinfo", "scontrol", "scancel", "sacctmgr", "sacct")
#: Maximum wait for a command, seconds.
_TIMEOUT_S = 15
#: The default of Slurm's commands.
_CONF = Path("/etc/slurm/slurm.conf")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSiteChecks:
    """The checks of a Slurm site; see `BackendChecks`."""

    settings: SlurmSettings
    facts: SlurmFacts
    #: User → number that Slurm's nodes must know.
    numbers: Mapping[str, int]

    def check_site(self) -> Iterator[Finding]:
        return slurm_checks.check_slurm(self.facts, self.settings)

    def extend_environment(self, environment: NodeEnvironment) -> NodeEnvironment:
        paths = find_node_paths(self.settings, self.facts)
        return replace(environment, accounts=self.numbers, slurm_paths=paths)

    def check_node(self, node: NodeSettings, host: HostFacts) -> Iterator[Finding]:
        return slurm_checks.check_slurm_node(node, host, self.facts, self.settings, self.numbers)


async def read_slurm(cluster: ClusterSettings, paths: Paths) -> SlurmSiteChecks:
    """Read the facts of the cluster's Slurm site."""
    return SlurmSiteChecks(
        settings=cluster.slurm,
        facts=await read_slurm_facts(cluster),
        numbers=find_known_uids(cluster.users, paths.state),
    )


async def read_slurm_facts(cluster: ClusterSettings) -> SlurmFacts:
    """Read the facts of the site itself."""
    table = cluster.slurm
    site, problem = await _query_site(table)
    facts = SlurmFacts(
        site=site,
        problem=problem,
        settings_errors=() if site is None else tuple(check_site(cluster, site)),
        lacks_for_laptops=None
        if table.runtime == "docker"
        else tuple(await asyncio.to_thread(find_lacking_for_laptops, cluster)),
    )
    return facts if table.api == "rest" else await asyncio.to_thread(_add_command_facts, table, facts)


def find_lacking_for_laptops(cluster: ClusterSettings) -> Iterator[str]:
    """Yield what a laptop's files, logs and terminals need of this machine and do not find."""
    table = cluster.slurm
    homes = Path(cluster.storage.home.partition("{username}")[0])
    if not homes.is_dir():
        yield f"the homes in {homes}"
    program = table.image if table.runtime == "apptainer" else table.command
    if program is not None and not program.is_file():
        yield str(program)
    if table.runtime == "apptainer" and shutil.which("apptainer") is None:
        yield "apptainer"
    if SlurmPrograms(table.commands, table.conf).find("srun") is None:
        yield "srun"


async def _query_site(table: SlurmSettings) -> tuple[SlurmSite | None, str]:
    try:
        api = make_client(table)
        try:
            return await api.read_site(), ""
        finally:
            await api.close()
    except GpuhubError as error:
        return None, str(error)


def _add_command_facts(table: SlurmSettings, facts: SlurmFacts) -> SlurmFacts:
    programs = SlurmPrograms(table.commands, table.conf)
    missing = tuple(name for name in _COMMANDS if programs.find(name) is None)
    before = time.time()
    config = _run(programs, "scontrol", "show", "config") if "scontrol" not in missing else ""
    after = time.time()
    slurmctld_time = parse_clock(config)
    facts = replace(
        facts,
        missing=missing,
        config=parse_config(config or _read_conf(table)),
        ahead_s=None if slurmctld_time is None else (before + after) / 2 - slurmctld_time,
        within_s=(after - before) / 2 + 1,
        slurmds=parse_slurmds(_run(programs, "sinfo", "-h", "-N", "-o", "%N %v")) if "sinfo" not in missing else {},
    )
    return replace(facts, munge=check_munge(facts.munge_socket))


def _read_conf(table: SlurmSettings) -> str:
    """Return the text of slurm.conf, which has the socket of munged; used when slurmctld does not answer."""
    try:
        return (table.conf or _CONF).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _run(programs: SlurmPrograms, command: str, *arguments: str) -> str:
    """Return the output of one of Slurm's commands; empty if it fails."""
    environment = programs.environment | {"SLURM_TIME_FORMAT": "%s"}
    try:
        done = subprocess.run(
            [command, *arguments], check=False, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def check_munge(socket: str = "") -> str | None:
    """Return munge's error when it cannot sign or read; empty if it can, None if it is not installed here."""
    if shutil.which("munge") is None or shutil.which("unmunge") is None:
        return None
    options = [f"--socket={socket}"] if socket else []
    try:
        signed = subprocess.run(["munge", "-n", *options], check=False, capture_output=True, timeout=_TIMEOUT_S)
        read = subprocess.run(
            ["unmunge", *options], check=False, capture_output=True, input=signed.stdout, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return "munged does not answer"
    if signed.returncode == 0 and read.returncode == 0:
        return ""
    errors = (signed.stderr or read.stderr).decode("utf-8", "replace").strip().splitlines()
    return errors[0] if errors else "it fails without a message"


def find_node_paths(table: SlurmSettings, facts: SlurmFacts) -> dict[str, str]:
    """Return the paths that `probe.sh` checks on the nodes: the folder of Slurm's files, and the Epilog."""
    return {"slurm": str((table.conf or _CONF).parent), **({"epilog": facts.epilog} if facts.epilog else {})}
