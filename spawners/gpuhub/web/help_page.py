"""The page of troubleshooting, which is docs/troubleshooting.md; the broker's problem documents lead there."""

from __future__ import annotations

import re
from pathlib import Path

import markdown
from tornado import web

from gpuhub.broker.api.problems import HELP_PAGE
from gpuhub.web.handlers import GpuhubHandler
from gpuhub.web.static_files import find_static_url

#: `make up` installs gpuhub in its source tree.
SOURCE = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
#: A link to another page of the documentation, which the hub does not have.
_OTHER_PAGE = re.compile(r"\[([^\]]+)\]\([^)#][^)]*\)")


class HelpPageHandler(GpuhubHandler):
    """GET: the page. It needs no login, because errors of the login lead to it as well."""

    #: Path of the page below the hub's own address.
    PATH = HELP_PAGE.removeprefix("/hub")

    async def get(self) -> None:
        """Send the page."""
        if not SOURCE.exists():
            raise web.HTTPError(404, f"{SOURCE} is missing: the hub runs outside of gpuhub's source tree")
        content = render_markdown(SOURCE.read_text(encoding="utf-8"))
        asset_url = find_static_url(self.hub.base_url)
        self.finish(await self.render_template("gpuhub_help.html", content=content, asset_url=asset_url))


def render_markdown(text: str) -> str:
    """Return a page of the documentation as HTML; links to other pages become plain text."""
    html: str = markdown.markdown(_OTHER_PAGE.sub(r"\1", text), output_format="html")
    return html
