"""`[notifications]` in cluster.toml: destinations of users, and those of the owner of the machines."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, field_validator

from gpuhub.common.errors import SettingsError
from gpuhub.common.secrets import read_private_file
from gpuhub.config.base import ListOf, SettingsTable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
#: `192.168.1.10`, `10.0.0.0/24:2586` or `[fd00::1]:8080`.
_ALLOWED = re.compile(r"(?:\[([0-9a-fA-F:./]+)\]|([0-9.]+(?:/[0-9]+)?))(?::([0-9]{1,5}))?")
_MAX_FILE_BYTES, _MAX_LINES = 65536, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedAddress:
    """Addresses that an administrator permits, with one port or all."""

    network: Network
    port: int | None

    def includes(self, address: Address, port: int | None) -> bool:
        return address in self.network and (self.port is None or self.port == port)


def parse_allowed(text: str) -> AllowedAddress:
    """Parse `192.168.1.10:2586`, `10.0.0.0/24` or `[fd00::/64]:443`.

    Raises:
        ValueError: It is none of these.
    """
    match = _ALLOWED.fullmatch(text)
    port = 0 if match is None or match[3] is None else int(match[3])
    try:
        network = ipaddress.ip_network("" if match is None or port > 65535 else match[1] or match[2])
    except ValueError:
        raise ValueError(
            f"{text!r} is not an address: write an IP address or network, and a port if only that is meant, such as "
            '"192.168.1.10:2586", "10.0.0.0/24" or "[fd00::1]:443"'
        ) from None
    return AllowedAddress(network=network, port=port or None)


def _check_allowed(text: str) -> str:
    parse_allowed(text)
    return text


class NotificationSettings(SettingsTable):
    """Who is notified outside JupyterLab and the hub's pages, and where."""

    #: Whether users may have notifications sent to destinations of their own, such as mail, ntfy or a webhook. The head
    #: node connects there.
    users: bool = True
    #: Private addresses to which users may have notifications sent all the same, such as an ntfy server of the lab:
    #: "192.168.1.10:2586", or "10.0.0.0/24" for all its ports. Other addresses must be on the internet.
    allowed_addresses: ListOf[Annotated[str, AfterValidator(_check_allowed)]] = ()
    #: A file with the destinations of the owner of the machines, one Apprise URL in a line; readable only by root. They
    #: get what concerns the machines: nodes that are down, failed or blocked GPUs, full disks.
    destinations_file: Path | None = None

    @field_validator("destinations_file", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        return Path(value) if isinstance(value, str) else value


def read_destinations(path: Path) -> list[str]:
    """Return the URLs in the file of destinations; empty lines and lines that begin with `#` are ignored.

    Raises:
        SettingsError: The file is missing or too long, or other users than its owner can read it.
    """
    key = "notifications.destinations_file"
    content = read_private_file(path, key, content="one Apprise URL in each line", limit=_MAX_FILE_BYTES)
    lines = [line.strip() for line in content.decode("utf-8", "replace").splitlines()]
    urls = [line for line in lines if line and not line.startswith("#")]
    if len(content) > _MAX_FILE_BYTES or len(urls) > _MAX_LINES:
        raise SettingsError(f"{key}: {str(path)!r}: {_MAX_LINES} destinations are the limit")
    return urls
