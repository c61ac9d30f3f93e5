"""SSH keys: gpuhub's own key on nodes, and the host keys of nodes, which are compared before anything is sent."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuhub.common.errors import SetupError
from gpuhub.docker.ssh import REMOTE_SOCKET, SshFiles

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


def ensure_key(files: SshFiles, instance: str) -> str:
    """Return the public key's line as `ssh-keygen` writes it; the pair is made if it is missing.

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


#: Longest wait for a machine's host keys, seconds.
_SCAN_S = 8


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


def is_known(shown: Sequence[HostKey], known: Sequence[HostKey], host: str) -> bool:
    """Return whether the machine shows a known key; False if no key of it is known.

    Raises:
        SetupError: It shows other keys than the known ones.
    """
    if not known:
        return False
    if set(shown) & set(known):
        return True
    raise SetupError(
        f"{host} shows another host key than before ({', '.join(key.fingerprint for key in shown)}): either it was "
        "installed again, or another machine intercepts the connection. Nothing was sent. Compare on the machine: "
        f"`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`; then `ssh-keygen -R {host}` here"
    )


def format_known_hosts(name: str, keys: Iterable[HostKey]) -> str:
    """Return the text of a known_hosts file for one machine with this name."""
    return "".join(f"{name} {key.kind} {key.blob}\n" for key in keys)
