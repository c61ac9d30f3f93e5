"""How browsers reach the hub, and what they are told to keep to. Pure."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from gpuhub.tables import Hub
from gpuhub.trust.authority import as_address
from gpuhub.urls import in_url

_DEFAULT_PORTS = {"http": 80, "https": 443}


def public_url(hub: Hub, head_address: str) -> str:
    """The address for people to open, without a slash at its end, such as `https://gpuhub.lan`.

    It is `hub.url`, else made of the first of `hub.hostnames`, else of the address that the hub is bound to, where that
    means all of them of the head node's own.
    """
    if hub.url is not None:
        return hub.url
    address = as_address(hub.bind)
    bound = head_address if address is not None and address.is_unspecified else hub.bind
    scheme = "http" if hub.tls == "off" else "https"
    host = hub.hostnames[0] if hub.hostnames else bound
    port = "" if hub.port == _DEFAULT_PORTS[scheme] else f":{hub.port}"
    return f"{scheme}://{in_url(host)}{port}"


def canonical_url(hub: Hub, head_address: str) -> str:
    """`public_url` where the settings name one address that everybody is to use, and empty where several will do.

    With one, JupyterHub sends browsers there; without, it keeps to whatever a browser used, a tunnel's port say.
    """
    return public_url(hub, head_address) if hub.url is not None or hub.hostnames else ""


def certificate_names(hub: Hub, head_address: str, machine: str) -> list[str]:
    """Names and addresses for the hub's own certificate; `machine` is what the head node is called.

    Those that the settings ask for come first, see `named`.
    """
    names = named(hub)
    host = machine.lower().rstrip(".")
    if host and as_address(host) is None and _is_host_name(host):
        names += [host, f"{host.split('.')[0]}.local"]
    names += ["localhost", "127.0.0.1", head_address]
    bound = as_address(hub.bind)
    if bound is not None and not bound.is_unspecified:
        names.append(str(bound))
    return list(dict.fromkeys(names))


def named(hub: Hub) -> list[str]:
    """The names that any certificate of the hub's must be for: browsers are sent there."""
    names = list(hub.hostnames)
    if hub.subdomains:
        names.append(f"*.{hub.hostnames[0]}")
    if hub.url is not None:
        names.append(urlsplit(hub.url).hostname or "")
    return list(dict.fromkeys(names))


def _is_host_name(text: str) -> bool:
    return all(label and len(label) < 64 and label.replace("-", "a").isalnum() for label in text.split("."))


def has_https(hub: Hub) -> bool:
    """Whether browsers speak HTTPS, to the hub or to a reverse proxy in front of it."""
    return hub.tls != "off"


def cookie_options(hub: Hub) -> dict[str, Any]:
    """For every cookie of the hub and of notebooks.

    `Lax`: with `Strict`, nobody would be logged in who comes back from an OpenID Connect provider, or from a link.
    """
    return {"samesite": "Lax", "secure": True} if has_https(hub) else {"samesite": "Lax"}


def headers(hub: Hub) -> dict[str, str]:
    """For every page and answer of the hub, besides JupyterHub's own `Content-Security-Policy`."""
    found = {
        # They show tokens, names and what somebody runs: neither a proxy nor the next user of a browser gets them.
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
    }
    if hub.tls in {"files", "proxy"} and _has_name_of_its_own(hub):
        # Holds for all ports of a name, and lets nobody pass a warning: only where the name is the hub's alone and its
        # certificate one that browsers know by themselves.
        found["Strict-Transport-Security"] = "max-age=31536000" + "; includeSubDomains" * hub.subdomains
    return found


def _has_name_of_its_own(hub: Hub) -> bool:
    return urlsplit(public_url(hub, hub.bind)).port is None


def subdomain_host(hub: Hub, head_address: str) -> str:
    """Below which users' notebooks have names of their own; empty where they have none."""
    return public_url(hub, head_address) if hub.subdomains else ""


def has_host_prefix(hub: Hub) -> bool:
    """Whether cookies are named `__Host-…`, which keeps other names of the domain from setting them.

    Such cookies belong to the path `/`: where notebooks share the hub's own name, every notebook that is visited would
    be sent the hub's. JupyterHub's guide has them with subdomains only.
    """
    return hub.subdomains and has_https(hub)
