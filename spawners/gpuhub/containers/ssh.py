"""gpuhub's own SSH key, and the host keys that it trusts: where they are, and what ssh is told of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpuhub.paths import Paths

#: Where Docker's packages put the daemon's socket; what the key may reach on a node, and nothing else.
REMOTE_SOCKET = "/var/run/docker.sock"


@dataclass(frozen=True, slots=True)
class SshFiles:
    """The files of one instance, in a folder that only root enters."""

    folder: Path

    @property
    def key(self) -> Path:
        """The private key: one for all nodes."""
        return self.folder / "id_ed25519"

    @property
    def public_key(self) -> Path:
        """Beside it, as `ssh-keygen` writes it."""
        return self.folder / "id_ed25519.pub"

    def known_hosts(self, node: str) -> Path:
        """The node's host keys, written by `gpuhub node add` when somebody has compared them."""
        return self.folder / f"{node}.known_hosts"

    def options(self, node: str) -> list[str]:
        """What ssh is told for a node that `gpuhub node add` set up; nothing, and so root's own keys, for others."""
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
    """Those of an instance."""
    return SshFiles(Paths(instance).secrets / "ssh")


def host_alias(node: str) -> str:
    """The name under which a node's host keys are kept, whatever its address and port are."""
    return f"gpuhub-{node}"
