"""Brings copies of datasets to nodes: one node reads the file server, and each passes the files on to the next.

All nodes of a transfer are one chain, so that they receive at the same time, and the file server sends each byte once.
A node that has a copy already is the head of the chain, and the file server only lists the files.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from weakref import WeakValueDictionary

from docker.types import Mount

from gpuhub.broker.files.staged_copies import DatasetVersion, StagedCopies
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.common import names
from gpuhub.common.errors import GpuhubError, InvalidRequest
from gpuhub.common.units import format_size
from gpuhub.docker import networks
from gpuhub.docker.client import DockerClients
from gpuhub.docker.containers import container_lifecycle
from gpuhub.docker.containers.mounts import build_datasets_mount
from gpuhub.docker.containers.staging_container import COPY, StagingFailed, StagingSpec, create_stager, run_stager

log = logging.getLogger(__name__)
#: Time between two removals of unneeded copies, seconds.
COLLECT_PERIOD_S = 600.0
#: A list of a dataset's files is valid for this long, so that the workers of an array do not each make one; seconds.
LIST_VALID_S = 30.0
#: Transfers of one request: a second one brings nodes the copy whose chain broke in the first.
_ATTEMPTS = 2

#: Called with a text about the transfer, for the user who waits.
Report = Callable[[str], None]


class DatasetStager:
    """Lists datasets, copies them to nodes and removes copies that are not needed."""

    def __init__(self, *, core: BrokerState, daemons: DockerClients) -> None:
        self._core = core
        self._daemons = daemons
        self._storage = core.cluster.storage
        self.copies = StagedCopies(daemons, core.clock)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._versions: dict[str, tuple[float, DatasetVersion]] = {}
        self._transfers = 0
        #: Nodes without containers of an earlier run of the broker.
        self._clean_nodes: set[str] = set()
        self._cleaning = asyncio.Lock()

    @property
    def is_transferring(self) -> bool:
        """Return whether nodes pass a dataset on now, for which their network must remain."""
        return self._transfers > 0

    async def run(self) -> None:
        """Remove unneeded copies, again and again until cancelled."""
        while True:
            await asyncio.sleep(COLLECT_PERIOD_S)
            for node, record in self._core.capacity.inventory.nodes.items():
                if record.is_up:
                    await self._collect(node)

    async def _collect(self, node: str) -> None:
        try:
            await self.make_room(node, 0)
        except GpuhubError as error:
            log.info("node %s: its copies of datasets cannot be checked now: %s", node, error)

    async def stage(
        self, datasets: Sequence[str], nodes: Sequence[str], report: Report | None = None
    ) -> dict[str, str]:
        """Bring whole copies of datasets to nodes, and return the copies' volumes by dataset.

        Raises:
            StagingFailed: A dataset does not exist, or may not be copied, or a node has no space for it.
            GpuhubError: A node does not answer.
        """
        volumes = {}
        for dataset in datasets:
            # Requests for one dataset follow each other: the next one finds the copies of the one before.
            lock = self._locks.get(dataset) or asyncio.Lock()
            self._locks[dataset] = lock
            async with lock:
                volumes[dataset] = await self._stage_one(dataset, tuple(dict.fromkeys(nodes)), report or _ignore)
        return volumes

    async def make_room(self, node: str, size: int) -> None:
        """Remove copies that are too old, and others until a new copy of `size` bytes fits."""
        free = self._core.capacity.inventory.nodes[node].disk_free
        missing = 0 if free is None else size + self._storage.stage_spare - free
        for removal in await self.copies.find_removals(node, keep_s=self._storage.stage_keep, missing_bytes=missing):
            if await self.copies.remove(node, removal.copy.volume):
                text = f"the copy of {removal.copy.dataset} is removed: {removal.reason}"
                log.info("node %s: %s", node, text)
                self._core.add_event("dataset.removed", text, node=node)

    # -- one dataset --------------------------------------------------------------------------------------------------

    async def _stage_one(self, dataset: str, nodes: Sequence[str], report: Report) -> str:
        version = await self._list(dataset, nodes[0])
        volume = self.copies.build_volume(version)
        error: GpuhubError | None = None
        for _ in range(_ATTEMPTS):
            missing = [node for node in nodes if not await self._has_copy(node, version)]
            if not missing:
                return volume
            error = await self._transfer(version, missing, report)
            if error is None:
                return volume
        assert error is not None  # noqa: S101 - for the type checker
        raise error

    async def _list(self, dataset: str, node: str) -> DatasetVersion:
        at, known = self._versions.get(dataset, (float("-inf"), None))
        if known is not None and self._core.clock.monotonic() - at < LIST_VALID_S:
            return known
        self._versions.pop(dataset, None)
        began = self._core.clock.monotonic()
        try:
            result = await self._do(node, {"do": "list", "folder": f"/{dataset}"}, [self._datasets_mount()])
        except StagingFailed as error:
            raise StagingFailed(f"{dataset} cannot be copied to the nodes' disks: {error}") from error
        version = DatasetVersion(dataset=dataset, digest=result["digest"], files=result["files"], size=result["bytes"])
        self._versions[dataset] = began, version
        return version

    async def _has_copy(self, node: str, version: DatasetVersion) -> bool:
        """Return whether the node has a whole copy; one of an earlier run of the broker is checked."""
        volume = self.copies.build_volume(version)
        if not await self.copies.exists(node, volume):
            return False
        if not self.copies.is_whole(node, volume):
            mount = _mount_copy(volume, read_only=True)
            result = await self._do(node, {"do": "list", "folder": COPY}, [mount], fails=False)
            if result.get("digest") != version.digest:
                return False
        self.copies.record_whole(node, volume)
        return True

    async def _do(
        self, node: str, task: Mapping[str, Any], mounts: Sequence[Mount], *, fails: bool = True
    ) -> dict[str, Any]:
        await self._clean(node)
        name = names.stager_container_name(self._daemons.instance, secrets.token_hex(4), 0)
        spec = StagingSpec(name=name, node=node, task=task, mounts=mounts)
        try:
            return await run_stager(self._daemons, spec, await create_stager(self._daemons, spec))
        except StagingFailed:
            if fails:
                raise
            return {}

    def _datasets_mount(self) -> Mount:
        if self._storage.datasets is None:
            raise InvalidRequest("stage: this cluster has no datasets: the administrator sets datasets in [storage]")
        return build_datasets_mount(self._storage, self._daemons.instance)

    # -- a transfer ---------------------------------------------------------------------------------------------------

    async def _transfer(self, version: DatasetVersion, nodes: Sequence[str], report: Report) -> GpuhubError | None:
        """Copy a dataset to nodes, and return the first node's error that is a cause; None if all have it."""
        volume = self.copies.build_volume(version)
        holders = [node for node in self.copies.list_holders(volume) if self._is_up(node) and node not in nodes]
        for node in (*holders[:1], *nodes):
            await self._clean(node)
        for node in nodes:
            await self.make_room(node, version.size)
            await self.copies.create(node, version)
        began = self._core.clock.monotonic()
        async with self._network(len(nodes) + bool(holders)) as network:
            specs = self._build_chain(version, holders[:1], nodes, network)
            results = await self._run_chain(version, specs, report)
        errors = [result for result in results if isinstance(result, BaseException)]
        for spec, result in zip(specs, results, strict=True):
            if not isinstance(result, BaseException) and spec.writes:
                self.copies.record_whole(spec.node, volume)
            elif spec.writes:
                await self.copies.remove(spec.node, volume)
        took_s = self._core.clock.monotonic() - began
        for error in errors:
            if not isinstance(error, GpuhubError):
                raise error
        if not errors:
            text = f"{version.dataset} ({format_size(version.size)}) is copied to {', '.join(nodes)} in {took_s:.1f} s"
            log.info("%s", text)
            self._core.add_event("dataset.staged", text)
            return None
        return find_cause(specs, results)

    @asynccontextmanager
    async def _network(self, members: int) -> AsyncIterator[str | None]:
        """Hold the network of staging containers, for which there must be several."""
        self._transfers += 1
        try:
            if members < 2:
                yield None
            else:
                network = await networks.ensure_user_network(
                    self._daemons, self._core.cluster, self._daemons.instance, names.STAGING_OWNER
                )
                yield network.name
        finally:
            self._transfers -= 1

    def _build_chain(
        self, version: DatasetVersion, holders: Sequence[str], nodes: Sequence[str], network: str | None
    ) -> list[StagingSpec]:
        transfer, secret = secrets.token_hex(4), secrets.token_hex(16)
        volume, chain = self.copies.build_volume(version), [*holders, *nodes]
        container_names = [
            names.stager_container_name(self._daemons.instance, transfer, index) for index in range(len(chain))
        ]
        specs = []
        for index, node in enumerate(chain):
            writes = node not in holders
            reads = COPY if not writes else f"/{version.dataset}" if index == 0 else None
            mounts = [_mount_copy(volume, read_only=not writes)]
            if index == 0 and writes:
                mounts.append(self._datasets_mount())
            task = {
                "do": "copy",
                "digest": version.digest,
                "bytes": version.size,
                "spare": self._storage.stage_spare,
                "read": reads,
                "write": COPY if writes else None,
                "next": container_names[index + 1] if index + 1 < len(chain) else None,
            }
            specs.append(
                StagingSpec(
                    name=container_names[index], node=node, task=task, mounts=mounts, network=network, secret=secret
                )
            )
        return specs

    async def _run_chain(
        self, version: DatasetVersion, specs: Sequence[StagingSpec], report: Report
    ) -> list[dict[str, Any] | BaseException]:
        """Run the containers of a chain, and return each one's last line or its error."""
        targets = ", ".join(spec.node for spec in specs if spec.writes)

        def progress(copied: int) -> None:
            report(f"Copying {version.dataset} to {targets}: {format_size(copied)} of {format_size(version.size)}")

        progress(0)

        async def run(spec: StagingSpec, container: str) -> dict[str, Any]:
            return await run_stager(self._daemons, spec, container, progress if spec is specs[-1] else None)

        created = await asyncio.gather(*(create_stager(self._daemons, spec) for spec in specs), return_exceptions=True)
        failed = [result for result in created if isinstance(result, BaseException)]
        if failed:
            await asyncio.gather(
                *(
                    container_lifecycle.remove_container(self._daemons, spec.node, str(container))
                    for spec, container in zip(specs, created, strict=True)
                    if not isinstance(container, BaseException)
                ),
                return_exceptions=True,
            )
            return [failed[0] for _ in specs]
        return await asyncio.gather(
            *(run(spec, str(container)) for spec, container in zip(specs, created, strict=True)),
            return_exceptions=True,
        )

    async def _clean(self, node: str) -> None:
        """Remove staging containers that an earlier run of the broker left on the node."""
        async with self._cleaning:
            if node in self._clean_nodes:
                return
            labels = [f"{names.LABEL_INSTANCE}={self._daemons.instance}", f"{names.LABEL_KIND}={names.KIND_STAGER}"]
            for left in await self._daemons.call(node, "containers", all=True, filters={"label": labels}):
                await container_lifecycle.remove_container(self._daemons, node, str(left["Id"]))
            self._clean_nodes.add(node)

    def _is_up(self, node: str) -> bool:
        record = self._core.capacity.inventory.nodes.get(node)
        return record is not None and record.is_up


def find_cause(specs: Sequence[StagingSpec], results: Sequence[dict[str, Any] | BaseException]) -> GpuhubError:
    """Return the error that explains the others: a node also fails when the one before it stops or cannot reach it."""
    errors = [result for result in results if isinstance(result, GpuhubError)]
    cause = next((error for error in errors if "previous node" not in str(error)), None)
    if cause is not None:
        return cause
    unreachable = [
        f"; node {spec.node}: {result['next_error']}"
        for spec, result in zip(specs, results, strict=True)
        if not isinstance(result, BaseException) and result.get("next_error")
    ]
    return StagingFailed(f"{errors[0]}{''.join(unreachable)}")


def _mount_copy(volume: str, *, read_only: bool) -> Mount:
    return Mount(target=COPY, source=volume, type="volume", read_only=read_only, no_copy=True)


def _ignore(_text: str) -> None:
    return
