"""Files for the unattended installers of Ubuntu (autoinstall) and Debian (preseed), for machines to be erased.

They install what `gpuhub node prepare` needs, and no more: an account that logs in with a key and has sudo without a
password, an SSH server, chrony and an NFS client. The driver, Docker and the toolkit come with `gpuhub node prepare`.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpuhub.common.errors import InvalidRequest

#: No password fits this hash, so that only the key opens the account.
LOCKED = "!"
_PACKAGES = ("ca-certificates", "chrony", "curl", "nfs-common", "sudo")
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")
_USER = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
_DISK = re.compile(r"/dev/[A-Za-z0-9][A-Za-z0-9/._:+-]*")
_PUBLIC_KEY = re.compile(r"(ssh-|ecdsa-|sk-)[a-z0-9@.-]+ [A-Za-z0-9+/]+=*( [A-Za-z0-9@._+ -]*)?")
#: A hash of crypt(5) other than DES: `$6$…` is SHA-512, `$y$…` yescrypt.
_HASH = re.compile(r"\$(5|6|7|y|gy|2b)\$[A-Za-z0-9./$=,-]+")
_RESERVED_USERS = frozenset({"root", "admin"})


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallerRequest:
    """The machine to be installed; texts are checked when the request is made."""

    system: Literal["ubuntu", "debian"]
    name: str
    user: str
    #: A line as in `~/.ssh/id_ed25519.pub`.
    public_key: str
    #: The disk to be erased; None for the installer's choice.
    disk: str | None
    #: A hash of crypt(5), or `LOCKED`.
    password_hash: str = LOCKED

    def __post_init__(self) -> None:
        checks = (
            (_NAME, self.name, "name of a machine: small letters, digits and hyphens, such as rig4"),
            (_USER, self.user, "name of an account: small letters, digits, hyphens and underscores, such as me"),
            (_PUBLIC_KEY, self.public_key, "public SSH key: the file ends in .pub and begins with such as ssh-ed25519"),
        )
        for pattern, value, wanted in checks:
            if not pattern.fullmatch(value):
                raise InvalidRequest(f"{value[:60]!r} is not a {wanted}")
        if self.user in _RESERVED_USERS:
            raise InvalidRequest(f"the installers reserve the account {self.user!r}: choose another name, such as me")
        if self.disk is not None and not _DISK.fullmatch(self.disk):
            raise InvalidRequest(f"{self.disk!r} is not a disk: write such as /dev/nvme0n1")
        if self.password_hash != LOCKED and not _HASH.fullmatch(self.password_hash):
            raise InvalidRequest("the password is not a hash of crypt(5): write one with `mkpasswd --method=yescrypt`")


def read_first_line(file: Path) -> str:
    """Return the first line of a key's or a hash's file.

    Raises:
        InvalidRequest: The file cannot be read or is empty.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{file} cannot be read: {error}") from None
    if not lines[0].strip():
        raise InvalidRequest(f"{file} is empty")
    return lines[0].strip()


def write_installer_file(file: Path, text: str) -> None:
    """Write a new file for its owner's eyes only, since it may hold a password's hash.

    Raises:
        InvalidRequest: The file exists, or cannot be written.
    """
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvalidRequest(f"{file} exists: remove it first, or name another file") from None
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be written: {error}") from None
    with os.fdopen(descriptor, "w", encoding="utf-8") as output:
        output.write(text)


def build_installer_file(request: InstallerRequest) -> str:
    """Return the text of the installer's file."""
    return _build_user_data(request) if request.system == "ubuntu" else _build_preseed(request)


def _build_head(request: InstallerRequest, usage: str, choice: str) -> str:
    disk = choice if request.disk is None else f"the disk {request.disk}"
    return "\n".join(
        f"# {line}".rstrip()
        for line in (
            f"WARNING: this file ERASES {disk} of the machine that is started with it, without a question.",
            "",
            f"It installs {request.system.capitalize()} as {request.name}.",
            f"The account {request.user} logs in with its SSH key, and has sudo without a password, which",
            "`gpuhub node prepare` and `gpuhub node add --tls` need: remove /etc/sudoers.d/gpuhub-prepare there once",
            "the node is added.",
            usage,
            "Written by `gpuhub node autoinstall`.",
        )
    )


# -- Ubuntu ------------------------------------------------------------------------------------------------------------


def _build_user_data(request: InstallerRequest) -> str:
    layout: dict[str, Any] = {"name": "direct"}
    if request.disk is not None:
        layout["match"] = {"path": request.disk}
    sudoers = f"{request.user} ALL=(ALL) NOPASSWD:ALL"
    autoinstall: dict[str, Any] = {
        "version": 1,
        "locale": "en_US.UTF-8",
        "keyboard": {"layout": "us"},
        # Not Etc/UTC: the installer refuses what its `timedatectl list-timezones` does not have.
        "timezone": "UTC",
        "identity": {
            "hostname": request.name,
            "realname": request.user,
            "username": request.user,
            "password": request.password_hash,
        },
        "ssh": {"install-server": True, "allow-pw": False, "authorized-keys": [request.public_key]},
        "storage": {"layout": layout},
        "packages": list(_PACKAGES),
        "updates": "security",
        "late-commands": [
            f"echo '{sudoers}' >/target/etc/sudoers.d/gpuhub-prepare",
            "chmod 440 /target/etc/sudoers.d/gpuhub-prepare",
        ],
        "shutdown": "reboot",
    }
    usage = "Put it as `user-data`, next to an empty `meta-data`, where Ubuntu's installer finds it (docs/nodes.md)."
    head = _build_head(request, usage, "the LARGEST disk")
    # cloud-init recognises the file by its first line.
    return f"#cloud-config\n{head}\n{_format_yaml({'autoinstall': autoinstall})}"


def _format_yaml(mapping: dict[str, Any], indent: str = "") -> str:
    """Format mappings and lists of scalars as YAML; JSON's scalars are YAML's, and cannot be read as something else."""
    lines = []
    for key, value in mapping.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:\n", _format_yaml(value, f"{indent}  ")]
        elif isinstance(value, list):
            lines += [f"{indent}{key}:\n", *(f"{indent}  - {json.dumps(item)}\n" for item in value)]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")
    return "".join(lines)


# -- Debian ------------------------------------------------------------------------------------------------------------


def _build_preseed(request: InstallerRequest) -> str:
    home = f"/home/{request.user}"
    late = (
        f"echo '{request.user} ALL=(ALL) NOPASSWD:ALL' >/target/etc/sudoers.d/gpuhub-prepare",
        "chmod 440 /target/etc/sudoers.d/gpuhub-prepare",
        f"mkdir -p -m 700 /target{home}/.ssh",
        f"echo '{request.public_key}' >/target{home}/.ssh/authorized_keys",
        f"chmod 600 /target{home}/.ssh/authorized_keys",
        f"in-target chown -R {request.user}:{request.user} {home}/.ssh",
        "echo 'PasswordAuthentication no' >/target/etc/ssh/sshd_config.d/gpuhub.conf",
    )
    disk = [] if request.disk is None else [("partman-auto/disk", "string", request.disk)]
    answers = [
        ("debian-installer/locale", "string", "en_US.UTF-8"),
        ("keyboard-configuration/xkb-keymap", "select", "us"),
        ("netcfg/choose_interface", "select", "auto"),
        ("netcfg/get_hostname", "string", request.name),
        ("netcfg/get_domain", "string", ""),
        ("netcfg/hostname", "string", request.name),
        ("hw-detect/load_firmware", "boolean", "true"),
        # Without further answers about the mirror, the installer takes Debian's own at priority=critical.
        ("mirror/http/proxy", "string", ""),
        ("passwd/root-login", "boolean", "false"),
        ("passwd/user-fullname", "string", request.user),
        ("passwd/username", "string", request.user),
        ("passwd/user-password-crypted", "password", request.password_hash),
        ("clock-setup/utc", "boolean", "true"),
        ("clock-setup/ntp", "boolean", "true"),
        ("time/zone", "string", "Etc/UTC"),
        *disk,
        ("partman-auto/method", "string", "regular"),
        ("partman-auto/choose_recipe", "select", "atomic"),
        ("partman-lvm/device_remove_lvm", "boolean", "true"),
        ("partman-lvm/confirm", "boolean", "true"),
        ("partman-lvm/confirm_nooverwrite", "boolean", "true"),
        ("partman-md/device_remove_md", "boolean", "true"),
        ("partman-partitioning/confirm_write_new_label", "boolean", "true"),
        # Where the disk has a system that was installed for BIOS.
        ("partman-efi/non_efi_system", "boolean", "true"),
        ("partman/choose_partition", "select", "finish"),
        ("partman/confirm", "boolean", "true"),
        ("partman/confirm_nooverwrite", "boolean", "true"),
        ("apt-setup/contrib", "boolean", "true"),
        ("apt-setup/non-free", "boolean", "true"),
        ("apt-setup/non-free-firmware", "boolean", "true"),
        ("apt-setup/cdrom/set-first", "boolean", "false"),
        ("pkgsel/include", "string", f"openssh-server {' '.join(_PACKAGES)}"),
        ("pkgsel/upgrade", "select", "full-upgrade"),
        ("grub-installer/only_debian", "boolean", "true"),
        ("grub-installer/bootdev", "string", request.disk or "default"),
        ("preseed/late_command", "string", "; ".join(late)),
        ("finish-install/reboot_in_progress", "note", ""),
    ]
    usage = "Give it to Debian's installer as `preseed.cfg` (docs/nodes.md)."
    head = _build_head(request, usage, "the only disk (of several, the installer asks for one)")
    others = [
        "tasksel tasksel/first multiselect standard, ssh-server",
        "popularity-contest popularity-contest/participate boolean false",
    ]
    lines = [f"d-i {question} {kind} {value}".rstrip() for question, kind, value in answers]
    return "\n".join(("#_preseed_V1", head, *lines, *others, ""))
