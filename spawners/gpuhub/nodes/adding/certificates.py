"""Certificates for mutual TLS with one node's Docker daemon: an authority for it alone, and the two that this signs.

The authority's key is forgotten at once: nothing is ever signed again, and new certificates come with a new authority.
So whoever takes a node over gets a key that opens no other node, and nothing lies on the head node that could make one.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from gpuhub.paths import Paths
from gpuhub.settings import Tls
from gpuhub.trust.authority import certificate_pem, is_permitted, issue_pair, make_authority

#: No browser sees these: they hold for as long as a machine may be looked after by nobody.
LIFE = timedelta(days=3 * 365)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCertificates:
    """All that is made for a node, as PEM."""

    authority: bytes
    server: bytes
    server_key: bytes
    client: bytes
    client_key: bytes


def make(node: str, address: str, now: datetime, life: timedelta = LIFE) -> NodeCertificates:
    """New certificates for a node at this address. Pure, but for the keys' chance."""
    authority = make_authority([address, node], node, now)
    # For one side only: a node's own opens no other daemon.
    server, server_key = issue_pair(authority, [address, node], now, life=life)
    client, client_key = issue_pair(authority, [node], now, life=life, purpose=ExtendedKeyUsageOID.CLIENT_AUTH)
    return NodeCertificates(
        authority=certificate_pem(authority.certificate),
        server=server,
        server_key=server_key,
        client=client,
        client_key=client_key,
    )


def client_files(paths: Paths, node: str) -> Tls:
    """Where the head node keeps its part: authority, certificate and key."""
    folder = paths.secrets / "docker" / node
    return Tls(ca=folder / "ca.pem", cert=folder / "cert.pem", key=folder / "key.pem")


def store(files: Tls, made: NodeCertificates) -> None:
    """Keep the head node's part, readable by root alone; earlier files are replaced."""
    for folder in (files.key.parent.parent, files.key.parent):
        folder.mkdir(mode=0o700, exist_ok=True)
    for file, content in ((files.ca, made.authority), (files.cert, made.client), (files.key, made.client_key)):
        fresh = file.with_suffix(".fresh")
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:
            output.write(content)
        fresh.replace(file)


def forget(files: Tls) -> None:
    """Remove the head node's part."""
    shutil.rmtree(files.key.parent, ignore_errors=True)


def is_good(files: Tls, address: str, now: datetime, *, before: timedelta) -> bool:
    """Whether the head node's part is there and holds for so long yet."""
    if not all(file.exists() for file in (files.ca, files.cert, files.key)):
        return False
    ends = [_read(file).not_valid_after_utc for file in (files.ca, files.cert)]
    return is_permitted(_read(files.ca), address) and min(ends) - now > before


def _read(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())
