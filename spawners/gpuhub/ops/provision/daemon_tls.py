"""Mutual TLS of one node's Docker daemon: its certificates, and the scripts that configure it.

Each node has its own authority, whose key is dropped at once: nothing is ever signed again, and new certificates
come with a new authority. An attacker on a node gets a key that opens no other node, and the head node stores nothing
that could make one.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from gpuhub.common.errors import SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import DockerTlsFiles
from gpuhub.tls.authority import create_authority, encode_certificate, is_permitted, issue_certificate

PORT = 2376
#: The folder of certificates on the node, which only root can read.
FOLDER = "/etc/gpuhub/docker"
DROP_IN = "/etc/systemd/system/docker.service.d/gpuhub.conf"
_MARK = "--tlsverify"

_PUT_FILE = """\
umask 077
mkdir -p {folder}
cat >{folder}/{name} <<'gpuhub-end'
{content}gpuhub-end
chmod 600 {folder}/{name}
"""
_PUT_DROP_IN = """\
mkdir -p /etc/systemd/system/docker.service.d
cat >{drop_in} <<'gpuhub-end'
{content}gpuhub-end
chmod 644 {drop_in}
systemctl daemon-reload
"""
RESTART_SCRIPT = f"""\
set -eu
if ! systemctl restart docker.service; then
    rm -f {DROP_IN}
    systemctl daemon-reload
    systemctl restart docker.service || :
    echo "Docker does not start with these options, and was started as before: see journalctl -u docker" >&2
    exit 1
fi
"""
REMOVE_SCRIPT = f"""\
set -eu
rm -rf {FOLDER}
if [ -e {DROP_IN} ]; then
    rm -f {DROP_IN}
    systemctl daemon-reload
    systemctl restart docker.service
fi
"""
#: Long, because no browser sees these certificates and a machine may run for years without maintenance.
LIFETIME = timedelta(days=3 * 365)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCertificates:
    """The certificates and keys of one node, as PEM."""

    authority: bytes
    server: bytes
    server_key: bytes
    client: bytes
    client_key: bytes


def make_certificates(node: str, address: str, now: datetime, life: timedelta = LIFETIME) -> NodeCertificates:
    """Make new certificates for a node at this address."""
    authority = create_authority([address, node], node, now)
    # Each is valid for one side only, so that a node's certificate opens no other daemon.
    server, server_key = issue_certificate(authority, [address, node], now, life=life)
    client, client_key = issue_certificate(authority, [node], now, life=life, purpose=ExtendedKeyUsageOID.CLIENT_AUTH)
    return NodeCertificates(
        authority=encode_certificate(authority.certificate),
        server=server,
        server_key=server_key,
        client=client,
        client_key=client_key,
    )


def find_client_files(paths: Paths, node: str) -> DockerTlsFiles:
    """Return the files of the head node's part: authority, certificate and key."""
    folder = paths.secrets / "docker" / node
    return DockerTlsFiles(ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem")


def store_certificates(files: DockerTlsFiles, certificates: NodeCertificates) -> None:
    """Store the head node's part, readable by root only; earlier files are replaced."""
    for folder in (files.key.parent.parent, files.key.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    for file, content in (
        (files.ca, certificates.authority),
        (files.cert, certificates.client),
        (files.key, certificates.client_key),
    ):
        temporary = file.with_suffix(".fresh")
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:
            output.write(content)
        temporary.replace(file)


def remove_certificates(files: DockerTlsFiles) -> None:
    """Remove the head node's part."""
    shutil.rmtree(files.key.parent, ignore_errors=True)


def are_certificates_valid(files: DockerTlsFiles, address: str, now: datetime, *, margin: timedelta) -> bool:
    """Return whether the head node's part exists and is valid for longer than the margin."""
    if not all(file.exists() for file in (files.ca, files.cert, files.key)):
        return False
    ends = [_read(file).not_valid_after_utc for file in (files.ca, files.cert)]
    return is_permitted(_read(files.ca), address) and min(ends) - now > margin


def _read(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def build_flags(address: str) -> str:
    """Return dockerd's additional options."""
    host = f"[{address}]" if ":" in address else address
    return (
        f"-H tcp://{host}:{PORT} {_MARK} --tlscacert={FOLDER}/ca.pem "
        f"--tlscert={FOLDER}/server.pem --tlskey={FOLDER}/server-key.pem"
    )


def build_files_script(certificates: NodeCertificates) -> str:
    """Return the script that installs the node's part: its certificate and key, and the authority of its clients."""
    files = {
        "ca.pem": certificates.authority,
        "server.pem": certificates.server,
        "server-key.pem": certificates.server_key,
    }
    parts = [_PUT_FILE.format(folder=FOLDER, name=name, content=content.decode()) for name, content in files.items()]
    return "set -eu\n" + "".join(parts)


def build_drop_in(started: str, address: str) -> str:
    """Return systemd's drop-in: the daemon's current command with gpuhub's options, which replace earlier ones.

    Raises:
        SetupError: The command that systemd reports cannot be parsed.
    """
    # `{ path=/usr/bin/dockerd ; argv[]=/usr/bin/dockerd -H fd:// ; ignore_errors=no ; … }`
    match = re.search(r"argv\[\]=(.*?) ;", started)
    if match is None or "dockerd" not in match[1]:
        raise SetupError(
            f"systemd does not report how it starts Docker ({started or 'nothing'!r}): {describe_manual_setup(address)}"
        )
    command = re.sub(rf" -H tcp://\S+ {_MARK} --tlscacert={FOLDER}/\S+ --tlscert=\S+ --tlskey=\S+", "", match[1])
    return f"# Written by `gpuhub node add --tls`.\n[Service]\nExecStart=\nExecStart={command} {build_flags(address)}\n"


def build_drop_in_script(text: str) -> str:
    """Return the script that installs the drop-in; it takes effect at the daemon's next start."""
    return "set -eu\n" + _PUT_DROP_IN.format(drop_in=DROP_IN, content=text)


def describe_manual_setup(address: str) -> str:
    """Return what the administrator must do where systemd does not run Docker."""
    return f"start dockerd there with these additional options, then add the node again: {build_flags(address)}"
