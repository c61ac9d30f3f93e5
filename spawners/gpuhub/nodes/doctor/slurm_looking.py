"""Asks Slurm, by its commands and its API; what the answers mean is said in `slurm_checks`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from gpuhub.errors import GpuhubError
from gpuhub.nodes.doctor.looking import find_accounts
from gpuhub.nodes.doctor.slurm_facts import SlurmFacts, parse_config, parse_moment, parse_slurmds
from gpuhub.paths import Paths
from gpuhub.settings import Cluster, Slurm
from gpuhub.slurm.make import make_api
from gpuhub.slurm.site import check_site
from gpuhub.slurm.values import Site

#: What gpuhub runs; `sacctmgr` and `sacct` are asked where there is accounting.
_COMMANDS = ("sbatch", "squeue", "sinfo", "scontrol", "scancel", "sacctmgr", "sacct")
_PATIENCE_S = 15
#: Where Slurm's commands look by themselves.
_CONF = Path("/etc/slurm/slurm.conf")


async def look_at_slurm(cluster: Cluster) -> SlurmFacts:
    """All that is checked of the site itself."""
    table = cluster.slurm
    site, trouble = await _ask_site(table)
    told = SlurmFacts(site=site, trouble=trouble, mistakes=() if site is None else tuple(check_site(cluster, site)))
    return told if table.api == "rest" else await asyncio.to_thread(_look_by_commands, table, told)


async def _ask_site(table: Slurm) -> tuple[Site | None, str]:
    try:
        api = make_api(table)
        try:
            return await api.site(), ""
        finally:
            await api.close()
    except GpuhubError as error:
        return None, str(error)


def _look_by_commands(table: Slurm, told: SlurmFacts) -> SlurmFacts:
    folder = None if table.commands is None else str(table.commands)
    missing = tuple(name for name in _COMMANDS if shutil.which(name, path=folder) is None)
    before = time.time()
    config = _run(table, "scontrol", "show", "config") if "scontrol" not in missing else ""
    after = time.time()
    moment = parse_moment(config)
    told = replace(
        told,
        missing=missing,
        config=parse_config(config or _read_conf(table)),
        ahead_s=None if moment is None else (before + after) / 2 - moment,
        within_s=(after - before) / 2 + 1,
        slurmds=parse_slurmds(_run(table, "sinfo", "-h", "-N", "-o", "%N %v")) if "sinfo" not in missing else {},
    )
    return replace(told, munge=try_munge(told.munge_socket))


def _read_conf(table: Slurm) -> str:
    """slurm.conf itself, where slurmctld does not tell: it says where munged listens."""
    try:
        return (table.conf or _CONF).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _run(table: Slurm, command: str, *words: str) -> str:
    """What one of Slurm's commands prints; empty where it fails."""
    environment = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    if table.conf is not None:
        environment["SLURM_CONF"] = str(table.conf)
    program = command if table.commands is None else str(table.commands / command)
    try:
        done = subprocess.run(
            [program, *words], check=False, capture_output=True, text=True, timeout=_PATIENCE_S, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def try_munge(socket: str = "") -> str | None:
    """What munge says when it cannot sign or read; empty where it can, None where it is not installed here."""
    if shutil.which("munge") is None or shutil.which("unmunge") is None:
        return None
    where = [f"--socket={socket}"] if socket else []
    try:
        made = subprocess.run(["munge", "-n", *where], check=False, capture_output=True, timeout=_PATIENCE_S)
        read = subprocess.run(
            ["unmunge", *where], check=False, capture_output=True, input=made.stdout, timeout=_PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return "munged does not answer"
    if made.returncode == 0 and read.returncode == 0:
        return ""
    said = (made.stderr or read.stderr).decode("utf-8", "replace").strip().splitlines()
    return said[0] if said else "it fails without a word"


def find_numbers(cluster: Cluster, paths: Paths) -> dict[str, int]:
    """The users' numbers that gpuhub has: of their accounts here, else those that it chose itself."""
    names = (*cluster.users.allowed, *cluster.users.admins)
    kept = paths.state / "uids.json"
    chosen: dict[str, int] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    return {**chosen, **find_accounts({*names, *chosen})}


def paths_on_nodes(table: Slurm, facts: SlurmFacts) -> dict[str, str]:
    """What `probe.sh` is to look at on the nodes: the folder of Slurm's files, and the Epilog."""
    return {"slurm": str((table.conf or _CONF).parent), **({"epilog": facts.epilog} if facts.epilog else {})}
