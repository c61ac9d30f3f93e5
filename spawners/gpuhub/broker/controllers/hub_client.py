"""The client of the hub's API: whose token it is, and starting, stopping and reading notebook servers."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Any, Protocol, cast
from urllib.parse import quote

import httpx

from gpuhub.broker_api.errors import HubUnreachable
from gpuhub.common.errors import NotAllowed, NotFound

#: When no spawner has polled a notebook's request for this time, the hub is asked to start the server, seconds.
POLL_TIMEOUT_S = 20.0
#: Time limit of an ordinary request to the hub, seconds.
_TIMEOUT_S = 5.0
#: Time limit of a start or stop: the hub answers within `slow_spawn_timeout` or `slow_stop_timeout` (10 s each).
#: Seconds.
_SERVER_TIMEOUT_S = 20.0


class ServerApi(Protocol):
    """The part of the hub's API that starts and stops users' servers."""

    async def start_server(self, owner: str, server: str, options: Mapping[str, str]) -> None:
        """Start a server, see `HubClient`."""
        ...

    async def stop_server(self, owner: str, server: str) -> None:
        """Stop a server, see `HubClient`."""
        ...


class HubClient:
    """Client of the hub's API at `url` (ends in `/hub/api`), with the broker's own service token."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        tls: ssl.SSLContext | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`tls` has the trusted authorities and the client certificate for an https:// URL."""
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
        """Close the connections."""
        await self._client.aclose()

    async def fetch_token_model(self, token: str) -> Mapping[str, Any] | None:
        """Return the hub's model of a token, see `auth.TokenChecker`."""
        answer = await self._request("GET", "/user", token)
        if answer.status_code in {401, 403, 404}:
            return None
        if answer.status_code != 200:
            raise HubUnreachable(f"the hub answered a token check with HTTP status {answer.status_code}")
        return cast("Mapping[str, Any]", answer.json())

    async def start_server(self, owner: str, server: str, options: Mapping[str, str]) -> None:
        """Start a user's server with the spawner's options, unless it runs or starts already.

        Raises:
            HubUnreachable: the hub does not answer.
            NotFound: the user does not exist.
            NotAllowed: the service's scopes do not permit it.
        """
        answer = await self._request(
            "POST", _server_path(owner, server), self._token, json=dict(options), limit_s=_SERVER_TIMEOUT_S
        )
        # 400: the server runs or is pending, which is what the caller wants.
        _check(answer, owner, accept={201, 202, 400})

    async def stop_server(self, owner: str, server: str) -> None:
        """Stop a user's server, if it runs.

        Raises:
            HubUnreachable, NotFound, NotAllowed: as for `start_server`.
        """
        answer = await self._request("DELETE", _server_path(owner, server), self._token, limit_s=_SERVER_TIMEOUT_S)
        _check(answer, owner, accept={202, 204, 400, 404})

    async def has_user(self, name: str) -> bool:
        """Return whether the hub has a user of this name, who has then logged in at least once.

        Raises:
            HubUnreachable: the hub does not answer.
            NotAllowed: the service's scopes do not permit it.
        """
        answer = await self._request("GET", f"/users/{quote(name, safe='')}", self._token)
        _check(answer, name, accept={200, 404})
        return answer.status_code == 200

    async def revoke_access(self, name: str) -> int:
        """Revoke all tokens and sessions of a user; return the number of tokens.

        Raises:
            HubUnreachable, NotFound, NotAllowed: as for `start_server`.
        """
        answer = await self._request("POST", f"/gpuhub/users/{quote(name, safe='')}/revoke", self._token)
        _check(answer, name, accept={200})
        return int(answer.json()["tokens"])

    async def _request(
        self, method: str, path: str, token: str, *, json: object = None, limit_s: float = _TIMEOUT_S
    ) -> httpx.Response:
        try:
            return await self._client.request(
                method, path, headers={"Authorization": f"token {token}"}, json=json, timeout=limit_s
            )
        except httpx.HTTPError as error:
            raise HubUnreachable("the hub does not answer; try again in a moment") from error


def _server_path(owner: str, server: str) -> str:
    user = f"/users/{quote(owner, safe='')}"
    return f"{user}/servers/{quote(server, safe='')}" if server else f"{user}/server"


def _check(answer: httpx.Response, owner: str, *, accept: set[int]) -> None:
    status = answer.status_code
    if status in accept:
        return
    if status == 404:
        raise NotFound(f"the hub has no user {owner!r}")
    if status in {401, 403}:
        raise NotAllowed("the hub does not permit this to the broker's service token: restart the hub with `gpuhub up`")
    raise HubUnreachable(f"the hub answered with HTTP status {status}")
