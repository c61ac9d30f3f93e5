"""Pages that the hub serves for us: what they share, and the cluster's state for the spawn form."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jupyterhub.handlers.base import BaseHandler
from tornado import web

from gpuhub.containers.acting import Tokens
from gpuhub.containers.form import build_parts
from gpuhub.containers.glance import Glance
from gpuhub.settings import Cluster


class OurHandler(BaseHandler):  # type: ignore[misc] # JupyterHub is untyped
    """A page of ours: for browsers, by their session. No token opens it, JupyterHub's default for pages."""

    def initialize(self, *, make_broker: Callable[[], Any], cluster: Cluster, glance: Glance, tokens: Tokens) -> None:
        """Called by Tornado."""
        self.broker = make_broker()
        self.cluster = cluster
        self.glance = glance
        self.tokens = tokens

    def prepare_user(self) -> Any:
        """The user who is logged in; answers 403 without one, where a page would redirect to the login."""
        if self.current_user is None:
            raise web.HTTPError(403)
        return self.current_user

    def answer(self, value: object, status: int = 200) -> None:
        """Finish with JSON."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps(value))


class ClusterHandler(OurHandler):
    """GET: `{"cluster": ClusterView, "parts": {name: html}}` for any user who is logged in."""

    async def get(self) -> None:
        """Answer with what is free now; while the broker is silent, with the parts that say so.

        With `?parts`, the cluster itself is left out: the form's script has no use for it.
        """
        self.prepare_user()
        view = await self.glance.look()
        answer: dict[str, Any] = {"parts": build_parts(self.cluster, view)}
        if "parts" not in self.request.query_arguments:
            answer["cluster"] = None if view is None else view.model_dump(mode="json")
        self.answer(answer)
