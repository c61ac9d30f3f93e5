"""Whether a URL is a hub's with a broker behind it, and a token one of its own: asked before a token is kept."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from dataclasses import replace
from typing import Any

from gpu_launch.cli.connection import build_tls, reason
from gpu_launch.cli.hubs import Hub
from gpu_launch.errors import BrokerError, GpuLaunchError

_ANSWER_S = 15.0  # seconds


def check_hub(hub: Hub) -> None:
    """Raises GpuLaunchError where no hub answers; no token is sent."""
    status, body = _get(hub, "/hub/api/", token=None)
    version = body.get("version") if isinstance(body, dict) else None
    if status != http.client.OK or not isinstance(version, str):
        raise GpuLaunchError(f"There is no JupyterHub at {hub.url} (HTTP status {status}): check the URL.")


def check_token(hub: Hub) -> Hub:
    """The hub with its user's name. Raises GpuLaunchError for a token that is not known there or not enough, and where
    there is no broker.
    """
    status, body = _get(hub, "/hub/api/user", token=hub.token)
    if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        raise GpuLaunchError(f"{hub.url} does not know this token: make one at {hub.url}/hub/token.")
    if status != http.client.OK or not isinstance(body, dict):
        raise GpuLaunchError(f"{hub.url} answered with HTTP status {status} when it was asked whose the token is.")
    if body.get("kind") != "user" or not isinstance(body.get("name"), str):
        raise GpuLaunchError("This token is a service's; a user's own one is needed.")
    status, answer = _get(hub, "/services/broker/api/v1/usage", token=hub.token)
    if status == http.client.NOT_FOUND or (status == http.client.OK and not isinstance(answer, list)):
        raise GpuLaunchError(f"The hub at {hub.url} has no GPU broker: it is not a hub of gpuhub.")
    if status != http.client.OK:
        said = answer.get("detail") if isinstance(answer, dict) else None
        raise GpuLaunchError(f"The broker refuses: {said or f'HTTP status {status}'}.".replace("..", "."))
    return replace(hub, user=body["name"])


def own_name(hub: Hub) -> str:
    """Who the token belongs to: as kept, or as the hub says now."""
    if hub.user or not hub.url:
        return hub.user
    status, body = _get(hub, "/hub/api/user", token=hub.token)
    return str(body["name"]) if status == http.client.OK and isinstance(body, dict) and body.get("name") else ""


def _get(hub: Hub, path: str, *, token: str | None) -> tuple[int, Any]:
    """Status and JSON body; None for a body that is none."""
    parts = urllib.parse.urlsplit(hub.url)
    connection: http.client.HTTPConnection
    if (tls := build_tls(hub)) is not None:
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=_ANSWER_S, context=tls)
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_S)
    try:
        headers = {"Accept": "application/json"} | ({"Authorization": f"token {token}"} if token else {})
        connection.request("GET", parts.path + path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(4 * 1024 * 1024)
    except (OSError, http.client.HTTPException) as error:
        raise BrokerError(_unreachable(hub, error)) from None
    finally:
        connection.close()
    try:
        return answer.status, json.loads(body)
    except ValueError:
        return answer.status, None


def _unreachable(hub: Hub, error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"The certificate of {hub.url} is not trusted ({error.verify_message}). If the hub has one of its own, "
            "get it from the administrator and give it with --ca FILE."
        )
    if isinstance(error, ssl.SSLError):
        return f"{hub.url} does not speak TLS ({error.reason or error}): check the URL and its port."
    return f"{hub.url} cannot be reached: {reason(error)}. Check the URL."
