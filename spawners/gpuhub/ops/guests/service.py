"""The head node's service for guests: answers them in the tunnel, and updates broker and WireGuard accordingly.

A caller is known by its address: WireGuard accepts from each key its own address alone. A guest can join once, report
whether its owner lends it now, and leave; nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from gpuhub.broker_api.errors import TooManyRequests
from gpuhub.broker_api.schemas import CordonRequest
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.config.settings import ClusterSettings
from gpuhub.docker import ssh
from gpuhub.docker.client import DockerClients
from gpuhub.domain.rate_limit import RateLimit, RateLimiter
from gpuhub.ops.broker_connection import connect_to_broker
from gpuhub.ops.guests import node_program
from gpuhub.ops.guests.invitation import forget_guest
from gpuhub.ops.guests.registry import Guest, GuestRegistry
from gpuhub.ops.guests.wireguard import HeadInterface
from gpuhub.ops.images import distribution
from gpuhub.ops.images.progress import ProgressTerminal

log = logging.getLogger(__name__)

#: Largest body of a request, bytes, and the time for it, seconds.
MAX_BODY = 16 * 1024
_BODY_S = 10.0
#: Interval in which WireGuard and the broker are brought into agreement with the guests, seconds.
SYNC_PERIOD_S = 1.0
#: Time for an answer to arrive before the key with which it was asked is removed, seconds.
_ANSWER_S = 1.0
#: Interval in which guests get missing images, seconds.
IMAGES_PERIOD_S = 900.0
_RATE = RateLimit(burst=30, per_second=2)
#: How often a guest is paused or lent again, each of which is an event.
_CHANGES = RateLimit(burst=10, per_second=1 / 60, what="changes")
_MTU_RANGE = range(1200, 9001)
_WIREGUARD_KEY = re.compile(r"[A-Za-z0-9+/]{43}=")
_HOST_KEY = re.compile(r"ssh-ed25519 ([A-Za-z0-9+/]{20,100}={0,2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinBody:
    """What a machine says of itself when it joins."""

    public_key: str
    host_key: ssh.HostKey
    mtu: int


class BadRequest(Exception):
    """A body that no `gpuhub-node` sends."""


def parse_join(raw: object) -> JoinBody:
    """Return the checked body.

    Raises:
        BadRequest: The text says which value is wrong.
    """
    if not isinstance(raw, dict):
        raise BadRequest("the body is not a JSON object")
    key, host_key, mtu = raw.get("public_key"), raw.get("host_key"), raw.get("mtu")
    if not isinstance(key, str) or not _WIREGUARD_KEY.fullmatch(key):
        raise BadRequest("public_key is not a key of WireGuard")
    match = _HOST_KEY.fullmatch(host_key) if isinstance(host_key, str) else None
    if match is None:
        raise BadRequest("host_key is not a public key of type ssh-ed25519")
    if type(mtu) is not int or mtu not in _MTU_RANGE:
        raise BadRequest(f"mtu is not a number from {_MTU_RANGE[0]} to {_MTU_RANGE[-1]}")
    return JoinBody(public_key=key, host_key=ssh.HostKey("ssh-ed25519", match[1]), mtu=mtu)


def parse_available(raw: object) -> bool:
    """Return whether the guest's owner lends it now.

    Raises:
        BadRequest: The body is something else.
    """
    if not isinstance(raw, dict) or type(raw.get("available")) is not bool:
        raise BadRequest("available is not true or false")
    return bool(raw["available"])


class GuestService:
    """Answers guests, and keeps WireGuard, the broker and images in agreement with them."""

    def __init__(
        self,
        paths: Paths,
        cluster_file: Path,
        cluster: ClusterSettings,
        *,
        interface: HeadInterface,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._paths, self._cluster_file, self._cluster = paths, cluster_file, cluster
        self._interface, self._clock = interface, clock
        self._registry = GuestRegistry(paths)
        self._limiter = RateLimiter(_RATE)
        self._changes = RateLimiter(_CHANGES)
        #: Names of those whose joining is answered, and not yet stored.
        self._joining: set[str] = set()
        #: Whether each guest is lent now, as it said last.
        self._available: dict[str, bool] = {}
        self._images_due: dict[str, float] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}
        self.app = Starlette(
            routes=[
                Route("/gpuhub-node", self._answer(self._send_program), methods=["GET"]),
                Route("/join", self._answer(self._join), methods=["POST"]),
                Route("/state", self._answer(self._report), methods=["POST"]),
                Route("/leave", self._answer(self._leave), methods=["POST"]),
            ]
        )

    # -- requests ---------------------------------------------------------------------------------------------------

    def _answer(self, handle: Callable[[Guest, object], Response]) -> Callable[[Request], Any]:
        """Return the endpoint that finds the guest, reads a bounded body and answers errors."""

        async def endpoint(request: Request) -> Response:
            address = "" if request.client is None else request.client.host
            guest = next((one for one in self._registry.read().values() if one.address == address), None)
            if guest is None or not guest.is_valid(self._clock()):
                return _refuse(403, "this machine is not a guest here, or its invitation is over")
            try:
                self._limiter.acquire(guest.name)
                return handle(guest, await _read_body(request))
            except TooManyRequests as error:
                return _refuse(429, str(error))
            except BadRequest as error:
                return _refuse(400, str(error))

        return endpoint

    def _send_program(self, _guest: Guest, _body: object) -> Response:
        return PlainTextResponse(Path(node_program.__file__).read_text(encoding="utf-8"))

    def _join(self, guest: Guest, raw: object) -> Response:
        if guest.has_joined or guest.name in self._joining:
            return _refuse(403, "this invitation has been used: ask for another one")
        body = parse_join(raw)
        if body.public_key in self._list_keys():
            return _refuse(400, "public_key is in use: make a new one")
        self._joining.add(guest.name)
        instance = self._paths.instance
        files = ssh.ssh_files(instance)
        answer = {
            "authorized_key": f"{ssh.RESTRICTIONS} {ssh.ensure_key(files, instance)}",
            "grace_s": self._grace_s,
            "instance": instance,
            "firewall_table": names.firewall_table_name(instance),
        }
        return JSONResponse(answer, background=BackgroundTask(self._complete_join, guest.name, body))

    async def _complete_join(self, name: str, body: JoinBody) -> None:
        # The answer still travels under the invitation's key.
        await asyncio.sleep(_ANSWER_S)
        files = ssh.ssh_files(self._paths.instance)
        files.known_hosts(name).write_text(
            ssh.format_known_hosts(ssh.host_alias(name), [body.host_key]), encoding="ascii"
        )
        self._registry.update(name, public_key=body.public_key, mtu=body.mtu, expires_at=None)
        self._joining.discard(name)
        log.info("%s has joined, with packets of %d bytes", name, body.mtu)

    def _report(self, guest: Guest, raw: object) -> Response:
        if not guest.has_joined:
            return _refuse(403, "this machine has not joined yet")
        self._available[guest.name] = parse_available(raw)
        return JSONResponse({"grace_s": self._grace_s, "is_paused": guest.is_paused})

    def _leave(self, guest: Guest, _body: object) -> Response:
        return JSONResponse({}, background=BackgroundTask(self._complete_leave, guest.name))

    async def _complete_leave(self, name: str) -> None:
        await asyncio.sleep(_ANSWER_S)
        await self._change_broker(name, is_paused=True)
        await asyncio.to_thread(forget_guest, name, self._paths, self._cluster_file)
        self._available.pop(name, None)
        log.info("%s has left", name)

    def _list_keys(self) -> set[str]:
        return {guest.public_key for guest in self._registry.read().values()} | {self._interface.read_public_key()}

    @property
    def _grace_s(self) -> int:
        return round(self._cluster.scheduling.preempt_grace)

    # -- synchronization --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Bring WireGuard, the broker and images into agreement with the guests, until cancelled."""
        while True:
            try:
                await self.sync()
            except GpuhubError as error:
                log.warning("guests: %s", error)
            await asyncio.sleep(SYNC_PERIOD_S)

    async def sync(self) -> None:
        """Bring everything into agreement once."""
        guests = [guest for guest in self._registry.read().values() if guest.is_valid(self._clock())]
        await asyncio.to_thread(self._interface.set_peers, guests)
        for guest in guests:
            available = self._available.get(guest.name)
            if available is not None and available == guest.is_paused:
                await self._sync_pause(guest.name, is_paused=not available)
            if available:
                self._send_images(guest.name)

    async def _sync_pause(self, name: str, *, is_paused: bool) -> None:
        """Pause or lend a guest as its owner wants; one that changes its mind too often waits for the last change."""
        try:
            self._changes.acquire(name)
        except TooManyRequests:
            return
        await self._change_broker(name, is_paused=is_paused)

    async def _change_broker(self, name: str, *, is_paused: bool) -> None:
        """Let the broker pause the node or use it again; without an answer, it is tried again later."""
        try:
            client = connect_to_broker(self._paths)
        except GpuhubError as error:
            log.info("%s: the broker cannot be asked: %s", name, error)
            return
        request = CordonRequest(reason="its owner uses it", grace_s=self._grace_s, requeue=True)
        try:
            await client.change_node(name, "drain" if is_paused else "undrain", request if is_paused else None)
        except GpuhubError as error:
            log.info("%s: the broker refuses: %s", name, error)
            return
        finally:
            await client.close()
        self._registry.update(name, is_paused=is_paused)
        log.info("%s is %s", name, "paused" if is_paused else "lent")

    def _send_images(self, name: str) -> None:
        now = time.monotonic()
        if name in self._sending or now < self._images_due.get(name, 0.0):
            return
        self._images_due[name] = now + IMAGES_PERIOD_S
        task = asyncio.ensure_future(self._send_images_to(name))
        self._sending[name] = task
        task.add_done_callback(lambda _: self._sending.pop(name, None))

    async def _send_images_to(self, name: str) -> None:
        cluster = await asyncio.to_thread(settings.load, self._paths.used_cluster_file)
        builder = distribution.choose_builder(cluster)
        nodes = tuple(node for node in cluster.nodes if node.name in {builder, name})
        if len(nodes) < 2:
            return
        daemons = DockerClients(nodes, instance=self._paths.instance, run_dir=self._paths.run)
        try:
            await distribution.push(daemons, cluster, (), ProgressTerminal())
            log.info("%s has all images", name)
        except GpuhubError as error:
            log.warning("%s: images could not be sent: %s", name, error)
        finally:
            daemons.close()


async def _read_body(request: Request) -> object:
    """Return the parsed body; None for an empty one.

    Raises:
        BadRequest: It is too large or slow, or no JSON.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY:
                    raise BadRequest(f"the body has more than {MAX_BODY} bytes")
    except TimeoutError:
        raise BadRequest(f"the body did not arrive within {_BODY_S:.0f} s") from None
    try:
        return json.loads(body) if body else None
    except (ValueError, RecursionError):
        raise BadRequest("the body is not JSON") from None


def _refuse(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status_code=status)


def serve(cluster_file: Path, paths: Paths) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        SettingsError: cluster.toml is wrong.
        SetupError: WireGuard or the packet filter cannot be set up.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    cluster = settings.load(cluster_file)
    interface = HeadInterface(paths, cluster.guests)
    # Uvicorn ends on SIGTERM and then raises it again, which by default would leave interface and packet filter.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        interface.start()
        asyncio.run(_serve(GuestService(paths, cluster_file, cluster, interface=interface), cluster))
    finally:
        interface.stop()


async def _serve(service: GuestService, cluster: ClusterSettings) -> None:
    server = uvicorn.Server(
        uvicorn.Config(
            service.app,
            host=cluster.guests.head_address,
            port=cluster.guests.service_port,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=64,
            timeout_keep_alive=5,
        )
    )
    syncing = asyncio.ensure_future(service.run())
    try:
        await server.serve()
    finally:
        syncing.cancel()
        with suppress(asyncio.CancelledError):
            await syncing
