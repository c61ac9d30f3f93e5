"""A closet node as a machine that one logs in to: OpenSSH's server in the node's network, with files of its own."""

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

# $1: a folder of the machine's own; $2: where its Docker's socket is. The machine's /root, /run and /etc are its own,
# so that nothing of this machine is touched, and Docker's socket is where packages put it.
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
    """Where one logs in, and what it keeps of who may."""

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
    """A machine in this network namespace, which lets the administrator's key in."""
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
        # The test's own folder belongs to whoever runs it.
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
        wait(lambda: _answers(address) or process.poll() is not None, f"sshd at {address}")
        assert process.poll() is None, (folder / "log").read_text()
        yield Machine(address, folder)
    finally:
        process.kill()
        process.wait()


@contextmanager
def ssh_agent(key: Path, user: str = "root") -> Iterator[str]:
    """An agent of this user that holds the key; the value of SSH_AUTH_SOCK."""
    own = ["runuser", "-u", user, "--"]
    made = subprocess.run([*own, "ssh-agent", "-s"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"SSH_AUTH_SOCK=([^;]+);.*SSH_AGENT_PID=(\d+);", made, re.DOTALL)
    assert found is not None, made
    environment = {**os.environ, "SSH_AUTH_SOCK": found[1], "SSH_AGENT_PID": found[2]}
    try:
        subprocess.run([*own, "ssh-add", "-q", "-"], check=True, env=environment, input=key.read_bytes())
        yield found[1]
    finally:
        subprocess.run([*own, "ssh-agent", "-k"], check=True, env=environment, capture_output=True)


def make_key(file: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True, capture_output=True)


def wait(look: Callable[[], object], what: str, deadline_s: float = 20.0) -> None:
    end = time.monotonic() + deadline_s
    while not look():
        assert time.monotonic() < end, f"not within {deadline_s:.0f} s: {what}"
        time.sleep(0.05)


def _answers(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), 1):
            return True
    except OSError:
        return False
