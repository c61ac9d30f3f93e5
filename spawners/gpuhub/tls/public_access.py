"""The hub's address, cookies and headers for browsers."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from gpuhub.config.head_address import format_host
from gpuhub.config.network import HubSettings
from gpuhub.tls.authority import parse_address

_DEFAULT_PORTS = {"http": 80, "https": 443}


def build_public_url(hub: HubSettings, head_address: str) -> str:
    """Return the address that users open, without a final slash, such as `https://gpuhub.lan`.

    It is `hub.url`, or has the first of `hub.hostnames`, or the address to which the hub is bound. A hub that is bound
    to all addresses has the head node's.
    """
    if hub.url is not None:
        return hub.url
    address = parse_address(hub.bind)
    bound = head_address if address is not None and address.is_unspecified else hub.bind
    scheme = "http" if hub.tls == "off" else "https"
    host = hub.hostnames[0] if hub.hostnames else bound
    port = "" if hub.port == _DEFAULT_PORTS[scheme] else f":{hub.port}"
    return f"{scheme}://{format_host(host)}{port}"


def build_canonical_url(hub: HubSettings, head_address: str) -> str:
    """Return the public URL if the settings name one address for all users, else an empty text.

    JupyterHub redirects browsers to a canonical URL. Without one, browsers stay at the address that they used, for
    example a tunnel's port.
    """
    return build_public_url(hub, head_address) if hub.url is not None or hub.hostnames else ""


def list_certificate_names(hub: HubSettings, head_address: str, machine: str) -> list[str]:
    """Return names and addresses for the hub's own certificate; `machine` is the head node's host name.

    Those of the settings come first (see `list_configured_names`).
    """
    names = list_configured_names(hub)
    host = machine.lower().rstrip(".")
    if host and parse_address(host) is None and _is_host_name(host):
        names += [host, f"{host.split('.')[0]}.local"]
    names += ["localhost", "127.0.0.1", head_address]
    bound = parse_address(hub.bind)
    if bound is not None and not bound.is_unspecified:
        names.append(str(bound))
    return list(dict.fromkeys(names))


def list_configured_names(hub: HubSettings) -> list[str]:
    """Return the names that every certificate of the hub must have, because browsers are sent there."""
    names = list(hub.hostnames)
    if hub.subdomains:
        names.append(f"*.{hub.hostnames[0]}")
    if hub.url is not None:
        names.append(urlsplit(hub.url).hostname or "")
    return list(dict.fromkeys(names))


def _is_host_name(text: str) -> bool:
    return all(label and len(label) < 64 and label.replace("-", "a").isalnum() for label in text.split("."))


def has_https(hub: HubSettings) -> bool:
    """Return whether browsers use HTTPS, to the hub or to a reverse proxy in front of it."""
    return hub.tls != "off"


def build_cookie_options(hub: HubSettings) -> dict[str, Any]:
    """Return the options of all cookies of the hub and of notebooks.

    `SameSite` is `Lax`: with `Strict`, users who come from an OpenID Connect provider or a link would not be logged in.
    """
    return {"samesite": "Lax", "secure": True} if has_https(hub) else {"samesite": "Lax"}


def build_headers(hub: HubSettings) -> dict[str, str]:
    """Return headers for every response of the hub, in addition to JupyterHub's own `Content-Security-Policy`."""
    headers = {
        # Pages show tokens, names and users' work, which proxies and later users of a browser must not get.
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
    }
    if hub.tls in {"files", "proxy"} and _has_default_port(hub):
        # It applies to all ports of a name, and users cannot dismiss a warning. Hence it is set only if the name is the
        # hub's alone and browsers know the authority of its certificate.
        headers["Strict-Transport-Security"] = "max-age=31536000" + "; includeSubDomains" * hub.subdomains
    return headers


def _has_default_port(hub: HubSettings) -> bool:
    return urlsplit(build_public_url(hub, hub.bind)).port is None


def build_subdomain_host(hub: HubSettings, head_address: str) -> str:
    """Return the host below which each user's notebooks have a separate name; empty without subdomains."""
    return build_public_url(hub, head_address) if hub.subdomains else ""


def has_host_prefix(hub: HubSettings) -> bool:
    """Return whether cookies are named `__Host-…`, which prevents other names of the domain from setting them.

    Such cookies belong to the path `/`. If notebooks shared the hub's name, every visited notebook would get the hub's
    cookies, so JupyterHub's guide recommends them only with subdomains.
    """
    return hub.subdomains and has_https(hub)
