"""The user's notebook servers, which the commands call instances, through the hub's API."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from dataclasses import dataclass
from typing import Any

from gpu_launch.cli.connection.credentials import Hub
from gpu_launch.cli.connection.hub_api import query_hub, request_hub
from gpu_launch.errors import BrokerError, UsageError

#: Answers of the hub to a start: the server runs, or its start continues.
_STARTED = frozenset({http.client.CREATED, http.client.ACCEPTED})
_STOPPED = frozenset({http.client.ACCEPTED, http.client.NO_CONTENT})
#: JupyterHub's text with status 403 for a token that it does not know, such as an expired one.
_UNKNOWN_TOKEN = "Missing or invalid credentials."  # noqa: S105 - no password


@dataclass(frozen=True, kw_only=True)
class Server:
    """A notebook server of the user, as the hub reports it."""

    #: Empty for the default server.
    name: str
    is_ready: bool
    #: `spawn` or `stop` while the hub starts or stops it; empty otherwise.
    pending: str
    #: It has ended, and the hub only keeps its name.
    is_stopped: bool
    #: Empty if unknown.
    profile: str
    #: Its address for browsers and programs, with a slash at the end.
    url: str


class HubClient:
    """Starts, lists and stops the servers of one user."""

    def __init__(self, hub: Hub, user: str) -> None:
        """Use the hub with the token of `user`.

        Raises:
            UsageError: This is a notebook's own token, which the hub gives no rights over servers.
        """
        if not hub.url:
            raise UsageError(
                "This is a notebook's terminal, whose token cannot start or reach other servers.\n"
                "On your own machine: gpu-launch login https://YOUR-HUB"
            )
        self._hub, self._path = hub, f"/hub/api/users/{urllib.parse.quote(user, safe='')}"

    def list_servers(self, *, stopped: bool = False) -> tuple[Server, ...]:
        """Return the user's servers by name, with `stopped` also those that have ended."""
        status, body = query_hub(
            self._hub, self._path + ("?include_stopped_servers=1" if stopped else ""), token=self._hub.token
        )
        if status != http.client.OK or not isinstance(body, dict):
            raise self._build_error(status, body)
        servers = (self._parse(name, data) for name, data in (body.get("servers") or {}).items())
        return tuple(sorted(servers, key=lambda server: server.name))

    def find_server(self, name: str) -> Server | None:
        """Return the server of this name, None if it neither runs nor starts."""
        return next((server for server in self.list_servers() if server.name == name), None)

    def start(
        self, name: str, profile: str, *, image: str | None = None, keep: bool = False, suspend: bool = True
    ) -> None:
        """Request the start of a server; it continues by itself.

        Args:
            image: Another image than the profile's first.
            keep: It starts again after a loss.
            suspend: It may be suspended for others while it is idle.

        Raises:
            BrokerError: The hub refuses; the text has its reason.
        """
        path = self._path + _server_path(name)
        chosen = {"image": image, "keep": "yes" if keep else None, "suspend": None if suspend else "no"}
        options = {"profile": profile} | {option: value for option, value in chosen.items() if value}
        status, body = query_hub(self._hub, path, token=self._hub.token, method="POST", body=options)
        if status not in _STARTED:
            raise self._build_error(status, body)

    def stop(self, name: str, *, remove: bool = False) -> None:
        """Stop a server, and with `remove` also forget its name; the default server has none."""
        body = {"remove": True} if remove and name else None
        path = self._path + _server_path(name)
        status, answer = query_hub(self._hub, path, token=self._hub.token, method="DELETE", body=body)
        if status not in _STOPPED:
            raise self._build_error(status, answer)

    def read_failure(self, name: str) -> str:
        """Return why the last start of a server failed, empty if the hub does not know it any more."""
        path = f"{self._path}{_server_path(name)}/progress"
        _, text = request_hub(self._hub, path, token=self._hub.token)
        events = [line.removeprefix("data: ") for line in text.decode().splitlines() if line.startswith("data: ")]
        try:
            last = json.loads(events[-1])
        except (ValueError, IndexError):
            return ""
        return str(last.get("message") or "").removeprefix("Spawn failed: ") if last.get("failed") else ""

    def _parse(self, name: str, data: dict[str, Any]) -> Server:
        return Server(
            name=name,
            is_ready=bool(data.get("ready")),
            pending=str(data.get("pending") or ""),
            is_stopped=bool(data.get("stopped")),
            profile=str((data.get("user_options") or {}).get("profile") or ""),
            # A path at the hub's own host, or `//ada.HOST/…` where users have subdomains.
            url=urllib.parse.urljoin(f"{self._hub.url}/", str(data.get("url") or "")),
        )

    def _build_error(self, status: int, body: Any) -> BrokerError:
        is_refused = status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN)
        if is_refused and _find_message(body) in ("", _UNKNOWN_TOKEN):
            return BrokerError(f"{self._hub.url} refuses this token", status=http.client.UNAUTHORIZED)
        return BrokerError(_find_message(body) or f"The hub answered with HTTP status {status}.", status=status)


def _server_path(name: str) -> str:
    return f"/servers/{urllib.parse.quote(name, safe='')}" if name else "/server"


def _find_message(body: Any) -> str:
    message = body.get("message") if isinstance(body, dict) else None
    return message if isinstance(message, str) else ""
