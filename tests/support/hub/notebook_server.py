"""A notebook server reduced to its login: JupyterHub's own code, and a page that shows the user.

Its XSRF cookie is configured as in images/notebook.
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
    """A page with the user's name and the cookies that the browser sent."""

    @web.authenticated
    def get(self) -> None:
        """Show the page to the owner only."""
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
