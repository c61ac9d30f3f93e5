"""What people are told of the hub's certificate: until when it is good, and how a MacBook comes to trust it. Pure."""

from __future__ import annotations

from urllib.parse import urlsplit

from gpuhub.paths import Paths
from gpuhub.tables import Hub
from gpuhub.trust import public
from gpuhub.trust.authority import fingerprint
from gpuhub.trust.certificates import Ready


def describe(ready: Ready | None, hub: Hub, paths: Paths, head_address: str) -> list[str]:
    """Lines for the administrator; those that are to be typed stand by themselves."""
    if ready is None:
        where = "the reverse proxy's" if hub.tls == "proxy" else "none: browsers on this machine only"
        return [f"Certificate:    {where}"]
    lines = [f"Certificate:    good until {ready.certificate.not_valid_after_utc:%Y-%m-%d}"]
    lines += [f"  {news}" for news in ready.news]
    if ready.authority is None:
        return lines
    host = urlsplit(public.public_url(hub, head_address)).hostname
    return [
        *lines,
        "Trust it:       once on each Mac whose browsers come here (other systems: docs/https.md)",
        f"  scp {host}:{paths.authority} gpuhub-authority.pem",
        "  sudo security add-trusted-cert -d -r trustRoot -k /Library/Keychains/System.keychain gpuhub-authority.pem",
        f"  SHA-256 {fingerprint(ready.authority)}",
    ]
