"""The files of the closet's Slurm, which its daemons (`slurm_daemons`) and Slurm's commands read."""

from __future__ import annotations

import hashlib
import os
import pwd
import secrets
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.common.required_programs import find_missing_packages
from gpuhub.config.slurm import SlurmSettings
from gpuhub.config.users import identity
from gpuhub.config.users.users import UserSettings
from gpuhub_closet import shell
from gpuhub_closet.paths import node_paths, slurm_folder
from gpuhub_closet.slurm.slurm_config import (
    SlurmAccount,
    SlurmConfig,
    SlurmNodeConfig,
    format_accounts,
    format_gres_conf,
    format_slurm_conf,
)
from gpuhub_closet.topology import ClosetNode, ClosetPlan

#: Slurm only counts with these: containers have their own limits, and all nodes are this one machine.
NODE_CPUS = 8
NODE_MEMORY_MIB = 32768
#: Short, so that the loss of a node can be observed, seconds.
SLURMD_TIMEOUT_S = 30
EPILOG = Path(__file__).parents[2] / "gpuhub" / "slurm_client" / "epilog.sh"
#: The user of slurmrestd, which refuses to run as root or as Slurm's own user.
REST_USER = SlurmAccount(name="slurmrest", uid=61099, home=Path("/nonexistent"))


def build_slurm_config(plan: ClosetPlan, paths: Paths) -> SlurmConfig:
    """Return the configuration of the closet's Slurm."""
    folder = slurm_folder(paths)
    return SlurmConfig(
        cluster=plan.instance,
        nodes=tuple(_build_node(node) for node in plan.nodes),
        folder=folder,
        munge_socket=folder / "munge" / "munge.socket",
        head_name=head_name(plan),
        head_address=str(plan.head),
        port=derive_port(plan.instance),
        epilog=folder / "epilog",
        slurmd_timeout_s=SLURMD_TIMEOUT_S,
        # slurmctld listens at the head's address on the closet's bridge only: this machine may run another Slurm.
        extra_lines=("CommunicationParameters=NoCtldInAddrAny",),
    )


def _build_node(node: ClosetNode) -> SlurmNodeConfig:
    return SlurmNodeConfig(
        name=node.name,
        address=str(node.address),
        gpus=tuple(SlurmSettings().gpu_type(card.model) for card in node.whole_gpus),
        cpus=NODE_CPUS,
        memory_mib=NODE_MEMORY_MIB,
    )


def head_name(plan: ClosetPlan) -> str:
    """Return the host name of slurmctld."""
    return f"{plan.instance}-head"


def derive_port(instance: str) -> int:
    """Return slurmctld's port, from 26000 on: it differs between closets, and from a system's Slurm."""
    return 26000 + int.from_bytes(hashlib.sha256(instance.encode()).digest()[2:4]) % 1000


def build_epilog(paths: Paths) -> str:
    """Return the Epilog that every node runs: gpuhub's, with the Docker daemon of the node."""
    sockets = node_paths(paths, "NODE").docker_url.replace("NODE", "$SLURMD_NODENAME")
    return f'#!/bin/sh\nDOCKER_HOST="{sockets}" exec {shlex.quote(str(EPILOG))}\n'


def prepare_slurm(plan: ClosetPlan, paths: Paths, users: UserSettings, *, has_rest: bool = False) -> None:
    """Write the files of the daemons, with `has_rest` those of slurmrestd too; safe to call again at any time.

    Raises:
        SetupError: A program is not installed.
    """
    missing = find_missing_packages({"slurm", *(["rest"] if has_rest else [])})
    if shutil.which("docker") is None:
        missing.append("docker-cli")
    if missing:
        raise SetupError(f"the practice closet's Slurm needs programs that are missing: {', '.join(missing)}")
    files = build_slurm_config(plan, paths)
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
    _ensure_key(key_file(paths))
    shell.replace_file(files.folder / "epilog", build_epilog(paths).encode(), 0o755)
    shell.replace_file(files.gres_conf, format_gres_conf(files).encode())
    if is_new:
        _drop_marker(paths).touch()
    shell.replace_file(files.conf, format_slurm_conf(files).encode())


def etc_folder(paths: Paths) -> Path:
    """Return the folder that is mounted over the daemons' /etc: passwd, group, hosts, and the closet's marker."""
    return slurm_folder(paths) / "etc"


def closet_marker(paths: Paths) -> Path:
    """Return the marker in that folder: only processes of the closet's Slurm and its jobs see it in /etc."""
    return etc_folder(paths) / f"{paths.instance}-closet"


def key_file(paths: Paths) -> Path:
    """Return munge's key, which only root can read."""
    return slurm_folder(paths) / "munge.key"


def rest_socket(paths: Paths) -> Path:
    """Return slurmrestd's socket, in a folder that only its user and root can reach."""
    return slurm_folder(paths) / "rest" / "slurmrestd.socket"


def jwt_key_file(paths: Paths) -> Path:
    """Return the key of slurmrestd's tokens, which only root can read."""
    return slurm_folder(paths) / "jwt.key"


def _prepare_rest(paths: Paths) -> None:
    folder = rest_socket(paths).parent
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    os.chown(folder, REST_USER.uid, REST_USER.uid)
    _ensure_key(jwt_key_file(paths))


def consume_drop_marker(paths: Paths) -> bool:
    """Return whether slurmctld must drop its jobs: at the first start of a closet, but not at a restart.

    The marker of the first start is removed.
    """
    try:
        _drop_marker(paths).unlink()
    except FileNotFoundError:
        return False
    return True


def _drop_marker(paths: Paths) -> Path:
    return slurm_folder(paths) / "forget"


def _write_etc(plan: ClosetPlan, paths: Paths, users: UserSettings) -> None:
    """Write the machine's accounts together with the closet's users, who have the numbers that gpuhub gives them."""
    names = [name for name in users.allowed or () if not _has_account(name)]
    identities = [identity.find_identity(users, paths.state, name) for name in names]
    slurm_users = [
        SlurmAccount(name=user.name, uid=user.uid, home=paths.state / "homes" / user.name) for user in identities
    ]
    slurm_users.append(REST_USER)
    passwd, group = format_accounts(Path("/etc/passwd").read_text(), Path("/etc/group").read_text(), slurm_users)
    # slurmctld listens at the address of its host name.
    hosts = f"127.0.0.1 localhost\n{plan.head} {head_name(plan)}\n"
    closet_marker(paths).touch()
    for name, text in {"passwd": passwd, "group": group, "hosts": hosts}.items():
        file = etc_folder(paths) / name
        if not file.exists() or file.read_text() != text:
            # Written in place, because running daemons have this very file mounted.
            file.write_text(text)
            file.chmod(0o644)


def _has_account(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _ensure_key(file: Path) -> None:
    if not file.exists():
        shell.replace_file(file, secrets.token_hex(512).encode(), 0o600)
