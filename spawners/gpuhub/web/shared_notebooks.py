"""The page of a saved notebook that another user shares: the notebook in a frame that runs no script and loads nothing.

The content of the frame is not trusted.
"""

from __future__ import annotations

from html import escape

from tornado import web
from tornado.iostream import StreamClosedError

from gpuhub.broker_api.schemas.output_shares import SharedNotebookView
from gpuhub.common.errors import GpuhubError
from gpuhub.web.handlers import BrokerUserHandler, http_status
from gpuhub.web.static_files import find_static_url
from gpuhub.web.template_loader import load_macros

_ID = r"(nb-[0-9a-f]{24})"
#: The frame's page has no origin, runs nothing, loads nothing and sends nothing; the hub's own pages alone embed it.
FRAME_POLICY = (
    "sandbox; default-src 'none'; img-src data:; style-src 'unsafe-inline'; font-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'self'"
)


def render_facts(notebook: SharedNotebookView) -> str:
    """Render owner and times of a shared notebook."""
    return str(load_macros("gpuhub_shared_parts.html").notebook_facts(notebook))


def build_version(notebook: SharedNotebookView) -> str:
    """Return what differs between two saved states of a notebook."""
    return f"{notebook.saved_at.timestamp():.3f}-{notebook.size}"


class SharedNotebookPageHandler(BrokerUserHandler):
    """GET `/hub/gpuhub/shared-notebook/ID`: the page, for the notebook's owner and whom it is shared with."""

    PATH = rf"/gpuhub/shared-notebook/{_ID}"

    @web.authenticated
    async def get(self, notebook_id: str) -> None:
        """Send the page, or an error page where the notebook is not shared with the user."""
        self.check_scope()
        try:
            notebook = await self.call_as_user(
                self.current_user, lambda broker: broker.read_shared_notebook(notebook_id)
            )
        except GpuhubError as error:
            await self.finish_error_page(error)
            return
        self.set_header("Cache-Control", "no-store")
        page = await self.render_template(
            "gpuhub_shared_notebook.html",
            notebook=notebook,
            facts=render_facts(notebook),
            version=build_version(notebook),
            asset_url=find_static_url(self.hub.base_url),
        )
        self.finish(page)


class SharedNotebookStateHandler(BrokerUserHandler):
    """GET: `{"html": the facts, "version": of the file}`, by which the page sees that it was saved again."""

    PATH = rf"/gpuhub/shared-notebook/{_ID}/state"

    async def get(self, notebook_id: str) -> None:
        """Send the current state, or why there is none."""
        user = self.require_user()
        self.check_scope()
        try:
            notebook = await self.call_as_user(user, lambda broker: broker.read_shared_notebook(notebook_id))
        except GpuhubError as error:
            self.finish_error(error)
            return
        self.finish_json({"html": render_facts(notebook), "version": build_version(notebook)})


class SharedNotebookFrameHandler(BrokerUserHandler):
    """GET: the notebook as HTML, for the frame of the page alone."""

    PATH = rf"/gpuhub/shared-notebook/{_ID}/frame"

    async def get(self, notebook_id: str) -> None:
        """Send the rendered notebook, or a line that says why there is none."""
        user = self.require_user()
        self.check_scope()
        self.set_header("Content-Security-Policy", FRAME_POLICY)
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Cache-Control", "no-store")
        self.set_header("Referrer-Policy", "no-referrer")
        self.set_header("X-Content-Type-Options", "nosniff")
        parts = self.broker.acting(self.user_tokens.get(user)).render_shared_notebook(notebook_id)
        try:
            async for part in parts:
                self.write(part)
                await self.flush()
        except StreamClosedError:
            return
        except GpuhubError as error:
            if not self._headers_written:
                self.set_status(http_status(error))
            self.write(f"<p>{escape(str(error))}</p>")
        finally:
            await parts.aclose()
        self.finish()
