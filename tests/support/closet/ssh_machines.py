"""A closet node as a machine with SSH login: OpenSSH's server in the node's network, with separate files."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# $1: the machine's folder; $2: the folder of its Docker's socket. The machine has a separate /root, /run and /etc, so
# that this machine stays unchanged, and Docker's socket is at its usual path.
_BOOT = """\
mkdir -p "$1/socket" "$1/etc"
for file in alternatives group ld.so.cache ld.so.conf ld.so.conf.d nsswitch.conf os-release passwd; do
    [ ! -e "/etc/$file" ] || cp -a "/etc/$file" "$1/etc/"
done
# Some distributions lock root's account, and sshd knows no account that is not in here.
echo 'root:*:20000:0:99999:7:::' >"$1/etc/shadow"
mount --bind "$2" "$1/socket"
mount --bind "$1/home" /root
mount --bind "$1/etc" /etc
mount -t tmpfs -o mode=755 machine /run
mkdir /run/sshd
ln -s "$1/socket/docker.sock" /run/docker.sock
exec /usr/sbin/sshd -D -e -f "$1/sshd_config"
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """An SSH server and the files with its authorized keys and log."""

    address: str
    folder: Path

    @property
    def url(self) -> str:
        return f"ssh://root@{self.address}"

    @property
    def authorized_keys(self) -> Path:
        return self.folder / "home/.ssh/authorized_keys"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")


@contextmanager
def ssh_machine(netns: str, address: str, docker_folder: Path, folder: Path, admin_key: Path) -> Iterator[Machine]:
    """Start a machine in this network namespace, which accepts the administrator's key."""
    folder.mkdir()
    make_key(folder / "host_key")
    (folder / "home/.ssh").mkdir(parents=True, mode=0o700)
    (folder / "home/.ssh/authorized_keys").write_text(admin_key.with_suffix(".pub").read_text())
    lines = [
        f"ListenAddress {address}",
        f"HostKey {folder / 'host_key'}",
        "AuthorizedKeysFile .ssh/authorized_keys",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "UsePAM no",
        # The test's folder belongs to the user who runs it.
        "StrictModes no",
        "PidFile none",
        "Subsystem sftp internal-sftp",
    ]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    command = [
        *("nsenter", f"--net=/run/netns/{netns}"),
        *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
        *("sh", "-euc", _BOOT, "sh", str(folder), str(docker_folder)),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait(lambda: answers(address) or process.poll() is not None, f"sshd at {address}")
        assert process.poll() is None, (folder / "log").read_text()
        yield Machine(address, folder)
    finally:
        process.kill()
        process.wait()


@contextmanager
def loopback_sshd(folder: Path, port: int, *host_keys: Path, authorized: Path | None = None) -> Iterator[None]:
    """Run an SSH server with these host keys on this machine's loopback.

    Args:
        authorized: The public key with which root can log in; by default nobody can.
    """
    lines = [*(f"HostKey {key}" for key in host_keys), "PasswordAuthentication no", "StrictModes no"]
    lines.append(f"AuthorizedKeysFile {authorized or 'none'}")
    config = folder / f"sshd-{port}.conf"
    config.write_text("\n".join([f"ListenAddress 127.0.0.1:{port}", *lines, "UsePAM no", "PidFile none"]) + "\n")
    boot = 'mount -t tmpfs -o mode=755 machine /run; mkdir /run/sshd; exec /usr/sbin/sshd -D -e -f "$1"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", boot, "sh", str(config)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait(lambda: answers("127.0.0.1", port) or process.poll() is not None, f"sshd at port {port}")
        assert process.poll() is None, "sshd has ended"
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def ssh_agent(key: Path, user: str = "root") -> Iterator[str]:
    """Start an agent of this user with the key; yield SSH_AUTH_SOCK."""
    own = ["runuser", "-u", user, "--"]
    output = subprocess.run([*own, "ssh-agent", "-s"], check=True, capture_output=True, text=True).stdout
    match = re.search(r"SSH_AUTH_SOCK=([^;]+);.*SSH_AGENT_PID=(\d+);", output, re.DOTALL)
    assert match is not None, output
    environment = {**os.environ, "SSH_AUTH_SOCK": match[1], "SSH_AGENT_PID": match[2]}
    try:
        subprocess.run([*own, "ssh-add", "-q", "-"], check=True, env=environment, input=key.read_bytes())
        yield match[1]
    finally:
        subprocess.run([*own, "ssh-agent", "-k"], check=True, env=environment, capture_output=True)


def make_key(file: Path, kind: str = "ed25519") -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(file)], check=True, capture_output=True)


def wait(condition: Callable[[], object], expected: str, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s:.0f} s: {expected}"
        time.sleep(0.05)


def answers(address: str, port: int = 22) -> bool:
    try:
        with socket.create_connection((address, port), 1):
            return True
    except OSError:
        return False
