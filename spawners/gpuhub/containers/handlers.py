"""Pages that the hub serves for us: the cluster's state for the spawn form, and leaving the queue."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from jupyterhub.handlers.base import BaseHandler
from tornado import web

from gpuhub.broker.schemas import LeaseState
from gpuhub.containers.acting import Tokens
from gpuhub.containers.form import build_parts
from gpuhub.containers.glance import Glance
from gpuhub.errors import GpuhubError, NotFound
from gpuhub.settings import Cluster


class OurHandler(BaseHandler):  # type: ignore[misc] # JupyterHub is untyped
    """A page of ours."""

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


class LeaveHandler(OurHandler):
    """POST `{"lease": id}`: end one's own waiting request."""

    async def post(self) -> None:
        """Answer 204, or a refusal with one line of text."""
        user = self.prepare_user()
        asked = parse_leave(self.request.body)
        if asked is None:
            self.answer({"message": 'The body must be {"lease": ID}'}, 400)
            return
        try:
            lease = await self.broker.get_lease(asked)
            is_theirs = lease.owner == user.name or user.admin
            if is_theirs and lease.state is LeaseState.REQUESTED:
                await self.broker.release(asked)
        except NotFound:
            is_theirs = False
        except GpuhubError as error:
            self.answer({"message": str(error)}, 503)
            return
        if not is_theirs:
            self.answer({"message": "You have no such request."}, 404)
        elif lease.state is not LeaseState.REQUESTED:
            self.answer({"message": "This request does not wait any more."}, 409)
        else:
            self.set_status(204)
            self.finish()


def parse_leave(body: bytes) -> str | None:
    """The lease id in `{"lease": "…"}`; None for anything else."""
    try:
        asked = json.loads(body)
    except ValueError:
        return None
    found = asked.get("lease") if isinstance(asked, dict) else None
    # It becomes part of a path, asked for with the service's own token.
    return found if isinstance(found, str) and re.fullmatch(r"[A-Za-z0-9-]{1,64}", found) else None
