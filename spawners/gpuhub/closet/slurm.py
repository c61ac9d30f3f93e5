"""The files of the closet's own Slurm, which its daemons (`slurm_daemons`) and Slurm's commands read."""

from __future__ import annotations

import hashlib
import os
import pwd
import secrets
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

from gpuhub import identity
from gpuhub.closet.places import node_places, slurm_folder
from gpuhub.closet.plan import ClosetNode, Plan
from gpuhub.closet.slurm_files import (
    SlurmFiles,
    SlurmNode,
    SlurmUser,
    format_accounts,
    format_gres_conf,
    format_slurm_conf,
)
from gpuhub.errors import SetupError
from gpuhub.paths import Paths
from gpuhub.policy import Users
from gpuhub.slurm.table import Slurm

#: Asked of Slurm only to share them out: containers have limits of their own, and all nodes are this one machine.
NODE_CPUS = 8
NODE_MEMORY_MIB = 32768
#: Short, so that a lost node is noticed while one looks.
SLURMD_TIMEOUT_S = 30

EPILOG = Path(__file__).parents[1] / "slurm" / "epilog.sh"
#: Program → the Debian package that brings it.
PROGRAMS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "docker": "docker-cli or docker.io",
}
#: For tests only.
REST_PROGRAMS = {"slurmrestd": "slurmrestd"}
#: As whom slurmrestd runs: it refuses root, and Slurm's own user.
REST_USER = SlurmUser(name="slurmrest", uid=61099, home=Path("/nonexistent"))


def build_files(plan: Plan, paths: Paths) -> SlurmFiles:
    """What Slurm is told of the closet."""
    folder = slurm_folder(paths)
    return SlurmFiles(
        cluster=plan.instance,
        nodes=tuple(_node(node) for node in plan.nodes),
        folder=folder,
        munge_socket=folder / "munge" / "munge.socket",
        head_name=head_name(plan),
        head_address=str(plan.head),
        port=build_port(plan.instance),
        epilog=folder / "epilog",
        slurmd_timeout_s=SLURMD_TIMEOUT_S,
        # The head's address on the closet's bridge only: this machine may have a Slurm of its own.
        further=("CommunicationParameters=NoCtldInAddrAny",),
    )


def _node(node: ClosetNode) -> SlurmNode:
    return SlurmNode(
        name=node.name,
        address=str(node.address),
        gpus=tuple(Slurm().gpu_type(card.model) for card in node.cards if not card.mig),
        cpus=NODE_CPUS,
        memory_mib=NODE_MEMORY_MIB,
    )


def head_name(plan: Plan) -> str:
    """What slurmctld's machine calls itself there."""
    return f"{plan.instance}-head"


def build_port(instance: str) -> int:
    """Where slurmctld listens, from 26000 on: no two closets, nor a system's Slurm, have the same."""
    return 26000 + int.from_bytes(hashlib.sha256(instance.encode()).digest()[2:4]) % 1000


def build_epilog(paths: Paths) -> str:
    """The Epilog that every node runs: gpuhub's own, with the Docker of the node it is run on."""
    sockets = node_places(paths, "NODE").docker_url.replace("NODE", "$SLURMD_NODENAME")
    return f'#!/bin/sh\nDOCKER_HOST="{sockets}" exec {shlex.quote(str(EPILOG))}\n'


def prepare(plan: Plan, paths: Paths, users: Users, *, has_rest: bool = False) -> None:
    """Write all that the daemons read, with `has_rest` slurmrestd's too; may be called again at any time.

    Raises:
        SetupError: something is not installed.
    """
    programs = PROGRAMS | (REST_PROGRAMS if has_rest else {})
    missing = sorted({package for program, package in programs.items() if shutil.which(program) is None})
    if missing:
        raise SetupError(f"the practice closet's Slurm needs programs that are missing: {', '.join(missing)}")
    files = build_files(plan, paths)
    if has_rest:
        _prepare_rest(paths)
        files = replace(files, jwt_key=jwt_key_file(paths))
    is_new = not files.conf.exists()
    for folder, mode in (
        (files.folder, 0o755),
        (etc_folder(paths), 0o755),
        (files.munge_socket.parent, 0o755),
        (files.spool, 0o755),
        (files.state, 0o700),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(mode)
    for device in files.devices:
        device.parent.mkdir(parents=True, exist_ok=True)
        if not device.is_symlink():
            device.symlink_to("/dev/null")
    _write_etc(plan, paths, users)
    _write(key_file(paths), secrets.token_hex(512), 0o600, keep=True)
    _write(files.folder / "epilog", build_epilog(paths), 0o755)
    _write(files.gres_conf, format_gres_conf(files))
    if is_new:
        _forget_file(paths).touch()
    _write(files.conf, format_slurm_conf(files))


def etc_folder(paths: Paths) -> Path:
    """What lies over the daemons' /etc: passwd, group, hosts, and a mark that tells whose they are."""
    return slurm_folder(paths) / "etc"


def marker(paths: Paths) -> Path:
    """A file that only the closet's Slurm sees in /etc, with its jobs."""
    return etc_folder(paths) / f"{paths.instance}-closet"


def key_file(paths: Paths) -> Path:
    """munge's key, root's alone."""
    return slurm_folder(paths) / "munge.key"


def rest_socket(paths: Paths) -> Path:
    """Where slurmrestd listens, in a folder of its own user's that root alone reaches besides."""
    return slurm_folder(paths) / "rest" / "slurmrestd.socket"


def jwt_key_file(paths: Paths) -> Path:
    """The key of slurmrestd's tokens, root's alone."""
    return slurm_folder(paths) / "jwt.key"


def _prepare_rest(paths: Paths) -> None:
    folder = rest_socket(paths).parent
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    os.chown(folder, REST_USER.uid, REST_USER.uid)
    _write(jwt_key_file(paths), secrets.token_hex(512), 0o600, keep=True)


def take_forget(paths: Paths) -> bool:
    """Whether slurmctld is to drop what it knows: at the first start of a closet, and not when it is started anew."""
    try:
        _forget_file(paths).unlink()
    except FileNotFoundError:
        return False
    return True


def _forget_file(paths: Paths) -> Path:
    return slurm_folder(paths) / "forget"


def _write_etc(plan: Plan, paths: Paths, users: Users) -> None:
    """The machine's own accounts, and the closet's users with the numbers that gpuhub gives them."""
    own = [name for name in users.allowed or () if not _has_account(name)]
    found = [identity.find_identity(users, paths.state, name) for name in own]
    known = [SlurmUser(name=one.name, uid=one.uid, home=paths.state / "homes" / one.name) for one in found]
    known.append(REST_USER)
    passwd, group = format_accounts(Path("/etc/passwd").read_text(), Path("/etc/group").read_text(), known)
    # slurmctld listens where its own name leads.
    hosts = f"127.0.0.1 localhost\n{plan.head} {head_name(plan)}\n"
    marker(paths).touch()
    for name, text in {"passwd": passwd, "group": group, "hosts": hosts}.items():
        file = etc_folder(paths) / name
        if not file.exists() or file.read_text() != text:
            # In place: daemons that run have this very file.
            file.write_text(text)
            file.chmod(0o644)


def _has_account(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _write(path: Path, text: str, mode: int = 0o644, *, keep: bool = False) -> None:
    if keep and path.exists():
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.chmod(mode)
    fresh.replace(path)
