"""Charges open leases for their GPUs: time since the grant, and use, memory and energy from the GPU agents' readings.

Every change of a lease and every poll of a node charges the GPUs that it concerns. `flush` writes what was charged; it
is called every half a minute and after each end. After a crash, GPU time is charged from where the store has it, and
energy by the difference of the counters, so that only readings of use and memory in between are missing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuhub.broker.db.store import Store
from gpuhub.broker.db.writer import Changes
from gpuhub.broker.state.capacity import Capacity
from gpuhub.broker.state.ledger import Ledger
from gpuhub.broker_api.schemas import Purpose
from gpuhub.common.errors import GpuhubError
from gpuhub.common.gpu import GpuSpec
from gpuhub.config.settings import ClusterSettings
from gpuhub.domain import costs, owner_limits
from gpuhub.domain.clock import Clock
from gpuhub.domain.costs import CardSupply, CostRecord, DayKey, EnergySample, GpuMeter, UsedAmounts, compute_cost
from gpuhub.domain.models import LeasedGpu, LeaseRow, ResourceRequest
from gpuhub.nodes.status import GpuReading, NodeStatus

#: Records that are kept in memory after their end, for clients that ask about them then.
MAX_ENDED = 2048
_DAY_S = 86400.0
#: Separator between GPU models in one record.
_AND = ", "
#: Maximum length of a name or a model list, characters.
_NAME_LENGTH = _MODEL_LENGTH = 80


@dataclass(slots=True)
class _Account:
    """What is charged to one job, or to the lease of one notebook."""

    record: CostRecord
    #: What was requested; None after a restart, if it ended before.
    resources: ResourceRequest | None = None
    #: The owner's groups in the hub.
    groups: tuple[str, ...] = ()
    #: Meters by GPU UUID. Their times, like that of the last charge, are those of the broker's monotonic clock.
    meters: dict[str, GpuMeter] = field(default_factory=dict)
    charged_at: float | None = None


class CostMeters:
    """The records of everything that holds GPUs, and what of them is not stored yet."""

    def __init__(
        self, *, cluster: ClusterSettings, store: Store, ledger: Ledger, capacity: Capacity, clock: Clock
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._ledger = ledger
        self._capacity = capacity
        self._clock = clock
        self._groups = frozenset(group.name for group in cluster.groups)
        self._prices: dict[tuple[str, str], float] = {}
        self._accounts: dict[str, _Account] = {}
        #: Meters by node: ids of account and GPU.
        self._on_node: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
        self._ended: OrderedDict[str, CostRecord] = OrderedDict()
        #: What is not stored yet: changed accounts, ended records, and amounts by day.
        self._changed: set[str] = set()
        self._unsaved: dict[str, CostRecord] = {}
        self._days: dict[DayKey, UsedAmounts] = {}
        self._flushing = asyncio.Lock()
        self._saving: asyncio.Future[None] | None = None
        self._supply: tuple[Mapping[str, Sequence[GpuSpec] | None], list[CardSupply]] = {}, []

    # -- start and end --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Continue where an earlier run ended, and follow the ledger from now on."""
        offset = self._clock.monotonic() - self._clock.now()
        for record in await asyncio.to_thread(self._store.costs.load_open):
            account = _Account(replace(record, meters=()))
            self._accounts[record.id] = account
            for meter in record.meters:
                self._add_meter(account, _shift(meter, offset))
                if meter.lease not in self._ledger.snapshot.leases:
                    await self._end_meter(account, meter, offset)
        for lease in self._ledger.snapshot.leases.values():
            self._update_lease(lease)
        for account_id in list(self._accounts):
            self._end_if_over(account_id)
        self._ledger.observers.append(self._observe_changes)

    async def _end_meter(self, account: _Account, meter: GpuMeter, offset: float) -> None:
        """Charge a GPU up to the end of its lease, which came after the last write of the earlier run."""
        lease = await asyncio.to_thread(self._store.get_lease, meter.lease)
        ends = [] if lease is None else [lease.released_at, lease.quarantined_at]
        ends += [gpu.released_at for gpu in (() if lease is None else lease.gpus) if gpu.uuid == meter.uuid]
        ended_at = min((end for end in ends if end is not None), default=meter.charged_until)
        self._charge(account, meter.uuid, ended_at + offset, None)
        self._remove_meter(account, meter.uuid)

    async def close(self) -> None:
        """Write what is not stored yet."""
        if self._saving is not None:
            await asyncio.wait([self._saving])
        await self.flush()

    # -- reading ----------------------------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Return whether something has ended that is not stored yet."""
        return bool(self._unsaved)

    def get(self, record_id: str) -> CostRecord | None:
        """Return the record of a job, or of a notebook's lease; None if it holds no GPU, or ended long ago."""
        account = self._accounts.get(record_id)
        return self._ended.get(record_id) if account is None else account.record

    async def find(self, ids: Collection[str]) -> dict[str, CostRecord]:
        """Return records by id, ended or not, as far as they exist."""
        records = {record_id: record for record_id in ids if (record := self.get(record_id)) is not None}
        missing = [record_id for record_id in ids if record_id not in records]
        return records | (await asyncio.to_thread(self._store.costs.find, missing) if missing else {})

    async def list_recent(self, owner: str | None, limit: int) -> list[CostRecord]:
        """Return at most `limit` records of one owner or of all: of what holds GPUs, then of what ended last."""
        records = [account.record for account in self._accounts.values() if account.meters]
        unsaved = [record for record in self._unsaved.values() if owner in (None, record.owner)]
        chosen = sorted((row for row in records if owner in (None, row.owner)), key=lambda row: -row.started_at)
        stored = await asyncio.to_thread(self._store.costs.list_ended, owner, limit)
        # Written in the meantime, it is in both.
        ended = {record.id: record for record in (*unsaved, *stored)}.values()
        return [*chosen, *sorted(ended, key=lambda row: -(row.ended_at or 0.0))][:limit]

    # -- charging ---------------------------------------------------------------------------------------------------

    def observe_node(self, node: NodeStatus) -> None:
        """Charge the GPUs of a node by its last reading."""
        now = self._clock.monotonic()
        for account_id, uuid in self._on_node.get(node.name, ()):
            self._charge(self._accounts[account_id], uuid, now, node)

    def _observe_changes(self, changes: Changes) -> None:
        for _, lease in changes.leases:
            self._update_lease(lease)
        for _, job in changes.jobs:
            self._end_if_over(job.id)

    def _update_lease(self, lease: LeaseRow) -> None:
        """Begin to charge GPUs that a lease holds, and end it for those that it holds no longer."""
        is_charged = lease.granted_at is not None and lease.quarantined_at is None
        held = {gpu.uuid: gpu for gpu in lease.held} if is_charged else {}
        account_id = lease.subject if lease.purpose is Purpose.JOB else lease.id
        account = self._accounts.get(account_id)
        if account is None:
            if not held:
                return
            account = self._accounts[account_id] = _Account(self._build_record(account_id, lease))
        account.resources, account.groups = lease.resources, lease.groups
        for meter in [*account.meters.values()]:
            if meter.lease == lease.id and meter.uuid not in held:
                node = self._capacity.inventory.nodes.get(meter.node)
                self._charge(account, meter.uuid, self._clock.monotonic(), node)
                self._remove_meter(account, meter.uuid)
        for gpu in held.values():
            if gpu.uuid not in account.meters:
                self._add_meter(account, self._build_meter(lease, gpu))
        models = {*account.record.model.split(_AND), *(meter.model for meter in account.meters.values())}
        account.record = replace(
            account.record,
            gpu_count=max(account.record.gpu_count, len(account.meters)),
            model=_AND.join(sorted(models))[:_MODEL_LENGTH],
        )
        self._changed.add(account_id)
        self._end_if_over(account_id)

    def _build_record(self, record_id: str, lease: LeaseRow) -> CostRecord:
        job = self._ledger.snapshot.jobs.get(record_id)
        name = lease.subject if job is None else job.name or job.run_id
        groups = owner_limits.list_groups(self._cluster, lease.owner, lease.groups) & self._groups
        return CostRecord(
            id=record_id,
            owner=lease.owner,
            groups=tuple(sorted(groups)),
            purpose=lease.purpose,
            profile=lease.profile or "",
            name=name[:_NAME_LENGTH],
            model=lease.gpus[0].model,
            gpu_count=0,
            memory_mib=lease.gpus[0].memory_mib,
            started_at=lease.granted_at or self._clock.now(),
            currency=self._cluster.costs.currency,
        )

    def _build_meter(self, lease: LeaseRow, gpu: LeasedGpu) -> GpuMeter:
        age_s = max(0.0, self._clock.now() - lease.charged_from)
        node = self._capacity.inventory.nodes.get(gpu.node)
        reading = None if node is None else self._find_reading(node, gpu.uuid)
        return GpuMeter(
            lease=lease.id,
            uuid=gpu.uuid,
            node=gpu.node,
            model=gpu.model,
            memory_mib=gpu.memory_mib,
            share=gpu.share,
            charged_until=self._clock.monotonic() - age_s,
            energy=None if node is None or reading is None else _build_sample(node, reading),
        )

    def _charge(self, account: _Account, uuid: str, now: float, node: NodeStatus | None) -> None:
        """Charge a GPU up to now, on the monotonic clock; with the node's last reading, if it is recent."""
        meter, record = account.meters[uuid], account.record
        elapsed_s = max(0.0, now - meter.charged_until)
        used = UsedAmounts(gpu_s=elapsed_s / meter.share)
        reading = None if node is None else self._find_reading(node, uuid)
        if node is not None and reading is not None:
            used += _measure_use(meter, reading, elapsed_s)
            sample = _build_sample(node, reading)
            if meter.energy is not None:
                used += _measure_energy(meter, meter.energy, sample, find_energy_part(node, reading, meter.share))
            meter = replace(meter, energy=sample)
        price = self._find_price(record.profile, meter.model)
        used = replace(used, amount=compute_cost(used, gpu_hour=price, kwh=self._cluster.costs.kwh))
        account.meters[uuid] = replace(meter, charged_until=max(now, meter.charged_until))
        account.charged_at = max(now, account.charged_at or now)
        is_peak = used.peak_memory_mib > record.used.peak_memory_mib
        account.record = replace(
            record, used=record.used + used, memory_mib=meter.memory_mib if is_peak else record.memory_mib
        )
        self._changed.add(record.id)
        day = DayKey(
            day=int(self._clock.now() // _DAY_S),
            owner=record.owner,
            groups=record.groups,
            profile=record.profile,
            model=meter.model,
            currency=record.currency,
        )
        self._days[day] = self._days.get(day, UsedAmounts()) + used

    def _find_reading(self, node: NodeStatus, uuid: str) -> GpuReading | None:
        if not node.is_up or node.gpu_error is not None or not node.is_fresh(self._clock.monotonic()):
            return None
        return next((gpu for gpu in node.gpus if gpu.uuid == uuid and gpu.error is None), None)

    def _find_price(self, profile: str, model: str) -> float:
        key = (profile, model)
        if key not in self._prices:
            self._prices[key] = self._cluster.costs.find_gpu_hour_price(profile or None, model)
        return self._prices[key]

    def _add_meter(self, account: _Account, meter: GpuMeter) -> None:
        account.meters[meter.uuid] = meter
        self._on_node[meter.node].add((account.record.id, meter.uuid))

    def _remove_meter(self, account: _Account, uuid: str) -> None:
        meter = account.meters.pop(uuid)
        self._on_node[meter.node].discard((account.record.id, uuid))
        self._changed.add(account.record.id)

    def _end_if_over(self, account_id: str) -> None:
        """End the record of what holds no GPU any more; a job that waits again and a suspended notebook keep it."""
        account = self._accounts.get(account_id)
        if account is None or account.meters or account_id in self._ledger.snapshot.jobs:
            return
        lease = self._ledger.snapshot.leases.get(account_id)
        if lease is not None and lease.suspension is not None:
            return
        del self._accounts[account_id]
        self._changed.discard(account_id)
        monotonic = self._clock.monotonic()
        age_s = 0.0 if account.charged_at is None else monotonic - account.charged_at
        record = replace(account.record, ended_at=self._clock.now() - age_s)
        if account.resources is not None and costs.has_evidence(record, account.resources):
            nodes = self._list_open_nodes(record.owner, account.groups)
            advice = costs.find_smaller_card(record, account.resources, self._count_supply(), nodes)
            record = replace(record, advice=advice)
        self._unsaved[account_id] = self._ended[account_id] = record
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _list_open_nodes(self, owner: str, hub_groups: Sequence[str]) -> list[str]:
        """Return the nodes on which the owner's work may be placed."""
        groups = owner_limits.list_groups(self._cluster, owner, hub_groups)
        return [name for name, node in self._capacity.inventory.configured_nodes.items() if node.admits(groups)]

    def _count_supply(self) -> list[CardSupply]:
        cards = self._capacity.cards
        if self._supply[0] is not cards:
            self._supply = cards, CardSupply.count(cards)
        return self._supply[1]

    # -- writing ----------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Write what has changed since the last time.

        Raises:
            Unavailable: The store cannot be written; the next call writes it.
        """
        async with self._flushing:
            now = self._clock.monotonic()
            for account in self._accounts.values():
                for uuid, meter in list(account.meters.items()):
                    if now - meter.charged_until > costs.MAX_READING_GAP_S:
                        self._charge(account, uuid, now, None)
            changed, unsaved, days = self._changed, dict(self._unsaved), self._days
            if not (changed or unsaved or days):
                return
            offset = self._clock.now() - self._clock.monotonic()
            records = [*unsaved.values()]
            for account in (self._accounts[account_id] for account_id in changed):
                meters = tuple(_shift(meter, offset) for meter in account.meters.values())
                records.append(replace(account.record, meters=meters))
            self._changed, self._days = set(), {}
            # A write continues while its caller is cancelled: what it writes must not be counted a second time.
            self._saving = asyncio.ensure_future(asyncio.to_thread(self._store.costs.save, records, days))
            try:
                await asyncio.shield(self._saving)
            except GpuhubError:
                self._changed |= changed & self._accounts.keys()
                for day, used in days.items():
                    self._days[day] = used + self._days.get(day, UsedAmounts())
                raise
            for record_id in unsaved:
                self._unsaved.pop(record_id, None)


def find_energy_part(node: NodeStatus, reading: GpuReading, share: int) -> float:
    """Return the part of the whole GPU's energy that is charged: by memory for a MIG device, else that of the share."""
    if reading.parent is None:
        return 1 / share
    total = sum(gpu.memory_mib for gpu in node.gpus if gpu.parent == reading.parent)
    return reading.memory_mib / total / share if total else 0.0


def _build_sample(node: NodeStatus, reading: GpuReading) -> EnergySample:
    return EnergySample(
        at=node.read_at or 0.0,
        counter_mj=reading.energy_mj,
        power_w=reading.power_w,
        limit_w=reading.power_limit_w,
    )


def _measure_use(meter: GpuMeter, reading: GpuReading, elapsed_s: float) -> UsedAmounts:
    """Return the use and memory of a GPU that one lease has; those of the parts of a GPU cannot be told apart."""
    if meter.share > 1 or elapsed_s > costs.MAX_READING_GAP_S:
        return UsedAmounts()
    use = reading.utilisation_percent
    return UsedAmounts(
        measured_s=0.0 if use is None else elapsed_s,
        busy_s=0.0 if use is None else elapsed_s * use / 100,
        peak_memory_mib=reading.memory_used_mib or 0,
    )


def _measure_energy(meter: GpuMeter, before: EnergySample, after: EnergySample, part: float) -> UsedAmounts:
    measured = costs.measure_energy(before, after)
    if measured is None:
        return UsedAmounts()
    joules = measured.joules * part
    is_estimate = measured.is_estimate or part < 1
    metered_s = (after.at - before.at) / meter.share
    return UsedAmounts(metered_s=metered_s, energy_j=joules, estimated_j=joules if is_estimate else 0.0)


def _shift(meter: GpuMeter, offset: float) -> GpuMeter:
    """Return the meter with the times of another clock."""
    energy = None if meter.energy is None else replace(meter.energy, at=meter.energy.at + offset)
    return replace(meter, charged_until=meter.charged_until + offset, energy=energy)
