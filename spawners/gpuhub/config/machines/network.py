"""`[hub]` and `[network]` in cluster.toml: addresses, ports and HTTPS of the head node, and users' private networks."""

from __future__ import annotations

import ipaddress
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from gpuhub.common.units import Span
from gpuhub.config.base import HostName, ListOf, Port, SettingsTable, private_network


class HubSettings(SettingsTable):
    """Where the head node listens, and how connections to it are secured."""

    #: IP address that browsers connect to; any other than a loopback address needs HTTPS.
    bind: str = "127.0.0.1"
    #: TCP port that browsers connect to.
    port: Port = 8000
    #: Source of the HTTPS certificate. `local`: a certificate authority that gpuhub creates; `files`: `certificate` and
    #: `key`; `proxy`: a reverse proxy in front of gpuhub; `off`: plain HTTP, on loopback only; `auto`: `files` where
    #: they are set, else `off` on loopback and `local` elsewhere.
    https: Literal["auto", "local", "files", "proxy", "off"] = "auto"
    #: PEM file with the certificate and its chain.
    certificate: Path | None = None
    #: PEM file with the private key of `certificate`.
    key: Path | None = None
    #: Host names under which browsers reach the hub; addresses that gpuhub shows contain the first.
    hostnames: ListOf[HostName] = ()
    #: Address of the hub that is shown to users, where it does not follow from `hostnames`, `bind` and `port`, such as
    #: behind a reverse proxy.
    url: str | None = None
    #: Whether each user's notebooks have their own host name, `ada.HOSTNAME`, so that browsers isolate users.
    subdomains: bool = False
    #: Longest validity of a token that a user makes on the token page, such as for a laptop, seconds.
    longest_token: Span = 90 * 86400
    #: Mutual TLS between proxy, hub, broker and notebooks; `auto`: with more than one node.
    internal_tls: bool | Literal["auto"] = "auto"
    #: IP address at which the nodes and their containers reach the head node; None: from the route to the nodes.
    address: str | None = None
    #: TCP port of the hub's own API.
    api_port: Port = 8081
    #: TCP port of the broker.
    broker_port: Port = 8010
    #: TCP port of the proxy's API, on loopback.
    proxy_api_port: Port = 8001

    @field_validator("certificate", "key", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        return Path(value) if isinstance(value, str) else value

    @field_validator("bind")
    @classmethod
    def _bind(cls, value: str) -> str:
        try:
            ipaddress.ip_address(value)
        except ValueError:
            raise ValueError(f'{value!r} is not an IP address: write "127.0.0.1", or "0.0.0.0" for all') from None
        return value

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None:
            url = urlsplit(value)
            if url.scheme not in {"http", "https"} or not url.hostname or url.path not in {"", "/"} or url.query:
                raise ValueError(
                    f'{value!r} is not the address of a hub: write one such as "https://gpuhub.example.org"'
                )
            return value.rstrip("/")
        return value

    @field_validator("address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                ipaddress.ip_address(value)
            except ValueError:
                raise ValueError(f'{value!r} is not an IP address: write one such as "192.168.1.20"') from None
        return value

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        ports = Counter((self.port, self.api_port, self.broker_port, self.proxy_api_port))
        twice = [port for port, count in ports.items() if count > 1]
        if twice:
            raise ValueError(f"port {twice[0]} is used twice: port, api_port, broker_port, proxy_api_port must differ")
        return self

    @model_validator(mode="after")
    def _secured(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together: give both, or neither")
        if self.https == "files" and self.certificate is None:
            raise ValueError('https = "files" needs certificate and key')
        if self.certificate is not None and self.https not in {"auto", "files"}:
            raise ValueError(f'certificate and key mean nothing with https = "{self.https}": write https = "files"')
        if self.https == "off" and not self.is_loopback:
            raise ValueError(
                f'https = "off" with bind = {self.bind!r}: passwords would cross the network unencrypted. Write '
                'https = "local", or keep bind = "127.0.0.1" and reach it by ssh -L 8000:127.0.0.1:8000'
            )
        if self.https == "proxy" and self.url is None:
            raise ValueError('https = "proxy" needs url: the address that browsers use, such as "https://gpuhub.lan"')
        return self

    @model_validator(mode="after")
    def _named(self) -> Self:
        if self.subdomains and not self.hostnames:
            raise ValueError('subdomains = true needs hostnames, such as ["gpuhub.lan"], and a wildcard name in DNS')
        first = self.hostnames[0] if self.hostnames else ""
        if self.subdomains and ("." not in first or first.rpartition(".")[2].isdigit()):
            raise ValueError(
                f'subdomains = true with hostnames = ["{first}", …]: browsers share no cookie below an address, nor '
                'below a name without a dot; put a name such as "gpuhub.lan" first'
            )
        if self.tls == "files" and not self.hostnames and self.url is None:
            raise ValueError('https = "files" needs hostnames: the names in the certificate, such as ["gpuhub.lan"]')
        if self.url is None:
            return self
        scheme, is_plain = urlsplit(self.url).scheme, self.tls == "off"
        if (scheme == "http") != is_plain:
            right = (
                '"proxy" if a reverse proxy terminates HTTPS'
                if is_plain
                else '"off" on loopback, or write https:// there'
            )
            raise ValueError(f'url = {self.url!r} does not go with https = "{self.tls}": write https = {right}')
        if self.subdomains and urlsplit(self.url).hostname != first:
            raise ValueError(f"url = {self.url!r} with subdomains = true: the first of hostnames must be its name")
        return self

    @property
    def is_loopback(self) -> bool:
        """True where only browsers on this machine can connect."""
        return ipaddress.ip_address(self.bind).is_loopback

    @property
    def tls(self) -> Literal["local", "files", "proxy", "off"]:
        """`https` with `auto` resolved."""
        if self.https != "auto":
            return self.https
        if self.certificate is not None:
            return "files"
        return "off" if self.is_loopback else "local"


class NetworkSettings(SettingsTable):
    """Networks and packet filter of users' containers."""

    #: `overlay`: one private network for each user over all nodes, by Docker Swarm; `bridge`: one on a single node;
    #: `auto`: `overlay` with more than one node.
    kind: Literal["auto", "overlay", "bridge"] = "auto"
    #: Private network from which each user's overlay gets a /24 subnet; /22 or larger.
    overlay_pool: Annotated[str, private_network("10.201.0.0/16", range(8, 23))] = "10.201.0.0/16"
    #: Private network of the data addresses, which ranks' containers get where nodes have `data_interface`.
    data_pool: Annotated[str, private_network("10.202.0.0/16")] = "10.202.0.0/16"
    #: MTU of the network between the nodes, bytes; `auto`: that of the head node's routes to the nodes. Overlays get 50
    #: bytes less, for VXLAN's header.
    mtu: Literal["auto"] | Annotated[int, Field(ge=576, le=9216)] = "auto"
    #: Encrypt users' overlays between the nodes, by IPsec between the nodes' kernels; each needs ESP and AES-GCM. Costs
    #: speed and 26 to 29 bytes of the MTU.
    encrypt: bool = False
    #: Firewall on every node for users' containers: they reach hub and broker, the containers of the same user, and
    #: what `egress` allows; only the head node reaches their published ports.
    guard: bool = True
    #: Addresses outside that containers may reach. `internet`: all but private addresses; `open`: all but the nodes
    #: themselves and cloud metadata; `none`: nothing.
    egress: Literal["internet", "open", "none"] = "internet"
    #: Further addresses or networks that containers may reach, such as a licence server; never a node.
    reach: ListOf[str] = ()

    @model_validator(mode="after")
    def _encrypted(self) -> Self:
        if self.encrypt and self.kind == "bridge":
            raise ValueError('encrypt = true is for overlays, and kind = "bridge" has none: remove one of the two')
        return self

    @field_validator("reach")
    @classmethod
    def _reach(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            try:
                ipaddress.ip_network(text)
            except ValueError as error:
                raise ValueError(
                    f'{text!r} is not an address or network: {error}; write one like "192.168.1.50"'
                ) from None
        return value
