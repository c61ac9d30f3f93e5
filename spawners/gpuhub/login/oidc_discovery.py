"""Endpoints of an OpenID Connect provider: requested at each start, and stored for a start while it is down."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from gpuhub.common.errors import SetupError

PATH = "/.well-known/openid-configuration"
#: Maximum wait for the provider, seconds.
_TIMEOUT_S = 5
#: Maximum size of a provider's description, bytes.
_MAX_BYTES = 1024**2
#: The requested scopes, if the provider has them; Dex and Authelia have `groups`.
_SCOPES = ("openid", "profile", "email", "groups")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEndpoints:
    """A provider's endpoints and abilities."""

    authorize: str
    token: str
    userinfo: str
    scopes: tuple[str, ...]
    #: The client's secret is sent in a header, otherwise in the body.
    basic_auth: bool


class UnusableProvider(SetupError):
    """The provider does not answer, or its answer is not valid."""


def find_endpoints(issuer: str, authority: Path | None, cache: Path) -> tuple[ProviderEndpoints, str | None]:
    """Return the endpoints, and the problem if they are those of an earlier start.

    Raises:
        SetupError: The provider cannot be used, and no earlier start stored its endpoints.
    """
    try:
        document = _fetch(issuer, authority)
        endpoints = parse_endpoints(document, issuer)
    except UnusableProvider as error:
        stored = _read(cache, issuer)
        if stored is None:
            raise
        return parse_endpoints(stored, issuer), str(error)
    cache.write_text(json.dumps({"issuer": issuer, "document": document}), encoding="utf-8")
    return endpoints, None


def parse_endpoints(document: object, issuer: str) -> ProviderEndpoints:
    """Parse the endpoints in a provider's document.

    Raises:
        UnusableProvider: It is another provider's, or lacks a value.
    """
    if not isinstance(document, dict):
        raise _unusable(issuer, "its answer is not a provider's description")
    named_issuer = document.get("issuer")
    if not isinstance(named_issuer, str) or named_issuer.rstrip("/") != issuer.rstrip("/"):
        raise _unusable(
            issuer, f"it names itself {str(named_issuer)[:200]!r}: if that is right, set login.issuer to it"
        )
    methods = document.get("token_endpoint_auth_methods_supported")
    supported = document.get("scopes_supported")
    scopes = _SCOPES[:3] if not isinstance(supported, list) else tuple(scope for scope in _SCOPES if scope in supported)
    return ProviderEndpoints(
        authorize=_endpoint(document, "authorization_endpoint", issuer),
        token=_endpoint(document, "token_endpoint", issuer),
        userinfo=_endpoint(document, "userinfo_endpoint", issuer),
        scopes=scopes if "openid" in scopes else ("openid", *scopes),
        # RFC 8414: the default is a header.
        basic_auth=not isinstance(methods, list) or "client_secret_post" not in methods,
    )


def _endpoint(document: dict[str, Any], key: str, issuer: str) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise _unusable(issuer, f"it names no {key}")
    url = urlsplit(value)
    if url.scheme != "https" and not (url.scheme == "http" and url.hostname in _LOOPBACK):
        raise _unusable(issuer, f"its {key} is {value[:200]!r}, but it must begin with https://")
    return value


def _fetch(issuer: str, authority: Path | None) -> object:
    url = issuer.rstrip("/") + PATH
    trust = ssl.create_default_context(cafile=None if authority is None else str(authority))
    try:
        with (
            httpx.Client(verify=trust, timeout=_TIMEOUT_S, trust_env=False) as client,
            client.stream("GET", url, headers={"Accept": "application/json"}) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise _unusable(issuer, f"{url} answers {response.status_code}")
            content = b""
            for part in response.iter_bytes():
                content += part
                if len(content) > _MAX_BYTES:
                    raise _unusable(issuer, f"{url} answers with more than {_MAX_BYTES} bytes")
    except httpx.HTTPError as error:
        raise _unusable(issuer, f"{url}: {error or type(error).__name__}") from error
    try:
        return json.loads(content)
    except ValueError:
        raise _unusable(issuer, f"the answer of {url} is not JSON") from None


def _read(cache: Path, issuer: str) -> object | None:
    try:
        stored = json.loads(cache.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return stored.get("document") if isinstance(stored, dict) and stored.get("issuer") == issuer else None


def _unusable(issuer: str, reason: str) -> UnusableProvider:
    return UnusableProvider(f"login.issuer = {issuer!r} cannot be used: {reason}")
