"""The host keys of a machine: read before anything is sent there, compared, and kept for gpuhub's own connections."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpuhub.errors import SetupError

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


def scan(host: str, port: int) -> list[HostKey]:
    """The keys that the machine shows; none of them is known to be its own before somebody has compared.

    Raises:
        SetupError: no SSH server answers there.
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
    """Lines `HOST KIND KEY` of `ssh-keyscan` and of known_hosts files; revoked keys and authorities are left out."""
    keys = set()
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 3 and not words[0].startswith(("#", "@")):
            keys.add(HostKey(words[1], words[2]))
    return sorted(keys)


def find_known(host: str, port: int, files: Iterable[str]) -> list[HostKey]:
    """What the administrator's own ssh knows of the machine."""
    name = host if port == 22 else f"[{host}]:{port}"
    found: list[HostKey] = []
    for file in files:
        done = subprocess.run(["ssh-keygen", "-F", name, "-f", file], check=False, capture_output=True, text=True)
        found += parse_keys(done.stdout)
    return found


def is_known(shown: Sequence[HostKey], known: Sequence[HostKey], host: str) -> bool:
    """Whether the machine is one that was seen before. Pure.

    Raises:
        SetupError: it shows another key than it did before.
    """
    if not known:
        return False
    if set(shown) & set(known):
        return True
    raise SetupError(
        f"{host} shows another host key than before ({', '.join(key.fingerprint for key in shown)}): either it was "
        "installed anew, or somebody stands between. Nothing was sent. Compare on the machine itself: "
        f"`ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub`; then `ssh-keygen -R {host}` here"
    )


def format_known_hosts(name: str, keys: Iterable[HostKey]) -> str:
    """The text of a known_hosts file for one machine under this name."""
    return "".join(f"{name} {key.kind} {key.blob}\n" for key in keys)
