"""A notebook's server reduced to its login: JupyterHub's own code for it, and a page that says who is there.

Its cookie against forged requests is made as images/notebook has it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from urllib.parse import urlsplit

from jupyterhub.services.auth import HubOAuthCallbackHandler, HubOAuthenticated
from tornado import web


class Home(HubOAuthenticated, web.RequestHandler):
    """GET: the user's name, and the cookies that the browser sent."""

    @web.authenticated
    def get(self) -> None:
        """For its owner alone."""
        user = self.get_current_user()
        self.write({"user": user["name"], "cookies": sorted(self.request.cookies)})


async def main() -> None:
    """Serve until SIGTERM."""
    prefix = os.environ["JUPYTERHUB_SERVICE_PREFIX"]
    app = web.Application(
        [(f"{prefix}oauth_callback", HubOAuthCallbackHandler), (f"{prefix}.*", Home)],
        cookie_secret=secrets.token_bytes(32),
        xsrf_cookie_kwargs={**json.loads(os.environ.get("JUPYTERHUB_COOKIE_OPTIONS", "{}")), "path": prefix},
    )
    url = urlsplit(os.environ["JUPYTERHUB_SERVICE_URL"])
    app.listen(url.port, url.hostname, xheaders=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
