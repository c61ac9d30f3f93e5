"""The extension of Jupyter Server that lets a notebook's owner in by SSH.

The image enables it; it does nothing in a server that no hub has started.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from jupyter_server.auth.decorator import ws_authenticated
from jupyter_server.base.handlers import JupyterHandler
from jupyter_server.base.websocket import WebSocketMixin
from jupyter_server.utils import url_path_join
from tornado.web import HTTPError

from gpu_launch.sshd.websocket import SshWebSocketHandler

#: Path below the server's own URL.
PATH = "gpu-launch/ssh"
#: Time between two checks whether the hub still accepts the client's token, seconds.
RECHECK_S = 30.0


class NotebookSshHandler(WebSocketMixin, SshWebSocketHandler, JupyterHandler):
    """SSH for programs with a token that may access this server; a browser's cookie is not enough."""

    auth_resource = "terminals"

    @ws_authenticated
    async def get(self) -> None:
        # Pages of the same site, such as other users' notebooks, have the user's cookie, but no token.
        if not self.identity_provider.hub_auth.get_token(self, in_cookie=False):
            raise HTTPError(403, "SSH needs a token in the Authorization header")
        watch = asyncio.create_task(self._close_when_refused())
        try:
            await self.serve()
        finally:
            watch.cancel()

    def set_default_headers(self) -> None:
        """Set none: those of pages mean nothing for a WebSocket."""

    async def _close_when_refused(self) -> None:
        """Close the connection when the hub refuses the token; no answer is not a refusal."""
        hub = self.identity_provider.hub_auth
        token = hub.get_token(self, in_cookie=False)
        while True:
            await asyncio.sleep(RECHECK_S)
            try:
                user = await hub.user_for_token(token, use_cache=False, sync=False)
            except HTTPError:
                continue
            if user is None or not hub.check_scopes(hub.access_scopes, user):
                self.close(1008, "the hub no longer accepts the token")
                return


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": __name__}]


def _load_jupyter_server_extension(server: Any) -> None:
    """Add the handler to a server that a hub has started, whose users the hub identifies."""
    if not os.environ.get("JUPYTERHUB_SERVICE_PREFIX"):
        return
    route = url_path_join(server.web_app.settings["base_url"], PATH)
    server.web_app.add_handlers(".*$", [(route, NotebookSshHandler)])
