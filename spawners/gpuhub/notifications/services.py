"""The kinds of destinations that were reviewed, and the checks of a destination's URL before anything opens it.

Apprise knows 130 kinds, some of which run programs, write files or read the files that a parameter names. A kind is
permitted here after its code was read: it connects to the destination's host and does nothing else, with these
parameters alone.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from gpuhub.common.errors import InvalidRequest
from gpuhub.config.notifications import AllowedAddress
from gpuhub.notifications.addresses import explain_forbidden

#: Maximum number of parameters of a URL, including the HTTP headers of a webhook.
_MAX_PARAMETERS = 20
_LOCAL_NAMES = re.compile(r"(^|\.)(localhost|local|internal|localdomain)\.?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A kind of destination."""

    #: Name for people.
    title: str
    #: Module and class of Apprise's plugin.
    plugin: tuple[str, str]
    #: Permitted parameters of the URL's query.
    parameters: frozenset[str] = frozenset()
    #: Whether the URL names a host, which is shown; otherwise what stands there is a secret.
    has_host: bool = True
    #: Whether a host is named only where a path follows, as in `ntfys://HOST/TOPIC`.
    is_host_optional: bool = False
    #: Whether any parameter may follow one of Apprise's prefixes `+`, `-` and `:`.
    has_free_parameters: bool = False
    #: Values for the plugin that the URL cannot change.
    fixed: dict[str, object] = field(default_factory=dict)


_MAIL = Service(
    title="Mail",
    plugin=("email", "NotifyEmail"),
    parameters=frozenset({"to", "from", "name", "smtp", "mode", "cc", "bcc", "reply", "user", "pass"}),
)
_NTFY = Service(
    title="ntfy",
    plugin=("ntfy", "NotifyNtfy"),
    parameters=frozenset({"priority", "tags", "mode", "token", "auth", "to"}),
    is_host_optional=True,
)
_MATRIX = Service(
    title="Matrix",
    plugin=("matrix", "NotifyMatrix"),
    parameters=frozenset({"to", "token", "mode", "version", "v", "msgtype"}),
    # End-to-end encryption needs keys that are kept in files.
    fixed={"e2ee": False, "autoverify": False},
)
_WEBHOOK = Service(
    title="Webhook", plugin=("custom_json", "NotifyJSON"), parameters=frozenset({"method"}), has_free_parameters=True
)
SERVICES = {
    "mailto": _MAIL,
    "mailtos": _MAIL,
    "ntfy": _NTFY,
    "ntfys": _NTFY,
    "matrix": _MATRIX,
    "matrixs": _MATRIX,
    "json": _WEBHOOK,
    "jsons": _WEBHOOK,
    "tgram": Service(
        title="Telegram",
        plugin=("telegram", "NotifyTelegram"),
        parameters=frozenset({"to", "topic", "thread", "silent"}),
        has_host=False,
        # It would search the bot's messages for somebody to write to.
        fixed={"detect_owner": False},
    ),
    "slack": Service(title="Slack", plugin=("slack", "NotifySlack"), parameters=frozenset({"to"}), has_host=False),
    "discord": Service(
        title="Discord", plugin=("discord", "NotifyDiscord"), parameters=frozenset({"thread"}), has_host=False
    ),
}


def escape(url: str) -> str:
    """Return the URL with the `#` of rooms and channels escaped: here it begins no fragment."""
    return url.replace("#", "%23")


def check_url(url: str, allowed: Iterable[AllowedAddress] | None) -> str:
    """Check a destination's URL as far as that needs no network; return its label, which has no secret.

    Args:
        url: An Apprise URL.
        allowed: Private addresses that it may name all the same; None for all, for the owner of the machines.

    Raises:
        InvalidRequest: The reason, without the URL.
    """
    schema, separator, rest = escape(url).partition("://")
    service = SERVICES.get(schema.lower())
    if not separator or service is None:
        known = ", ".join(f"{name}://" for name in SERVICES)
        raise InvalidRequest(f"the destination must begin with one of {known}")
    try:
        parts = urlsplit(f"{schema}://{rest}")
        host, port = (parts.hostname or "", parts.port) if service.has_host else ("", None)
    except ValueError:
        raise InvalidRequest("the destination is not a URL: check brackets and the port") from None
    check_parameters(service, [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)])
    is_named = service.has_host and (not service.is_host_optional or bool(parts.path.strip("/")))
    hosts = [host] if is_named and host else []
    hosts += [value for name, value in parse_qsl(parts.query) if name.lower() == "smtp"]
    if allowed is not None:
        for name in hosts:
            _check_host(name, port, tuple(allowed))
    return f"{service.title} at {hosts[-1]}"[:120] if hosts else service.title


def check_parameters(service: Service, names: Collection[str]) -> None:
    """Check the names of a URL's parameters.

    Raises:
        InvalidRequest: There are too many, or one is not permitted.
    """
    if len(names) > _MAX_PARAMETERS:
        raise InvalidRequest(f"the destination has {len(names)} parameters; {_MAX_PARAMETERS} are the limit")
    for name in names:
        # `+` is a space in a query.
        is_free = service.has_free_parameters and name[:1] in {" ", "+", "-", ":"}
        if not is_free and name.lower() not in service.parameters:
            raise InvalidRequest(
                f"the parameter {name[:32]!r} is not permitted for {service.title}; permitted: "
                f"{', '.join(sorted(service.parameters)) or 'none'}"
            )


def _check_host(name: str, port: int | None, allowed: tuple[AllowedAddress, ...]) -> None:
    """Refuse addresses and names that are certainly not on the internet; the sender checks what names resolve to."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        if _LOCAL_NAMES.search(name.lower()) and not allowed:
            raise InvalidRequest(f"{name} is a name of this network, not of the internet") from None
        return
    reason = explain_forbidden(address, port, allowed)
    if reason is not None:
        raise InvalidRequest(f"{reason}; an administrator can permit it in cluster.toml, [notifications]")
