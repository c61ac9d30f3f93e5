"""Access to nodes by SSH: gpuhub's own key, nodes' host keys, and tunnels to Docker sockets."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gpuhub.common.errors import NodeUnreachable, SetupError
from gpuhub.common.paths import Paths

#: Where Docker's packages put the daemon's socket. The SSH key gives access to nothing else on a node.
REMOTE_SOCKET = "/var/run/docker.sock"
#: Maximum wait for a tunnel, seconds.
_START_DEADLINE_S = 12.0
#: Maximum wait for a machine's host keys, seconds.
_SCAN_S = 8
#: What sshd allows with this key. `restrict` forbids everything, forwarding is allowed again, and `permitopen` limits
#: it to one socket: sshd compares a socket's path with a path in brackets with any port. Without the brackets it
#: rejects the path, and any other `permitopen` forbids all sockets.
RESTRICTIONS = (
    f'restrict,port-forwarding,permitopen="[{REMOTE_SOCKET}]:*",permitlisten="localhost:1",command="/bin/false"'
)
# $1: the line for authorized_keys in base64, or `-` for none. $2: the key in it, which identifies its older lines.
# `sh -s` reads it from standard input; the arguments, which differ between nodes, have no meaning to a shell.
AUTHORIZED_KEYS_SCRIPT = """\
set -eu
umask 077
folder=$HOME/.ssh
file=$folder/authorized_keys
mkdir -p "$folder"
[ -e "$file" ] || : >"$file"
fresh=$(mktemp "$folder/authorized_keys.XXXXXX")
trap 'rm -f "$fresh"' EXIT
grep -vF -- "$2" "$file" >"$fresh" || [ $? -eq 1 ]
if [ "$1" != - ]; then
    # The last line of the file may lack its end.
    [ -z "$(tail -c 1 "$fresh")" ] || echo >>"$fresh"
    printf '%s' "$1" | base64 -d >>"$fresh"
fi
cmp -s "$fresh" "$file" || cat "$fresh" >"$file"
"""


#: Kinds of host keys, the preferred one first.
_PREFERRED_KINDS = ("ssh-ed25519", "ecdsa-sha2-")


@dataclass(frozen=True, slots=True)
class SshFiles:
    """gpuhub's SSH key and the host keys that one instance trusts, in a folder that only root can enter."""

    folder: Path

    @property
    def key(self) -> Path:
        """Return the path of the private key, one for all nodes."""
        return self.folder / "id_ed25519"

    @property
    def public_key(self) -> Path:
        return self.folder / "id_ed25519.pub"

    def known_hosts(self, node: str) -> Path:
        """Return the path of the node's host keys; `gpuhub node add` writes them once a person has compared them."""
        return self.folder / f"{node}.known_hosts"

    def read_host_keys(self, node: str) -> list[HostKey]:
        """Return the node's stored host keys; none for a node that `gpuhub node add` did not set up."""
        file = self.known_hosts(node)
        return parse_keys(file.read_text(encoding="ascii")) if file.exists() else []

    def options(self, node: str) -> list[str]:
        """Return ssh's options for a node that `gpuhub node add` set up; other nodes use root's own keys."""
        if not self.known_hosts(node).exists():
            return []
        return [
            "-i", str(self.key),
            "-o", "IdentitiesOnly=yes",
            "-o", "IdentityAgent=none",
            "-o", "PreferredAuthentications=publickey",
            "-o", "StrictHostKeyChecking=yes",
            "-o", f"HostKeyAlias={host_alias(node)}",
            "-o", f"UserKnownHostsFile={self.known_hosts(node)}",
            "-o", "GlobalKnownHostsFile=/dev/null",
            "-o", "UpdateHostKeys=no",
        ]  # fmt: skip


def ssh_files(instance: str) -> SshFiles:
    return SshFiles(Paths(instance).secrets / "ssh")


def host_alias(node: str) -> str:
    """Return the name under which a node's host keys are stored, independent of its address and port."""
    return f"gpuhub-{node}"


def ensure_key(files: SshFiles, instance: str) -> str:
    """Return the line of gpuhub's public key as `ssh-keygen` writes it; the pair is made if it is missing.

    Raises:
        SetupError: ssh-keygen is missing, or fails.
    """
    files.folder.mkdir(mode=0o700, exist_ok=True)
    if not files.key.exists():
        name = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname()) or "head"
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"{instance}@{name}", "-f", str(files.key)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise SetupError("ssh-keygen is missing: install openssh-client") from None
        except subprocess.CalledProcessError as error:
            raise SetupError(f"{files.key} cannot be made: {error.stderr.strip()}") from None
    files.key.chmod(0o600)
    return files.public_key.read_text(encoding="ascii").strip()


def build_script_arguments(public: str, *, is_authorized: bool) -> list[str]:
    """Return the arguments of `AUTHORIZED_KEYS_SCRIPT` that add or remove the key."""
    line = base64.b64encode(f"{RESTRICTIONS} {public}\n".encode()).decode() if is_authorized else "-"
    return [line, public.split()[1]]


@dataclass(frozen=True, slots=True, order=True)
class HostKey:
    """A machine's public key."""

    kind: str
    blob: str

    @property
    def fingerprint(self) -> str:
        """As ssh shows it: `SHA256:…`."""
        digest = hashlib.sha256(base64.b64decode(self.blob)).digest()
        return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


def scan_host_keys(host: str, port: int) -> list[HostKey]:
    """Return the host keys that the machine shows; they must be compared before they are trusted.

    Raises:
        SetupError: No SSH server answers there.
    """
    done = subprocess.run(
        ["ssh-keyscan", "-T", str(_SCAN_S), "-p", str(port), "--", host], check=False, capture_output=True, text=True
    )
    keys = parse_keys(done.stdout)
    if not keys:
        raise SetupError(
            f"no SSH server answers at {host}, port {port}: is the machine on, and openssh-server installed?"
        )
    return keys


def parse_keys(text: str) -> list[HostKey]:
    """Parse lines `HOST KIND KEY` of `ssh-keyscan` and known_hosts files, without revoked keys and authorities."""
    keys = set()
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 3 and not fields[0].startswith(("#", "@")):
            keys.add(HostKey(fields[1], fields[2]))
    return sorted(keys)


def find_known_keys(host: str, port: int, files: Iterable[str]) -> list[HostKey]:
    """Return the machine's keys in the administrator's known_hosts files."""
    name = host if port == 22 else f"[{host}]:{port}"
    keys: list[HostKey] = []
    for file in files:
        done = subprocess.run(["ssh-keygen", "-F", name, "-f", file], check=False, capture_output=True, text=True)
        keys += parse_keys(done.stdout)
    return keys


def select_known_keys(
    shown: Sequence[HostKey], known: Sequence[HostKey], host: str, stored: Path | None = None
) -> list[HostKey]:
    """Return the shown keys that are known; none if no key of the machine is known.

    A known key does not vouch for the others: `ssh-keyscan` asks for each kind on a separate connection, and verifies
    nothing, so each of them may come from another machine.

    Args:
        stored: gpuhub's own file of known keys, for the remedy.

    Raises:
        SetupError: The machine shows other keys than the known ones.
    """
    keys = [key for key in shown if key in known]
    if keys or not known:
        return keys
    raise SetupError(
        f"{host} shows another host key than before ({', '.join(key.fingerprint for key in shown)}): either it was "
        "installed again, or another machine intercepts the connection. Nothing was sent. Compare on the machine: "
        f"`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`. If they are right, `ssh-keygen -R {host}` here"
        + (f", and remove {stored}" if stored is not None and stored.exists() else "")
    )


def choose_key(shown: Sequence[HostKey]) -> HostKey:
    """Return the one key of a new machine that a person compares: of the kind that ssh prefers."""
    return min(shown, key=lambda key: (*(not key.kind.startswith(kind) for kind in _PREFERRED_KINDS), key))


def format_known_hosts(name: str, keys: Iterable[HostKey]) -> str:
    """Return the text of a known_hosts file for one machine with this name."""
    return "".join(f"{name} {key.kind} {key.blob}\n" for key in keys)


def build_tunnel_command(url: str, local_socket: Path, options: Sequence[str] = ()) -> list[str]:
    """Return the ssh command for `ssh://[user@]host[:port]`; `options` hold the key. ssh ends with this process."""
    parts = urlsplit(url)
    command = [
        # The kernel ends ssh however this process dies, so that no forwarded root socket outlives it.
        "setpriv", "--pdeathsig", "TERM",
        "ssh", "-N", "-T",
        "-o", "BatchMode=yes",
        "-o", "ExitOnForwardFailure=yes",
        "-o", "ConnectTimeout=8",
        "-o", "ServerAliveInterval=5",
        "-o", "ServerAliveCountMax=3",
        "-o", "StreamLocalBindUnlink=yes",
        "-o", "StreamLocalBindMask=0177",
        "-L", f"{local_socket}:{REMOTE_SOCKET}",
        *options,
    ]  # fmt: skip
    if parts.port is not None:
        command += ["-p", str(parts.port)]
    if parts.username:
        command += ["-l", parts.username]
    return [*command, "--", str(parts.hostname)]


class SshTunnel:
    """Forwards one node's Docker socket; started when first needed, and again when ssh has ended."""

    def __init__(self, node: str, url: str, run_dir: Path, files: SshFiles, *, is_guest: bool = False) -> None:
        self._is_guest = is_guest
        self._node = node
        self._url = url
        self._files = files
        # Hub and broker each have their own tunnel.
        self._socket = run_dir / f"ssh-{node}-{os.getpid()}.sock"
        self._errors = self._socket.with_suffix(".log")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        """Return the address that a Docker client connects to."""
        return f"unix://{self._socket}"

    def ensure(self) -> None:
        """Start ssh unless it runs, and wait until the socket is forwarded. Blocks for some seconds at most.

        Raises:
            NodeUnreachable: ssh ended or did not connect; its last line of output is in the text.
        """
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._start()

    def close(self) -> None:
        """End ssh and remove the socket."""
        with self._lock:
            if self._process is not None:
                self._process.terminate()
                try:
                    self._process.wait(3)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
                self._process = None
            self._socket.unlink(missing_ok=True)
            self._errors.unlink(missing_ok=True)

    def _start(self) -> None:
        if self._is_guest and not self._files.known_hosts(self._node).exists():
            # Never with root's own keys.
            raise NodeUnreachable(f"node {self._node}: the invitation was not used yet, or its owner has left")
        folder = self._socket.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                build_tunnel_command(self._url, self._socket, self._files.options(self._node)),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
            )
        end = time.monotonic() + _START_DEADLINE_S
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise NodeUnreachable(f"node {self._node}: ssh ended: {self._last_error_line()}")
            if self._is_listening():
                return
            time.sleep(0.05)
        self._process.kill()
        self._process.wait()
        raise NodeUnreachable(f"node {self._node}: ssh did not connect within {_START_DEADLINE_S:.0f} s")

    def _is_listening(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(self._socket))
            except OSError:
                return False
        return True

    def _last_error_line(self) -> str:
        lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "no output"
