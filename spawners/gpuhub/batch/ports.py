"""Where a notebook's job says on which port the notebook listens: the one thing that it may say.

`POST /hub/api/gpuhub-port` with `{"port": N}`, N an integer from 1024 to 65535, and the server's own token. Answers
204; 400 for any other body, 403 without the token of a server that runs, or waits, as a Slurm job, and 409 when that
server has another port already.
"""

from __future__ import annotations

import hmac
import json
from typing import Any

from jupyterhub.apihandlers import APIHandler
from tornado import web

from gpuhub.errors import Conflict, InvalidRequest

PATH = r"/api/gpuhub-port"
_LONGEST = 64
_FIRST, _LAST = 1024, 65535


def parse_port(body: bytes) -> int:
    """The port of a report.

    Raises:
        InvalidRequest: it is anything but `{"port": N}`.
    """
    wrong = InvalidRequest(f'{{"port": N}} is needed, with an integer from {_FIRST} to {_LAST}, and nothing else')
    if len(body) > _LONGEST:
        raise wrong
    try:
        said = json.loads(body)
    except ValueError as error:
        raise wrong from error
    if not isinstance(said, dict) or said.keys() != {"port"}:
        raise wrong
    port = said["port"]
    if type(port) is not int or not _FIRST <= port <= _LAST:
        raise wrong
    return port


def find_spawner(user: Any, token: str) -> Any:
    """The one of the user's spawners whose server has this token, and which waits for a port or has one; None: none."""
    for spawner in user.spawners.values():
        own = spawner.api_token
        if own and hasattr(spawner, "take_port") and hmac.compare_digest(own.encode(), token.encode()):
            return spawner
    return None


class PortHandler(APIHandler):  # type: ignore[misc] # JupyterHub is untyped
    """For notebooks' jobs; no browser's session opens it."""

    @web.authenticated
    def post(self) -> None:
        """Take the port of the server whose token this is."""
        token = self.get_auth_token()
        # A service, or somebody with a session, is nobody's notebook.
        user = self.current_user
        spawner = find_spawner(user, token) if token and hasattr(user, "spawners") else None
        if spawner is None:
            raise web.HTTPError(403, "this is not the token of a notebook that runs as a Slurm job")
        try:
            spawner.take_port(parse_port(self.request.body))
        except InvalidRequest as error:
            raise web.HTTPError(400, str(error)) from error
        except Conflict as error:
            raise web.HTTPError(409, str(error)) from error
        self.set_status(204)
