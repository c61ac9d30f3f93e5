"""The broker's application, put together from its parts."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Protocol

from fastapi import FastAPI

from gpuhub.broker import file_routes, problems, routes, terminals
from gpuhub.broker.audit import Audit, AuditTrail
from gpuhub.broker.auth import Identities, TokenChecker
from gpuhub.broker.clock import Clock
from gpuhub.broker.core import Core
from gpuhub.broker.couriers import Couriers, StartCourier
from gpuhub.broker.filters import EnsureFilter, Filters
from gpuhub.broker.gpu_time import GpuTimes
from gpuhub.broker.headers import SafeHeaders
from gpuhub.broker.homes import Homes
from gpuhub.broker.jobs import JobRunner, StartWorker
from gpuhub.broker.keeper import Keeper
from gpuhub.broker.ledger import Ledger
from gpuhub.broker.limits import BodyLimit
from gpuhub.broker.reviver import Reviver, Servers
from gpuhub.broker.schemas import Problem
from gpuhub.broker.service import Broker
from gpuhub.broker.slurm_bare import take_worker
from gpuhub.broker.slurm_queue import WORKERS_PATIENCE_S, SlurmQueue
from gpuhub.broker.slurm_service import SlurmBroker
from gpuhub.broker.slurm_submitting import SlurmSide, build_engine
from gpuhub.broker.store import Store
from gpuhub.broker.usage_history import build_rules
from gpuhub.broker.volumes import VolumeKeeper
from gpuhub.containers.daemons import Daemons
from gpuhub.containers.networks import remove_idle_user_networks
from gpuhub.engines.base import Engine
from gpuhub.engines.builtin import BuiltinEngine
from gpuhub.errors import GpuhubError
from gpuhub.nodes.inventory import GpuReading, start_inventory
from gpuhub.settings import Cluster

log = logging.getLogger(__name__)

PREFIX = "/services/broker"
#: Between two looks for networks that nobody uses, seconds.
NETWORKS_PERIOD_S = 30.0
_STOP_TRIES = 3
_RESTART_S = 1.0


class Hub(TokenChecker, Servers, Protocol):
    """What the broker needs of the hub."""

    async def close(self) -> None:
        """Drop the connections."""
        ...


def create_app(
    *,
    cluster: Cluster,
    store: Store,
    daemons: Daemons,
    hub: Hub,
    start_worker: StartWorker,
    start_courier: StartCourier,
    ensure_filter: EnsureFilter | None = None,
    engine: Engine | None = None,
    slurm: SlurmSide | None = None,
    clock: Clock | None = None,
    own_token: str = "",
    hub_page: str = "/hub/gpus",
) -> FastAPI:
    """The application; its loops run while it does. The caller closes store and daemons afterwards. With `slurm` that
    decides who gets what, in place of `engine`.
    """
    clock = clock or Clock()
    slurm_engine = None if slurm is None else build_engine(cluster, daemons.instance)
    core = Core(
        cluster=cluster,
        store=store,
        engine=slurm_engine or engine or BuiltinEngine(build_rules(cluster.scheduling)),
        inventory=start_inventory(cluster, _seen(store)),
        clock=clock,
    )

    broker: Broker = Broker(core)
    queue = None
    if slurm is not None and slurm_engine is not None:
        queue = SlurmQueue(
            core, slurm_engine, slurm.api, instance=daemons.instance, find_submitter=slurm.find_submitter
        )
        broker = SlurmBroker(core, slurm_engine, queue, GpuTimes(slurm.api, clock))
    couriers = Couriers(core=core, daemons=daemons, start=start_courier)
    audit = Audit(clock)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await core.take_up()
        runner = JobRunner(
            core=core,
            instance=daemons.instance,
            start_worker=start_worker if cluster.has_docker else take_worker,
            refuse_ended=None if queue is None else partial(queue.refuse_ended, patience_s=WORKERS_PATIENCE_S),
        )
        filters = None if ensure_filter is None else Filters(ensure_filter, clock)
        keeper = Keeper(
            core=core,
            daemons=daemons,
            runner=runner,
            couriers=couriers,
            filters=filters,
            has_daemons=cluster.has_docker,
        )
        runs: dict[str, Callable[[], Awaitable[None]]] = {
            "keeper": keeper.run,
            "reviver": Reviver(core=core, servers=hub).run,
        }
        if cluster.has_docker:
            runs["volumes"] = VolumeKeeper(core=core, daemons=daemons).run
            runs["networks"] = partial(_remove_networks, core, daemons)
        if queue is not None:
            runs["slurm"] = queue.run
        loops = [asyncio.ensure_future(_keep_running(what, run)) for what, run in runs.items()]
        try:
            yield
        finally:
            await _stop(loops)
            await runner.close()
            if slurm is not None:
                await slurm.api.close()
            await core.close()
            await hub.close()
            audit.close()

    app = FastAPI(
        title="gpuhub broker",
        version=version("gpuhub"),
        lifespan=lifespan,
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
    )
    app.state.core = core
    app.state.broker = broker
    app.state.identities = Identities(hub, clock, own_token)
    app.state.homes = Homes(core, couriers)
    app.state.daemons = daemons
    app.state.hub_page = hub_page
    for router in (routes.public, routes.api, file_routes.api, terminals.api):
        app.include_router(router, prefix=PREFIX)
    # The last one is the outermost.
    app.add_middleware(BodyLimit, streamed=frozenset({("PUT", f"{PREFIX}/api/v1/files")}))
    app.add_middleware(AuditTrail, audit=audit, prefix=routes.API)
    app.add_middleware(SafeHeaders)
    problems.install(app)
    _document_problems(app)
    return app


class _Owners(Collection[str]):
    """Everybody with a lease that has not ended, at the moment of the question."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def _now(self) -> set[str]:
        return {lease.owner for lease in self._ledger.snapshot.leases.values()}

    def __contains__(self, owner: object) -> bool:
        return owner in self._now()

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


async def _keep_running(what: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run for ever: a loop that died silently would leave GPUs held."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("%s failed unexpectedly and is started again", what)
        await asyncio.sleep(_RESTART_S)


async def _stop(loops: list[asyncio.Task[None]]) -> None:
    """Cancel loops; again where the cancellation got lost on its way, as in wait_for before Python 3.12."""
    for _ in range(_STOP_TRIES):
        for loop in loops:
            loop.cancel()
        _, alive = await asyncio.wait(loops, timeout=1)
        if not alive:
            return
    log.warning("a loop of the broker does not stop; the broker ends without it")


async def _remove_networks(core: Core, daemons: Daemons) -> None:
    """Remove networks of users without leases, again and again until cancelled."""
    while True:
        await asyncio.sleep(NETWORKS_PERIOD_S)
        try:
            owners = _Owners(core.ledger)
            removed = await remove_idle_user_networks(daemons, core.cluster, daemons.instance, owners)
        except GpuhubError as error:
            log.info("networks that nobody uses stay for now: %s", error)
        else:
            if removed:
                log.info("removed networks that nobody used: %s", ", ".join(removed))


def _seen(store: Store) -> dict[str, list[GpuReading]]:
    seen: defaultdict[str, list[GpuReading]] = defaultdict(list)
    for gpu in store.seen_gpus():
        seen[gpu.node].append(GpuReading(uuid=gpu.uuid, index=gpu.index, model=gpu.model, memory_mib=gpu.memory_mib))
    return dict(seen)


def _document_problems(app: FastAPI) -> None:
    """Put the problem document's own schema into OpenAPI: routes name it, but none returns it."""
    build = app.openapi

    def openapi() -> dict[str, object]:
        document = build()
        document.setdefault("components", {}).setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
        return document

    app.openapi = openapi  # type: ignore[method-assign]
