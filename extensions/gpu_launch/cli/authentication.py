"""Checks a hub and a user's token with the hub's API."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from dataclasses import replace
from typing import Any

from gpu_launch.cli.credentials import Hub
from gpu_launch.cli.http import build_tls_context, describe_error
from gpu_launch.errors import BrokerError, GpuLaunchError

_ANSWER_TIMEOUT_S = 15.0  # seconds


def check_hub(hub: Hub) -> None:
    """Check that a hub answers, without sending a token.

    Raises:
        GpuLaunchError: There is no hub at the URL.
    """
    status, body = _get(hub, "/hub/api/", token=None)
    version = body.get("version") if isinstance(body, dict) else None
    if status != http.client.OK or not isinstance(version, str):
        raise GpuLaunchError(f"There is no JupyterHub at {hub.url} (HTTP status {status}): check the URL.")


def check_token(hub: Hub) -> Hub:
    """Return the hub with the name of the token's user.

    Raises:
        GpuLaunchError: The hub does not accept the token, or has no broker.
    """
    status, body = _get(hub, "/hub/api/user", token=hub.token)
    if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        raise GpuLaunchError(f"{hub.url} does not know this token: request one at {hub.url}/hub/token.")
    if status != http.client.OK or not isinstance(body, dict):
        raise GpuLaunchError(f"{hub.url} answered the query for the token's user with HTTP status {status}.")
    if body.get("kind") != "user" or not isinstance(body.get("name"), str):
        raise GpuLaunchError("This is the token of a service; use a user's own token.")
    status, usage = _get(hub, "/services/broker/api/v1/usage", token=hub.token)
    if status == http.client.NOT_FOUND or (status == http.client.OK and not isinstance(usage, list)):
        raise GpuLaunchError(f"The hub at {hub.url} has no GPU broker: it is not a hub of gpuhub.")
    if status != http.client.OK:
        detail = usage.get("detail") if isinstance(usage, dict) else None
        raise GpuLaunchError(f"The broker refuses: {detail or f'HTTP status {status}'}.".replace("..", "."))
    return replace(hub, user=body["name"])


def fetch_user_name(hub: Hub) -> str:
    """Return the user of the token: the saved name, or the hub's answer."""
    if hub.user or not hub.url:
        return hub.user
    status, body = _get(hub, "/hub/api/user", token=hub.token)
    return str(body["name"]) if status == http.client.OK and isinstance(body, dict) and body.get("name") else ""


def _get(hub: Hub, path: str, *, token: str | None) -> tuple[int, Any]:
    """Return the status and the JSON body, None for a body that is not JSON."""
    parts = urllib.parse.urlsplit(hub.url)
    connection: http.client.HTTPConnection
    if (tls := build_tls_context(hub)) is not None:
        connection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=_ANSWER_TIMEOUT_S, context=tls
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_TIMEOUT_S)
    try:
        headers = {"Accept": "application/json"} | ({"Authorization": f"token {token}"} if token else {})
        connection.request("GET", parts.path + path, headers=headers)
        response = connection.getresponse()
        body = response.read(4 * 1024 * 1024)
    except (OSError, http.client.HTTPException) as error:
        raise BrokerError(_describe_failure(hub, error)) from None
    finally:
        connection.close()
    try:
        return response.status, json.loads(body)
    except ValueError:
        return response.status, None


def _describe_failure(hub: Hub, error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"The certificate of {hub.url} is not trusted ({error.verify_message}). If the hub has one of its own, "
            "get it from the administrator and give it with --ca FILE."
        )
    if isinstance(error, ssl.SSLError):
        return f"{hub.url} does not speak TLS ({error.reason or error}): check the URL and its port."
    return f"{hub.url} cannot be reached: {describe_error(error)}. Check the URL."
