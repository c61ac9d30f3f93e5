"""Requests to the hub's API, and the checks of a hub and a token that they allow."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from dataclasses import replace
from typing import Any

from gpu_launch.cli.connection.credentials import Hub
from gpu_launch.cli.connection.http import build_tls_context, describe_error
from gpu_launch.errors import BrokerError, GpuLaunchError

_CHECK_TIMEOUT_S = 15.0  # seconds for an answer of the hub's API


def check_hub(hub: Hub) -> None:
    """Check that a hub answers, without sending a token.

    Raises:
        GpuLaunchError: There is no hub at the URL.
    """
    status, body = query_hub(hub, "/hub/api/", token=None)
    version = body.get("version") if isinstance(body, dict) else None
    if status != http.client.OK or not isinstance(version, str):
        raise GpuLaunchError(f"There is no JupyterHub at {hub.url} (HTTP status {status}): check the URL.")


def check_token(hub: Hub) -> Hub:
    """Return the hub with the name of the token's user.

    Raises:
        GpuLaunchError: The hub does not accept the token, or has no broker.
    """
    status, body = query_hub(hub, "/hub/api/user", token=hub.token)
    if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        raise GpuLaunchError(f"{hub.url} does not know this token: request one at {hub.url}/hub/token.")
    if status != http.client.OK or not isinstance(body, dict):
        raise GpuLaunchError(f"{hub.url} answered the query for the token's user with HTTP status {status}.")
    if body.get("kind") != "user" or not isinstance(body.get("name"), str):
        raise GpuLaunchError("This is the token of a service; use a user's own token.")
    status, usage = query_hub(hub, "/services/broker/api/v1/usage", token=hub.token)
    if status == http.client.NOT_FOUND or (status == http.client.OK and not isinstance(usage, list)):
        raise GpuLaunchError(f"The hub at {hub.url} has no GPU broker: it is not a hub of gpuhub.")
    if status != http.client.OK:
        detail = usage.get("detail") if isinstance(usage, dict) else None
        raise GpuLaunchError(f"The broker refuses: {detail or f'HTTP status {status}'}.".replace("..", "."))
    return replace(hub, user=body["name"])


def fetch_token_end(hub: Hub) -> str | None:
    """Return the time at which the token of `hub.user` expires, as the hub writes it; None for never or unknown."""
    status, model = query_hub(hub, "/hub/api/user", token=hub.token)
    token_id = model.get("token_id") if status == http.client.OK and isinstance(model, dict) else None
    if not isinstance(token_id, str):
        return None
    path = f"/hub/api/users/{urllib.parse.quote(hub.user)}/tokens/{urllib.parse.quote(token_id)}"
    status, token = query_hub(hub, path, token=hub.token)
    end = token.get("expires_at") if status == http.client.OK and isinstance(token, dict) else None
    return end if isinstance(end, str) else None


def fetch_user_name(hub: Hub) -> str:
    """Return the user of the token: the saved name, or the hub's answer."""
    if hub.user or not hub.url:
        return hub.user
    status, body = query_hub(hub, "/hub/api/user", token=hub.token)
    return str(body["name"]) if status == http.client.OK and isinstance(body, dict) and body.get("name") else ""


def query_hub(hub: Hub, path: str, *, token: str | None, method: str = "GET", body: Any = None) -> tuple[int, Any]:
    """Send a request to the hub's API; return the status and the JSON body, None for a body that is not JSON.

    Raises:
        BrokerError: The hub does not answer.
    """
    status, text = request_hub(hub, path, token=token, method=method, body=body)
    try:
        return status, json.loads(text)
    except ValueError:
        return status, None


def request_hub(hub: Hub, path: str, *, token: str | None, method: str = "GET", body: Any = None) -> tuple[int, bytes]:
    """Send a request to the hub's API; return the status and the body.

    Raises:
        BrokerError: The hub does not answer.
    """
    parts = urllib.parse.urlsplit(hub.url)
    connection: http.client.HTTPConnection
    if (tls := build_tls_context(hub)) is not None:
        connection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=_CHECK_TIMEOUT_S, context=tls
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_CHECK_TIMEOUT_S)
    try:
        headers = {"Accept": "application/json"} | ({"Authorization": f"token {token}"} if token else {})
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, parts.path + path, body=data, headers=headers)
        response = connection.getresponse()
        return response.status, response.read(4 * 1024 * 1024)
    except (OSError, http.client.HTTPException) as error:
        raise BrokerError(_describe_hub_failure(hub, error)) from None
    finally:
        connection.close()


def _describe_hub_failure(hub: Hub, error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"The certificate of {hub.url} is not trusted ({error.verify_message}). If the hub has one of its own, "
            "get it from the administrator and give it with --ca FILE."
        )
    if isinstance(error, ssl.SSLError):
        return f"{hub.url} does not speak TLS ({error.reason or error}): check the URL and its port."
    return f"{hub.url} cannot be reached: {describe_error(error)}. Check the URL."
