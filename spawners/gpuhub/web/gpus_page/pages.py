"""Handlers of the page itself, and of what it loads when a user asks for it."""

from __future__ import annotations

import asyncio
from typing import Any

from tornado import web

from gpuhub.broker_api.errors import TooManyRequests
from gpuhub.broker_api.schemas import CostView, ReportDimension, ReportView
from gpuhub.common.errors import GpuhubError, NotAllowed, Unavailable
from gpuhub.web import cost_chart
from gpuhub.web.gpus_page.node_filter import MAX_NODES_WITHOUT_FILTER, read_node_filter
from gpuhub.web.gpus_page.parts import GpusPageData, render_node_leases, render_page, render_pending_reason
from gpuhub.web.handlers import BrokerUserHandler
from gpuhub.web.static_files import find_static_url


class GpusPageHandler(BrokerUserHandler):
    """GET `/hub/gpus`: the page."""

    @web.authenticated
    async def get(self) -> None:
        """Send the complete page, which its script keeps up to date."""
        self.check_scope()
        node_filter = read_node_filter(self)
        data = await self._load()
        page = await self.render_template(
            "gpuhub_gpus.html",
            page=render_page(data, node_filter),
            costs=await self._render_costs() if data.view is not None else "",
            node_filter=node_filter,
            has_filter=data.view is not None and len(data.view.nodes) > MAX_NODES_WITHOUT_FILTER,
            asset_url=find_static_url(self.hub.base_url),
            gpuhub_is_live=True,
        )
        self.finish(page)

    async def _load(self) -> GpusPageData:
        user = self.current_user
        view = await self.cluster_caches.get(user)
        if view is None:
            return GpusPageData.build(user, None, None)
        try:
            own = await self.call_as_user(user, lambda broker: broker.read_own())
        except (Unavailable, TooManyRequests):
            own = None
        return GpusPageData.build(user, view, own)

    async def _render_costs(self) -> str:
        """Render what the user has used, for an administrator what all users have; empty without the broker."""
        user = self.current_user

        async def ask(broker: Any) -> tuple[ReportView, list[CostView]]:
            report, records = await asyncio.gather(
                broker.report(ReportDimension.DAY), broker.costs(limit=cost_chart.MAX_RECORDS)
            )
            return report, records

        try:
            report, records = await self.call_as_user(user, ask)
        except (Unavailable, TooManyRequests):
            return ""
        return cost_chart.render_costs(report, records, user.name)


class PendingReasonHandler(BrokerUserHandler):
    """GET `?lease=ID`: `{"html": …}`, why a request waits."""

    async def get(self) -> None:
        """Send the broker's reasons or its refusal."""
        user = self.require_user()
        self.check_scope()
        lease = self.get_query_argument("lease", "")
        try:
            why = await self.call_as_user(user, lambda broker: broker.why(lease))
        except GpuhubError as error:
            self.finish_error(error)
            return
        self.finish_json({"html": render_pending_reason(why)})


class NodeLeasesHandler(BrokerUserHandler):
    """GET `?node=NAME`: `{"html": …}`, what runs on a node, for administrators."""

    async def get(self) -> None:
        """Send the leases of all users on the node."""
        user = self.require_user()
        self.check_scope()
        node = self.get_query_argument("node", "")
        try:
            if not user.admin:
                raise NotAllowed("only an administrator sees the leases of all users")
            leases = await self.call_as_user(user, lambda broker: broker.leases(node=node))
        except GpuhubError as error:
            self.finish_error(error)
            return
        self.finish_json({"html": render_node_leases(leases, node)})
