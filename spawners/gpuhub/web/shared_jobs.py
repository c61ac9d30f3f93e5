"""The page of a job whose output another user shares, and its live updates; nothing on it changes anything."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from tornado import web

from gpuhub.broker_api.schemas.live import SharedJobView
from gpuhub.common.errors import GpuhubError
from gpuhub.common.tasks import cancel_tasks
from gpuhub.web.gpus_page.event_streams import MAX_STREAM_S, OUTPUT_TAIL_BYTES, EventStreamHandler, check_job_id
from gpuhub.web.gpus_page.feeds import MAX_OUTPUTS
from gpuhub.web.handlers import BrokerUserHandler
from gpuhub.web.static_files import find_static_url
from gpuhub.web.template_loader import load_macros

#: Time in which the end of a share is reported after its output was cut off, seconds.
_END_S = 3.0


def render_facts(shared: SharedJobView) -> str:
    """Render the state, the GPUs and the times of a shared job."""
    return str(load_macros("gpuhub_shared_parts.html").facts(shared))


class SharedJobPageHandler(BrokerUserHandler):
    """GET `/hub/gpuhub/shared/JOB`: the page, for the job's owner and the users with whom it is shared."""

    PATH = r"/gpuhub/shared/([A-Za-z0-9-]{1,64})"

    @web.authenticated
    async def get(self, job_id: str) -> None:
        """Send the page, or an error page where the job is not shared with the user."""
        self.check_scope()
        try:
            shared = await self.call_as_user(self.current_user, lambda broker: broker.read_shared_job(job_id))
        except GpuhubError as error:
            await self.finish_error_page(error)
            return
        self.set_header("Cache-Control", "no-store")
        page = await self.render_template(
            "gpuhub_shared.html",
            shared=shared,
            facts=render_facts(shared),
            asset_url=find_static_url(self.hub.base_url),
        )
        self.finish(page)


class SharedJobStreamHandler(EventStreamHandler):
    """GET `?job=ID`: events `job` with the state of a shared job, and those of its output, until the share ends."""

    async def get(self) -> None:
        """Send the current state, the end of the output, and what follows."""
        user = self.require_user()
        self.check_scope()
        await self.run_stream(self._send_shared(user, self.get_query_argument("job", "")))

    async def _send_shared(self, user: Any, job: str) -> None:
        check_job_id(job)
        loop = asyncio.get_running_loop()
        end = loop.time() + MAX_STREAM_S
        async with self.feeds.admit("shared jobs", user.name, MAX_OUTPUTS):
            broker = self.broker.acting(self.user_tokens.get(user))
            has_started = asyncio.Event()
            state = asyncio.ensure_future(self._send_state(broker, job, has_started))
            output = asyncio.ensure_future(self._send_job_output(broker, job, has_started, end))
            try:
                await asyncio.wait([state, output], return_when=asyncio.FIRST_COMPLETED, timeout=MAX_STREAM_S)
                # An output that is cut off does not say why: the end of the share follows from the state.
                is_cut = output.done() and output.exception() is not None
                await asyncio.wait([state], timeout=_END_S if is_cut else max(0.0, end - loop.time()))
                for task in (state, output):
                    if task.done():
                        task.result()
            finally:
                await cancel_tasks((state, output))

    async def _send_state(self, broker: Any, job: str, has_started: asyncio.Event) -> None:
        while True:
            async for shared in broker.watch_shared_job(job):
                now = datetime.now(UTC).isoformat()
                has_output = shared.job.started_at is not None or shared.job.ended_at is not None
                await self.send_event("job", {"html": render_facts(shared), "now": now, "hasOutput": has_output})
                if has_output:
                    has_started.set()
            # The stream has ended in order: with the share, which the next one refuses, or after its longest time.

    async def _send_job_output(self, broker: Any, job: str, has_started: asyncio.Event, end: float) -> None:
        await has_started.wait()
        await self.send_output(broker.follow_shared_output(job, OUTPUT_TAIL_BYTES), end)
