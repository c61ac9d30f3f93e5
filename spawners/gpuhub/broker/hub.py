"""The hub's REST API, as far as the broker needs it."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import quote

import httpx

from gpuhub.broker.refusals import HubUnreachable
from gpuhub.errors import NotAllowed, NotFound

_TIMEOUT_S = 5.0
#: The hub answers a start or stop after `slow_spawn_timeout` or `slow_stop_timeout` at the latest (10 s each).
_SERVER_TIMEOUT_S = 20.0


class HubApi:
    """The hub at `url` (ends in `/hub/api`), with the broker's own service token."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        tls: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`tls`: for an https:// address, whom to trust and what to show."""
        self._token = token
        # Proxy variables of the environment are for the internet, not for the head node itself.
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=_TIMEOUT_S,
            trust_env=False,
            verify=tls or True,
            transport=transport,
            follow_redirects=False,
        )

    async def close(self) -> None:
        """Drop the connections."""
        await self._client.aclose()

    async def token_model(self, token: str) -> Mapping[str, Any] | None:
        """See `auth.TokenChecker`."""
        answer = await self._request("GET", "/user", token)
        if answer.status_code in {401, 403, 404}:
            return None
        if answer.status_code != 200:
            raise HubUnreachable(f"the hub answered a token check with HTTP status {answer.status_code}")
        return cast("Mapping[str, Any]", answer.json())

    async def start_server(self, owner: str, server: str, profile: str) -> None:
        """Ask for a user's server; one that runs or is about to is left alone.

        Raises:
            HubUnreachable, NotFound (no such user), NotAllowed (the service's scopes do not reach that far).
        """
        answer = await self._request(
            "POST", _server_path(owner, server), self._token, json={"profile": profile}, limit_s=_SERVER_TIMEOUT_S
        )
        # 400: it runs or is pending, which is what was wanted.
        _check(answer, owner, accept={201, 202, 400})

    async def stop_server(self, owner: str, server: str) -> None:
        """Stop a user's server; one that does not run is left alone.

        Raises:
            As `start_server` does.
        """
        answer = await self._request("DELETE", _server_path(owner, server), self._token, limit_s=_SERVER_TIMEOUT_S)
        _check(answer, owner, accept={202, 204, 400, 404})

    async def _request(
        self, method: str, path: str, token: str, *, json: object = None, limit_s: float = _TIMEOUT_S
    ) -> httpx.Response:
        try:
            return await self._client.request(
                method, path, headers={"Authorization": f"token {token}"}, json=json, timeout=limit_s
            )
        except httpx.HTTPError as error:
            raise HubUnreachable("the hub does not answer at present; try again in a moment") from error


def _server_path(owner: str, server: str) -> str:
    user = f"/users/{quote(owner, safe='')}"
    return f"{user}/servers/{quote(server, safe='')}" if server else f"{user}/server"


def _check(answer: httpx.Response, owner: str, *, accept: set[int]) -> None:
    status = answer.status_code
    if status in accept:
        return
    if status == 404:
        raise NotFound(f"the hub knows no user {owner!r}")
    if status in {401, 403}:
        raise NotAllowed("the hub does not let the broker's service token start and stop servers")
    raise HubUnreachable(f"the hub answered with HTTP status {status}")
