"""A real Slurm on this machine, over loopback: munged, slurmctld, slurmds with GPUs that are /dev/null, and separate users.

On demand it has slurmdbd with MariaDB, and slurmrestd with tokens. All its files are in one folder; the machine's own files
do not change.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpuhub.config.slurm import SlurmSettings
from gpuhub.ops.slurm.files import format_cgroup_conf
from gpuhub.slurm_client.models import Submitter
from gpuhub_closet.slurm import slurm_config
from gpuhub_closet.slurm.slurm_config import (
    SlurmAccount,
    SlurmAccountingConfig,
    SlurmConfig,
    SlurmNodeConfig,
    SlurmPartitionConfig,
)
from tests.support.slurm.daemons import DEADLINE_S, REST_USER, Daemons, wait

#: The practice closet's GPUs, one for each node.
CARDS = (("rtx5090",), ("rtx5070",), ("rtx5060",))
#: Users that only Slurm's daemons know.
USERS = {"ada": 71001, "ben": 71002}
#: Program → Debian package.
_PROGRAMS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
_FOR_ACCOUNTS = {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"}
_FOR_REST = {"slurmrestd": "slurmrestd"}


@dataclass(frozen=True, slots=True)
class SlurmSite:
    """A running Slurm."""

    daemons: Daemons
    users: Mapping[str, SlurmAccount]

    @property
    def files(self) -> SlurmConfig:
        """The configuration of the site."""
        return self.daemons.files

    @property
    def folder(self) -> Path:
        """The folder of settings, state and logs: Slurm's own, and `NAME.out` of each daemon."""
        return self.files.folder

    def table(self, **further: object) -> SlurmSettings:
        """Return `[slurm]` of a cluster.toml for this site, by default with Slurm's commands."""
        url, key = self.daemons.rest_url, self.files.jwt_key
        return SlurmSettings.model_validate({"conf": self.files.conf, "rest_url": url, "rest_key": key, **further})

    def submitter(self, name: str) -> Submitter:
        """Return a user of the site as a submitter."""
        user = self.users[name]
        return Submitter(name=name, uid=user.uid, gid=user.uid, groups=tuple(number for _, number in user.groups))

    # -- commands -----------------------------------------------------------------------------------------------------

    def run(self, *command: str, user: str | None = None, given: str = "") -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands as a user of the site, in their home, or as root. It may fail."""
        known = self.users[user] if user else SlurmAccount(name="root", uid=0, home=self.folder)
        return subprocess.run(
            command,
            input=given,
            capture_output=True,
            text=True,
            env=self.daemons.environment,
            cwd=known.home,
            timeout=DEADLINE_S,
            check=False,
            user=known.uid,
            group=known.uid,
            extra_groups=[number for _, number in known.groups],
        )

    def ask(self, *command: str, user: str | None = None, given: str = "") -> str:
        """Return a command's output.

        Raises:
            RuntimeError: The command failed; the message has its output.
        """
        done = self.run(*command, user=user, given=given)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def submit(self, user: str | None, *options: str, script: str = "exec sleep 1000") -> int:
        """Submit a job by plain `sbatch` and return its number."""
        text = f"#!/bin/sh\n{script}\n"
        return int(self.ask("sbatch", "--parsable", "-o", "/dev/null", *options, user=user, given=text).split(";")[0])

    def state(self, job_id: int) -> str:
        """Return a job's state as Slurm names it; empty if slurmctld does not know the job."""
        return self.run("squeue", "-h", "-t", "all", "-j", str(job_id), "-o", "%T").stdout.strip()

    def idle_nodes(self) -> list[str]:
        """Return the nodes that are completely free and take work."""
        # A node has a line for each of its partitions.
        return sorted(set(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").stdout.split()))

    def wait_for_state(self, job_id: int, *states: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until a job is in one of these states."""
        wait(lambda: self.state(job_id) in states, f"job {job_id} is {' or '.join(states)}", deadline_s)

    def wait_for_nodes(self, count: int | None = None, deadline_s: float = DEADLINE_S) -> None:
        """Wait until this number of nodes is idle, by default all."""
        wanted = len(self.files.nodes) if count is None else count
        wait(lambda: self.daemons.check() and len(self.idle_nodes()) == wanted, f"{wanted} nodes are idle", deadline_s)

    # -- accounts -----------------------------------------------------------------------------------------------------

    def add_account(self, name: str, *users: str) -> None:
        """Add an account with these users to slurmdbd, and wait until slurmctld knows them."""
        cluster = f"cluster={self.files.cluster}"
        self.ask("sacctmgr", "-i", "add", "account", name, cluster)
        for user in users:
            self.ask("sacctmgr", "-i", "add", "user", user, f"account={name}", cluster)
            wait(partial(self._is_in, user, name), f"slurmctld knows {user} in {name}")

    def add_qos(self, name: str, *limits: str, users: Sequence[str]) -> None:
        """Add a QOS that these users may use, for example with `MaxWall=60`."""
        self.ask("sacctmgr", "-i", "add", "qos", name, *limits)
        for user in users:
            self.ask("sacctmgr", "-i", "modify", "user", user, "set", f"qos+={name}")

    def _is_in(self, user: str, account: str) -> bool:
        shown = self.run("scontrol", "-o", "show", "assoc_mgr", f"users={user}", f"accounts={account}", "flags=assoc")
        return f"UserName={user}(" in shown.stdout


@contextmanager
def slurm_site(
    *,
    port: int,
    nodes: Sequence[Sequence[str]] = CARDS,
    users: Mapping[str, int] = USERS,
    has_accounts: bool = False,
    has_rest: bool = False,
    cpus: int = 8,
    memory_mib: int = 16000,
    partitions: Sequence[SlurmPartitionConfig] = (SlurmPartitionConfig(),),
    epilog: Path | None = None,
    kill_wait_s: int = 5,
    min_job_age_s: int = 300,
    scheduler: str = slurm_config.SCHEDULER,
    devices: Sequence[Sequence[tuple[int, int]]] | None = None,
    further: Sequence[str] = (),
) -> Iterator[SlurmSite]:
    """A Slurm of the cluster `gpuhub-test` with all its nodes idle; nothing is left of it afterwards.

    Args:
        port: slurmctld's on loopback. The nodes sx1, sx2, … have the next ones, then come slurmdbd and slurmrestd.
        nodes: for each the types of its GPUs by index, as `gpuhub_closet.slurm.slurm_config.SlurmNodeConfig` has them.
        users: names and numbers.
        has_accounts: slurmdbd and a MariaDB, with an account `lab` that all users are in.
        has_rest: slurmrestd, and tokens.
        cpus: of each node, whatever this machine has.
        memory_mib: of each node, whatever this machine has.
        partitions: as in `gpuhub_closet.slurm.slurm_config`.
        epilog: run as root at each job's end.
        kill_wait_s: between SIGTERM and SIGKILL.
        min_job_age_s: how long slurmctld tells of ended jobs.
        scheduler: `SchedulerParameters`.
        devices: Numbers of the character devices that stand for each node's GPUs; Slurm then limits jobs to their own,
            with the cgroup.conf that `gpuhub slurm init` writes. By default each is /dev/null.
        further: lines of slurm.conf.

    Raises:
        RuntimeError: a program is missing; its Debian package is named.
    """
    _refuse_missing(has_accounts=has_accounts, has_rest=has_rest)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp", prefix="gpuhub-slurm-")))
        # munged requires that all users can access its socket's folder.
        folder.chmod(0o711)
        last = port + len(nodes)
        files = SlurmConfig(
            cluster="gpuhub-test",
            nodes=tuple(
                SlurmNodeConfig(
                    name=f"sx{number}",
                    address="127.0.0.1",
                    port=port + number,
                    gpus=tuple(gpus),
                    cpus=cpus,
                    memory_mib=memory_mib,
                    hostname="localhost",
                )
                for number, gpus in enumerate(nodes, start=1)
            ),
            folder=folder,
            munge_socket=folder / "munge.socket",
            port=port,
            partitions=tuple(partitions),
            epilog=epilog,
            accounting=SlurmAccountingConfig(port=last + 1) if has_accounts else None,
            jwt_key=folder / "jwt.key" if has_rest else None,
            kill_wait_s=kill_wait_s,
            min_job_age_s=min_job_age_s,
            scheduler_parameters=scheduler,
            has_cgroups=devices is not None,
            extra_lines=tuple(further),
        )
        known = {name: SlurmAccount(name=name, uid=uid, home=folder / "homes" / name) for name, uid in users.items()}
        daemons = Daemons(files, f"http://127.0.0.1:{last + 2}" if has_rest else None)
        site = SlurmSite(daemons, known)
        _prepare(site, devices)
        if files.has_cgroups:
            stack.callback(_remove_cgroups, files)
        stack.callback(daemons.close)
        daemons.open()
        _start(site)
        yield site


def _refuse_missing(*, has_accounts: bool, has_rest: bool) -> None:
    wanted = {**_PROGRAMS, **(_FOR_ACCOUNTS if has_accounts else {}), **(_FOR_REST if has_rest else {})}
    missing = sorted({package for program, package in wanted.items() if shutil.which(program) is None})
    if has_rest and not list(Path("/usr/lib").glob("*/slurm*/auth_jwt.so")):
        missing.append("slurm-wlm-jwt-plugin")
    if missing:
        raise RuntimeError(f"a Slurm of one's own lacks: apt-get install {' '.join(missing)}")


def _prepare(site: SlurmSite, devices: Sequence[Sequence[tuple[int, int]]] | None) -> None:
    files = site.files
    for name in ("state", "spool", "homes"):
        (files.folder / name).mkdir(mode=0o755)
    numbers = None if devices is None else [number for node in devices for number in node]
    for index, device in enumerate(files.devices):
        device.parent.mkdir(parents=True, exist_ok=True)
        if numbers is None:
            device.symlink_to("/dev/null")
        else:
            os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(*numbers[index]))
            device.chmod(0o666)
    if files.has_cgroups:
        files.cgroup_conf.write_text(format_cgroup_conf())
    for user in site.users.values():
        user.home.mkdir(mode=0o700)
        shutil.chown(user.home, user.uid, user.uid)
    rest = SlurmAccount(name=REST_USER[0], uid=REST_USER[1], home=files.folder)
    etc = files.folder / "etc"
    subprocess.run(["cp", "-a", "/etc", etc], check=True)
    passwd, group = etc / "passwd", etc / "group"
    known = slurm_config.format_accounts(passwd.read_text(), group.read_text(), [*site.users.values(), rest])
    passwd.write_text(known[0])
    group.write_text(known[1])
    for path in (files.munge_socket.with_suffix(".key"), files.jwt_key):
        if path is not None:
            path.touch(mode=0o600)
            path.write_bytes(secrets.token_bytes(1024))
    files.conf.write_text(slurm_config.format_slurm_conf(files))
    files.gres_conf.write_text(slurm_config.format_gres_conf(files))
    if files.accounting is not None:
        files.slurmdbd_conf.touch(mode=0o600)
        files.slurmdbd_conf.write_text(slurm_config.format_slurmdbd_conf(files))


def _remove_cgroups(files: SlurmConfig) -> None:
    """Remove the control groups that slurmd leaves; Slurm 22.05 names them after the node."""
    root = Path("/sys/fs/cgroup")
    for node in files.nodes:
        name = f"slurm_{node.name}"
        for group in (*root.glob(name), *root.glob(f"*/{name}")):
            for folder, _, _ in os.walk(group, topdown=False):
                Path(folder).rmdir()


def _start(site: SlurmSite) -> None:
    daemons, files = site.daemons, site.files
    daemons.start("munged")
    wait(lambda: daemons.check() and files.munge_socket.exists(), "munged listens")
    if files.accounting is not None:
        _start_accounts(site)
    daemons.start("slurmctld")
    for node in files.nodes:
        daemons.start(node.name)
    if daemons.rest_url is not None:
        daemons.start("slurmrestd")
    site.wait_for_nodes()
    if files.accounting is not None:
        site.add_account("lab", *site.users)


def _start_accounts(site: SlurmSite) -> None:
    data = site.folder / "database"
    make = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db"]
    subprocess.run(make, check=True, capture_output=True)
    site.daemons.start("mariadbd")
    wait(site.daemons.database_socket.exists, "MariaDB listens")
    site.daemons.start("slurmdbd")
    cluster = ("sacctmgr", "-i", "add", "cluster", site.files.cluster)
    wait(lambda: site.run(*cluster).returncode == 0, "slurmdbd knows the cluster")
