"""Pages that the hub serves for us: the cluster's state for the spawn form, and leaving the queue."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

from jupyterhub.handlers.base import BaseHandler
from tornado import web

from gpuhub.broker.schemas import LeaseState
from gpuhub.containers.form import build_parts
from gpuhub.containers.leasing import Broker
from gpuhub.errors import GpuhubError, NotFound, Unavailable
from gpuhub.settings import Cluster

#: A page that refreshes itself is better told that the broker is silent than kept waiting.
_PATIENCE_S = 2.5


class _Handler(BaseHandler):  # type: ignore[misc] # JupyterHub is untyped
    def initialize(self, make_broker: Callable[[], Broker], cluster: Cluster) -> None:
        self.broker = make_broker()
        self.cluster = cluster

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


class ClusterHandler(_Handler):
    """GET: `{"cluster": ClusterView, "parts": {name: html}}` for any user who is logged in."""

    async def get(self) -> None:
        """Answer with what is free now; 503 while the broker is silent, with the parts that say so."""
        self.prepare_user()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                view = await self.broker.cluster()
        except (Unavailable, TimeoutError):
            self.answer({"cluster": None, "parts": build_parts(self.cluster, None)})
            return
        self.answer({"cluster": view.model_dump(mode="json"), "parts": build_parts(self.cluster, view)})


class LeaveHandler(_Handler):
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
            if is_theirs and lease.state is LeaseState.WAITING:
                await self.broker.release(asked)
        except NotFound:
            is_theirs = False
        except GpuhubError as error:
            self.answer({"message": str(error)}, 503)
            return
        if not is_theirs:
            self.answer({"message": "You have no such request."}, 404)
        elif lease.state is not LeaseState.WAITING:
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
