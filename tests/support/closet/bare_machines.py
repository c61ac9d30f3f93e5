"""Machines that `gpuhub node prepare` and `gpuhub slurm` log in to: a real SSH server, and stand-ins for what would
change the machine.

Each machine is a mount namespace with an own /etc, /run, /sys and /usr/share/keyrings. `apt-get`, `sudo`, `docker`,
`curl` and the other programs of `_STAND_IN` only record what they were called with and remember what they "installed", so
that no package is installed and nothing is downloaded. They answer as the real programs do where gpuhub reads them.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.closet.ssh_machines import answers, make_key, wait

_UID = 64999
# $1: the machine's folder, which is /srv there.
_BOOT = f"""\
cd "$1"
mkdir -p etc/apt/sources.list.d keyrings
for file in alternatives ld.so.cache ld.so.conf ld.so.conf.d nsswitch.conf ssl; do
    [ ! -e "/etc/$file" ] || cp -a "/etc/$file" etc/
done
printf 'root:x:0:0::/srv/home:/bin/sh\\nsshd:x:64998:65534::/run/sshd:/bin/false\\n' >etc/passwd
echo 'me:x:{_UID}:{_UID}::/srv/home:/bin/sh' >>etc/passwd
printf 'root:x:0:\\nme:x:{_UID}:\\n' >etc/group
printf '%s:*:20000:0:99999:7:::\\n' root me >etc/shadow
mv os-release etc/
mv debian.sources etc/apt/sources.list.d/
chown -R {_UID} bin state home keyrings etc/apt etc/group
mount --bind "$1" /srv
mount --bind keyrings /usr/share/keyrings
mount --bind etc /etc
mount -t tmpfs -o mode=755 machine /run
mkdir -p /run/sshd /run/systemd/system
mount -t tmpfs machine /sys
mkdir -p /sys/bus/pci/devices/0000:01:00.0 /sys/firmware/efi/efivars
cd /sys/bus/pci/devices/0000:01:00.0
echo 0x10de >vendor
echo 0x030000 >class
echo 0x2204 >device
printf '\\006\\000\\000\\000\\000' >/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c
exec /usr/sbin/sshd -D -e -f /srv/sshd_config
"""
_STAND_IN = """\
#!/bin/sh
cd /srv/state
name=${0##*/}
case "$name $*" in
"systemctl is-"* | "systemctl show "*) ;;
*)
    case $name in
    apt-get | usermod | useradd | groupadd | curl | systemctl | sacctmgr | mariadb) echo "$name $*" >>ran ;;
    esac
    ;;
esac
case "$name $*" in
"sudo -n "*)
    shift
    [ "$*" = true ] || echo "$name -n $*" >>sudo
    exec "$@"
    ;;
"apt-get install "*)
    if [ -e missing ] && echo "$*" | grep -qw "$(cat missing)"; then
        echo "E: Unable to locate package $(cat missing)" >&2
        exit 100
    fi
    for word; do
        case $word in
        install | -* | Dpkg::* | DPkg::*) ;;
        nvidia-driver) echo "installed nvidia-driver 535.261.03-1" >>packages ;;
        *) echo "installed $word 1.0" >>packages ;;
        esac
        case $word in
        docker.io)
            ln -s stand-in /srv/bin/docker
            echo docker:x:998: >>/etc/group
            ;;
        nvidia-container-toolkit) ln -s stand-in /srv/bin/nvidia-ctk ;;
        munge)
            echo munge:x:64997:64997::/nonexistent:/usr/sbin/nologin >>/etc/passwd
            mkdir /etc/munge
            echo "the key of $(cat hostname)" >/etc/munge/munge.key
            ;;
        slurmctld | slurmd)
            grep -q ^slurm: /etc/passwd || echo slurm:x:64030:64030::/nonexistent:/usr/sbin/nologin >>/etc/passwd
            mkdir -p /etc/slurm
            ;;
        esac
    done
    ;;
"apt-get update "*) ;;
"apt-cache policy nvidia-driver")
    if grep -q non-free /etc/apt/sources.list.d/debian.sources; then
        printf 'nvidia-driver:\\n  Installed: (none)\\n  Candidate: 535.261.03-1\\n'
    fi
    ;;
"apt-cache pkgnames "*) ;;
"dpkg-query "*) cat packages ;;
"usermod -a -G docker -- me")
    groups=$(sed 's/^docker:.*/docker:x:998:me/' /etc/group)
    printf '%s\\n' "$groups" >/etc/group
    ;;
"curl "*" -o "*) echo '-----BEGIN PGP PUBLIC KEY BLOCK-----' >"$5" ;;
"docker version "*) echo 20.10.24+dfsg1 ;;
"docker info "*) cat runtimes ;;
"nvidia-ctk --version") echo 'NVIDIA Container Toolkit CLI version 1.18.0' ;;
"nvidia-ctk runtime configure --runtime=docker") echo 'runc nvidia' >daemon.json ;;
"systemctl reload docker") cp daemon.json runtimes ;;
"systemctl daemon-reload") ;;
"systemctl enable "*) touch "enabled-$2" ;;
"systemctl restart "* | "systemctl start "*) date +%s >"active-$2" ;;
"systemctl is-enabled "*) if [ -e "enabled-$2" ]; then echo enabled; else echo disabled; exit 1; fi ;;
"systemctl is-active "*) if [ -e "active-$2" ]; then echo active; else echo inactive; exit 3; fi ;;
"systemctl show --timestamp=unix -p ActiveEnterTimestamp --value "*)
    if [ -e "active-$6" ]; then echo "@$(cat "active-$6")"; else echo; fi
    ;;
"useradd --system "*) echo slurmrest:x:64996:64996::/nonexistent:/usr/sbin/nologin >>/etc/passwd ;;
"useradd --uid "*)
    for word; do user=$word; done
    echo "$user:x:$2:$4::/home/$user:/usr/sbin/nologin" >>/etc/passwd
    ;;
"groupadd --gid "*) echo "$3:x:$2:" >>/etc/group ;;
"hostname -s") cat hostname ;;
"mariadb ") cat >sql ;;
"sacctmgr "*) ;;
"sinfo -h -N -o %N %T") sed -n 's/^NodeName=\\([^ ]*\\) .*/\\1 idle/p' /etc/slurm/slurm.conf ;;
*)
    echo "no stand-in for: $name $*" >&2
    exit 99
    ;;
esac
"""
_PROGRAMS = (
    *("sudo", "apt-get", "apt-cache", "dpkg-query", "usermod", "useradd", "groupadd", "curl", "systemctl", "hostname"),
    *("mariadb", "sacctmgr", "sinfo"),
)
_OS_RELEASE = """\
PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
ID=debian
VERSION_ID="12"
VERSION_CODENAME=bookworm
"""
_SOURCES = """\
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


@dataclass(frozen=True, slots=True)
class BareMachine:
    """An SSH server, and what the stand-ins recorded."""

    url: str
    folder: Path

    @property
    def root_url(self) -> str:
        return self.url.replace("//me@", "//root@")

    def read_calls(self) -> list[str]:
        """Return the commands that would have changed the machine."""
        file = self.folder / "state/ran"
        return file.read_text().splitlines() if file.exists() else []

    def read(self, path: str) -> str:
        return (self.folder / path).read_text(encoding="utf-8")

    def miss_package(self, name: str) -> None:
        """Let `apt-get install` fail for this package."""
        (self.folder / "state/missing").write_text(name)


@contextmanager
def bare_machine(folder: Path, address: str, admin_key: Path) -> Iterator[BareMachine]:
    """Start a machine at this loopback address, with a new Debian 12 and a GPU, at which `me` and root can log in."""
    for name in ("bin", "state", "home/.ssh"):
        (folder / name).mkdir(parents=True)
    make_key(folder / "host_key")
    (folder / "home/.ssh/authorized_keys").write_text(admin_key.with_suffix(".pub").read_text())
    (folder / "bin/stand-in").write_text(_STAND_IN)
    (folder / "bin/stand-in").chmod(0o755)
    for name in _PROGRAMS:
        (folder / "bin" / name).symlink_to("stand-in")
    (folder / "state/packages").write_text(
        "installed linux-image-amd64 6.1.158-1\ninstalled ca-certificates 20230311\n"
    )
    (folder / "state/runtimes").write_text("runc\n")
    (folder / "state/hostname").write_text(f"{folder.name}\n")
    (folder / "os-release").write_text(_OS_RELEASE)
    (folder / "debian.sources").write_text(_SOURCES)
    folder.chmod(0o755)
    with socket.create_server((address, 0)) as probe:
        port = int(probe.getsockname()[1])
    lines = [
        f"ListenAddress {address}:{port}",
        "HostKey /srv/host_key",
        "AuthorizedKeysFile .ssh/authorized_keys",
        "PasswordAuthentication no",
        "UsePAM no",
        "StrictModes no",
        "PidFile none",
        "SetEnv PATH=/srv/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    ]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    command = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=KILL"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--mount-proc", "sh", "-euc", _BOOT, "sh", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        wait(lambda: answers(address, port) or process.poll() is not None, f"sshd at {address}")
        assert process.poll() is None, (folder / "log").read_text()
        yield BareMachine(f"ssh://me@{address}:{port}", folder)
    finally:
        process.kill()
        process.wait()
