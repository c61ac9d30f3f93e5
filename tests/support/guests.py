"""A friend's machine behind a router that translates addresses, and a head node that the internet reaches."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.docker.client import CallKind, DockerClients
from gpuhub.ops.guests.invitation import InviteRequest, invite
from tests.support.closet.ssh_machines import wait
from tests.support.docker.simulated_nodes import SimulatedDaemons
from tests.support.docker.tiny_image import build_root_filesystem
from tests.support.product import ROOT

HEAD, PORT = "198.51.100.1", 51830
#: The router's line: PPPoE's packets, and 40 Mbit/s up.
LINE_MTU, UPLINK = 1492, "40mbit"
_ROUTER, _FRIEND = "ghgrouter", "ghgfriend"
SETTINGS = f"""\
[[nodes]]
name = "rig1"
address = "127.0.0.1"
docker = "unix:///run/nowhere/docker.sock"

[[profiles]]
name = "one"
title = "One"

[users]
login = "password"
allowed = ["ada"]
uid_first = 5000

[guests]
endpoint = "{HEAD}:{PORT}"
port = {PORT}
"""
_NAT = """
table ip nat {
	chain out { type nat hook postrouting priority srcnat; oifname "out" masquerade; }
}
table ip guard {
	chain in { type filter hook forward priority filter; iifname "out" ct state new drop; }
	chain own { type filter hook input priority filter; iifname "out" ct state new udp dport != 0 drop; }
}
"""
# $1: the machine's folder; then what is run there. /etc, /run and /usr/local/sbin are the machine's own.
_BOOT = """\
umask 022
mkdir -p "$1/etc" "$1/sbin" "$1/docker"
for file in alternatives group gshadow ld.so.cache ld.so.conf ld.so.conf.d login.defs nsswitch.conf os-release passwd \\
    shadow ssl hosts; do
    [ ! -e "/etc/$file" ] || cp -a "/etc/$file" "$1/etc/"
done
printf '#!/bin/sh\\nexec "$@"\\n' >"$1/sbin/sudo"
printf '#!/bin/sh\\necho "GPU 0: NVIDIA GeForce RTX 5090 (UUID: GPU-0)"\\n' >"$1/sbin/nvidia-smi"
printf '#!/bin/sh\\n' >"$1/sbin/nvidia-container-runtime-hook"
chmod 755 "$1/sbin/"*
grep -q '^docker:' "$1/etc/group" || echo 'docker:x:990:' >>"$1/etc/group"
mount --bind "$1/etc" /etc
mount --bind "$1/sbin" /usr/local/sbin
mount -t tmpfs -o mode=755 machine /run
exec dockerd --data-root "$1/docker" --exec-root /run/docker-exec --pidfile /run/docker.pid --host unix:///run/docker.sock \\
    --group docker --storage-driver vfs --bridge none --iptables=false --add-runtime nvidia=/usr/bin/runc --log-level warn
"""


@dataclass(frozen=True, slots=True)
class FriendsMachine:
    """A running machine; its first process is Docker's."""

    pid: int
    folder: Path

    def run(
        self, *command: str, check: bool = True, text: str = "", timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the machine's root."""
        # Docker's client is in /usr/local/bin where Debian's package is not installed.
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        enter = ["nsenter", "--target", str(self.pid), "--all", "--", "env", "-i", f"PATH={path}"]
        done = subprocess.run(
            [*enter, *command], check=False, capture_output=True, text=True, input=text, timeout=timeout
        )
        assert not check or not done.returncode, done.stdout + done.stderr
        return done

    def import_image(self, *names: str) -> None:
        """Give its Docker a small image with Python under these names."""
        (self.folder / "etc/tiny.tar").write_bytes(build_root_filesystem())
        # Docker gives folders that a tar lacks a mode of its own.
        unpack = "rm -rf /etc/tiny; mkdir /etc/tiny; tar -C /etc/tiny -xf /etc/tiny.tar"
        tags = "".join(f"; docker tag {names[0]} {name}" for name in names[1:])
        self.run("sh", "-euc", f"{unpack}; tar -C /etc/tiny -c . | docker import - {names[0]}{tags}")

    def python(self, code: str) -> str:
        """Run a Python program as the machine's root and return what it prints."""
        return self.run("python3", "-c", code).stdout.strip()


def run(*command: str, check: bool = True, text: str | None = None) -> str:
    return subprocess.run(command, check=check, capture_output=True, text=True, input=text, timeout=60).stdout


@contextmanager
def internet() -> Iterator[None]:
    """Connect the router, and the friend's machine behind it, with this machine as the head node."""
    _remove()
    try:
        for name in (_ROUTER, _FRIEND):
            run("ip", "netns", "add", name)
            run("ip", "-netns", name, "link", "set", "lo", "up")
        run("ip", "link", "add", "ghgline", "type", "veth", "peer", "name", "out", "netns", _ROUTER)
        run("ip", "address", "add", f"{HEAD}/24", "dev", "ghgline")
        run("ip", "link", "set", "ghgline", "up")
        inner = ("type", "veth", "peer", "name", "eth0", "netns", _FRIEND)
        run("ip", "-netns", _ROUTER, "link", "add", "in", *inner)
        for namespace, link, address in (
            (_ROUTER, "out", "198.51.100.2/24"),
            (_ROUTER, "in", "192.168.5.1/24"),
            (_FRIEND, "eth0", "192.168.5.2/24"),
        ):
            run("ip", "-netns", namespace, "address", "add", address, "dev", link)
            run("ip", "-netns", namespace, "link", "set", link, "up")
        run("ip", "-netns", _ROUTER, "link", "set", "out", "mtu", str(LINE_MTU))
        run("ip", "-netns", _FRIEND, "route", "add", "default", "via", "192.168.5.1")
        run("ip", "netns", "exec", _ROUTER, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        run("ip", "netns", "exec", _ROUTER, "nft", "-f", "-", text=_NAT)
        bucket = ("root", "tbf", "rate", UPLINK, "burst", "64kb", "latency", "50ms")
        run("tc", "-netns", _ROUTER, "qdisc", "replace", "dev", "out", *bucket)
        yield
    finally:
        _remove()


@contextmanager
def lost_line() -> Iterator[None]:
    """Take the router's line away for the duration of the block."""
    run("ip", "-netns", _ROUTER, "link", "set", "out", "down")
    try:
        yield
    finally:
        run("ip", "-netns", _ROUTER, "link", "set", "out", "up")


def _remove() -> None:
    for name in (_FRIEND, _ROUTER):
        run("ip", "netns", "del", name, check=False)
    run("ip", "link", "del", "ghgline", check=False)


@contextmanager
def friends_machine(folder: Path) -> Iterator[FriendsMachine]:
    """Start the machine with a Docker daemon of its own, and a stand-in for NVIDIA's driver."""
    folder.mkdir()
    command = [
        *("nsenter", f"--net=/run/netns/{_FRIEND}"),
        *("unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"),
        *("sh", "-euc", _BOOT, "sh", str(folder)),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait(lambda: children.exists() and children.read_text().split(), "the machine")
        machine = FriendsMachine(int(children.read_text().split()[0]), folder)
        wait(lambda: machine.run("docker", "version", check=False).returncode == 0, (folder / "log").read_text())
        yield machine
    finally:
        process.kill()
        process.wait()


@contextmanager
def guest_service(paths: Paths, cluster_file: Path, log: Path) -> Iterator[None]:
    """Run the head node's service for guests."""
    command = [sys.executable, "-m", "gpuhub.cli.main", "guests", "--instance", paths.instance]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*command, "--cluster-file", str(cluster_file)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "spawners"), str(ROOT / "extensions")])},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@contextmanager
def instance_folders(name: str) -> Iterator[Paths]:
    """Yield the paths of an instance of its own, of which nothing remains."""
    paths = Paths(name)
    with ExitStack() as stack:
        for folder in (paths.state, paths.run, paths.log):
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, mode=0o700)
        yield paths


def split_command(text: str) -> Sequence[str]:
    """Return the words of an invitation's command as a shell reads them."""
    return shlex.split(text)


class Lines:
    """A console that keeps what is written."""

    width = None

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str = "") -> None:
        self.text += f"{text}\n"

    def write_leases(self, *_: object) -> None:
        raise AssertionError

    def confirm(self, question: str) -> None:
        raise AssertionError(question)


@dataclass(frozen=True)
class Head:
    paths: Paths
    cluster_file: Path

    def invite(self, name: str = "mia", now: float | None = None) -> str:
        return invite(InviteRequest(name=name, cluster_file=self.cluster_file), self.paths, Lines(), now=now)

    def peers(self) -> list[str]:
        return run("wg", "show", f"{self.paths.instance}-guests", "peers").split()

    @contextmanager
    def docker(self) -> Iterator[DockerClients]:
        nodes = settings.load(self.cluster_file).nodes
        daemons = DockerClients(nodes, instance=self.paths.instance, run_dir=self.paths.run)
        with closing(daemons):
            yield daemons


@contextmanager
def head_node(instance: str, folder: Path) -> Iterator[Head]:
    """Start the service for guests of an instance, and the internet."""
    file = folder / "cluster.toml"
    file.write_text(SETTINGS)
    with instance_folders(instance) as paths, internet(), guest_service(paths, file, file.with_name("log")):
        wait(lambda: Path(f"/sys/class/net/{instance}-guests").exists(), "the interface")
        yield Head(paths, file)


class MixedDaemons(SimulatedDaemons):
    """The closet's own node is simulated, with real couriers; the guest's Docker is real."""

    async def run(self, node: str, work: Callable[[Any], Any], *, kind: CallKind = CallKind.SHORT) -> Any:
        run_on = super().run if node in self.simulated else partial(DockerClients.run, self)
        return await run_on(node, work, kind=kind)
