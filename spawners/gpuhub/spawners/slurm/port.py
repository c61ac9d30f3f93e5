"""The hub's API with which a notebook's job reports the notebook's port.

The request is `POST /hub/api/gpuhub-port` with `{"port": N}`, N an integer from 1024 to 65535, and the server's own
token. The answer is 204; 400 for any other body, 403 without the token of a server that runs or waits as a Slurm job,
and 409 if that server has another port already.
"""

from __future__ import annotations

import hmac
import json
from typing import Any

from jupyterhub.apihandlers import APIHandler
from tornado import web

from gpuhub.common.errors import Conflict, InvalidRequest

PATH = r"/api/gpuhub-port"
_MAX_BODY_BYTES = 64
_FIRST, _LAST = 1024, 65535


def parse_port(body: bytes) -> int:
    """Return the port in a request's body.

    Raises:
        InvalidRequest: The body is not of the form `{"port": N}`.
    """
    error_for_client = InvalidRequest(
        f'{{"port": N}} is needed, with an integer from {_FIRST} to {_LAST}, and nothing else'
    )
    if len(body) > _MAX_BODY_BYTES:
        raise error_for_client
    try:
        document = json.loads(body)
    except ValueError as error:
        raise error_for_client from error
    if not isinstance(document, dict) or document.keys() != {"port"}:
        raise error_for_client
    port = document["port"]
    if type(port) is not int or not _FIRST <= port <= _LAST:
        raise error_for_client
    return port


def find_spawner(user: Any, token: str) -> Any:
    """Return the user's spawner whose server is a Slurm job and has this token, or None."""
    for spawner in user.spawners.values():
        own = spawner.api_token
        if own and hasattr(spawner, "set_port") and hmac.compare_digest(own.encode(), token.encode()):
            return spawner
    return None


class PortHandler(APIHandler):  # type: ignore[misc] # JupyterHub is untyped
    """The handler for reports of notebooks' jobs; sessions of browsers are refused."""

    @web.authenticated
    def post(self) -> None:
        """Set the port of the server with the request's token."""
        token = self.get_auth_token()
        # Services have no spawners, and sessions of browsers have no token.
        user = self.current_user
        spawner = find_spawner(user, token) if token and hasattr(user, "spawners") else None
        if spawner is None:
            raise web.HTTPError(403, "this is not the token of a notebook that runs as a Slurm job")
        try:
            spawner.set_port(parse_port(self.request.body))
        except InvalidRequest as error:
            raise web.HTTPError(400, str(error)) from error
        except Conflict as error:
            raise web.HTTPError(409, str(error)) from error
        self.set_status(204)
