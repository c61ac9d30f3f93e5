"""Where an OpenID Connect provider's endpoints are: asked at the start, and kept for a start while it is down."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from gpuhub.errors import SetupError

PATH = "/.well-known/openid-configuration"
_PATIENCE_S = 5
_LONGEST = 1024**2
#: What we ask for where the provider has it; `groups` is what Dex and Authelia call theirs.
_SCOPES = ("openid", "profile", "email", "groups")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """What the provider says of itself."""

    authorize: str
    token: str
    userinfo: str
    scopes: tuple[str, ...]
    #: How the client's secret is sent: in a header, or else in the body.
    basic_auth: bool


class Unusable(SetupError):
    """The provider does not answer, or not as one would."""


def find_endpoints(issuer: str, authority: Path | None, cache: Path) -> tuple[Endpoints, str | None]:
    """The endpoints, with what was wrong where they are those of an earlier start.

    Raises:
        SetupError: the provider cannot be used, and there was no earlier start with it.
    """
    try:
        document = _fetch(issuer, authority)
        endpoints = parse(document, issuer)
    except Unusable as error:
        kept = _read(cache, issuer)
        if kept is None:
            raise
        return parse(kept, issuer), str(error)
    cache.write_text(json.dumps({"issuer": issuer, "document": document}), encoding="utf-8")
    return endpoints, None


def parse(document: object, issuer: str) -> Endpoints:
    """The endpoints in a provider's document.

    Raises:
        Unusable: it is another provider's, or lacks something.
    """
    if not isinstance(document, dict):
        raise _unusable(issuer, "it answers with something else than a provider's description")
    said = document.get("issuer")
    if not isinstance(said, str) or said.rstrip("/") != issuer.rstrip("/"):
        raise _unusable(issuer, f"it calls itself {str(said)[:200]!r}: write that as login.issuer, if it is meant")
    methods = document.get("token_endpoint_auth_methods_supported")
    supported = document.get("scopes_supported")
    scopes = _SCOPES[:3] if not isinstance(supported, list) else tuple(scope for scope in _SCOPES if scope in supported)
    return Endpoints(
        authorize=_endpoint(document, "authorization_endpoint", issuer),
        token=_endpoint(document, "token_endpoint", issuer),
        userinfo=_endpoint(document, "userinfo_endpoint", issuer),
        scopes=scopes if "openid" in scopes else ("openid", *scopes),
        # RFC 8414: left out means in a header.
        basic_auth=not isinstance(methods, list) or "client_secret_post" not in methods,
    )


def _endpoint(document: dict[str, Any], key: str, issuer: str) -> str:
    value = document.get(key)
    if not isinstance(value, str):
        raise _unusable(issuer, f"it names no {key}")
    url = urlsplit(value)
    if url.scheme != "https" and not (url.scheme == "http" and url.hostname in _LOOPBACK):
        raise _unusable(issuer, f"its {key} is {value[:200]!r}, where https:// is needed")
    return value


def _fetch(issuer: str, authority: Path | None) -> object:
    url = issuer.rstrip("/") + PATH
    trust = ssl.create_default_context(cafile=None if authority is None else str(authority))
    try:
        with (
            httpx.Client(verify=trust, timeout=_PATIENCE_S, trust_env=False) as client,
            client.stream("GET", url, headers={"Accept": "application/json"}) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                raise _unusable(issuer, f"{url} answers {answer.status_code}")
            content = b""
            for part in answer.iter_bytes():
                content += part
                if len(content) > _LONGEST:
                    raise _unusable(issuer, f"{url} answers with more than {_LONGEST} bytes")
    except httpx.HTTPError as error:
        raise _unusable(issuer, f"{url}: {error or type(error).__name__}") from error
    try:
        return json.loads(content)
    except ValueError:
        raise _unusable(issuer, f"{url} answers with no JSON") from None


def _read(cache: Path, issuer: str) -> object | None:
    try:
        kept = json.loads(cache.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return kept.get("document") if isinstance(kept, dict) and kept.get("issuer") == issuer else None


def _unusable(issuer: str, why: str) -> Unusable:
    return Unusable(f"login.issuer = {issuer!r} cannot be used: {why}")
