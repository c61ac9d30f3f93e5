"""What a job or a notebook used of its GPUs: time, mean use, memory, energy and money, and the texts about it.

Energy is the difference of NVML's counter, which counts since the driver was loaded. Where a GPU has no counter, or it
began again (driver reloaded, machine rebooted), and for parts of a GPU, energy is an estimate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from gpuhub.broker_api.schemas import Purpose
from gpuhub.common.gpu import GpuSpec
from gpuhub.domain.models import ResourceRequest

#: A reading stands for the time since the one before, if that is at most this, seconds.
MAX_READING_GAP_S = 15.0
#: A difference of a GPU's energy counter above 1.5 × power limit × (elapsed time + 10 s) is discarded as implausible:
#: GPUs exceed their limit for moments, and readings arrive later than they are taken.
_POWER_TOLERANCE, _TIME_TOLERANCE_S = 1.5, 10.0
#: Power limit of a GPU that reports none, watts.
_UNKNOWN_LIMIT_W = 1500.0
#: A smaller GPU is suggested only if readings cover at least 300 s on each GPU and 90 % of the GPU time, 20 % of its
#: memory would stay free, and the larger GPU's mean utilisation was at most 50 %.
MIN_EVIDENCE_S, _MIN_EVIDENCE_PART = 300.0, 0.9
_FREE_MEMORY, _MAX_USE_PERCENT = 0.2, 50
_J_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedAmounts:
    """What was used; times are in seconds of a whole GPU."""

    gpu_s: float = 0.0
    #: Time for which the use is known, and that time multiplied by the use.
    measured_s: float = 0.0
    busy_s: float = 0.0
    #: Maximum memory in use on one GPU.
    peak_memory_mib: int = 0
    #: Time for which the energy is known; the energy, and how much of it is an estimate, joules.
    metered_s: float = 0.0
    energy_j: float = 0.0
    estimated_j: float = 0.0
    #: Money.
    amount: float = 0.0

    def __add__(self, other: UsedAmounts) -> UsedAmounts:
        return UsedAmounts(
            gpu_s=self.gpu_s + other.gpu_s,
            measured_s=self.measured_s + other.measured_s,
            busy_s=self.busy_s + other.busy_s,
            peak_memory_mib=max(self.peak_memory_mib, other.peak_memory_mib),
            metered_s=self.metered_s + other.metered_s,
            energy_j=self.energy_j + other.energy_j,
            estimated_j=self.estimated_j + other.estimated_j,
            amount=self.amount + other.amount,
        )

    @property
    def gpu_hours(self) -> float:
        return self.gpu_s / 3600

    @property
    def busy_percent(self) -> float | None:
        """Return the mean use; None if it was not measured."""
        return 100 * self.busy_s / self.measured_s if self.measured_s else None

    @property
    def energy_kwh(self) -> float | None:
        """Return the energy; None if it was not measured."""
        return self.energy_j / _J_PER_KWH if self.metered_s else None


def compute_cost(used: UsedAmounts, *, gpu_hour: float, kwh: float) -> float:
    """Return what amounts cost at the prices of an hour of a whole GPU and of a kilowatt-hour."""
    return used.gpu_hours * gpu_hour + (used.energy_kwh or 0.0) * kwh


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySample:
    """What a GPU reported about energy at one moment; None for what it does not report."""

    #: Seconds on the clock of the caller, who compares samples.
    at: float
    #: Energy since the driver was loaded, millijoules.
    counter_mj: int | None = None
    power_w: float | None = None
    limit_w: float | None = None


@dataclass(frozen=True, slots=True)
class MeasuredEnergy:
    """The energy between two samples, joules."""

    joules: float
    is_estimate: bool


def measure_energy(before: EnergySample, after: EnergySample) -> MeasuredEnergy | None:
    """Return the energy that a GPU took between two samples; None if it is not known."""
    elapsed_s = max(0.0, after.at - before.at)
    most_j = (after.limit_w or before.limit_w or _UNKNOWN_LIMIT_W) * _POWER_TOLERANCE * (elapsed_s + _TIME_TOLERANCE_S)
    if before.counter_mj is not None and after.counter_mj is not None:
        is_reset = after.counter_mj < before.counter_mj
        # What was counted before a reset and not read is lost.
        joules = (after.counter_mj - (0 if is_reset else before.counter_mj)) / 1000
        if joules <= most_j:
            return MeasuredEnergy(joules, is_reset)
    powers = [sample.power_w for sample in (before, after) if sample.power_w is not None]
    if not powers or elapsed_s > MAX_READING_GAP_S:
        return None
    return MeasuredEnergy(sum(powers) / len(powers) * elapsed_s, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMeter:
    """A GPU, or a part of one, that a lease holds, and up to when it is charged; times are seconds since 1970."""

    lease: str
    uuid: str
    node: str
    model: str
    memory_mib: int
    share: int
    charged_until: float
    energy: EnergySample | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRecord:
    """What one job, or the lease of one notebook, has used."""

    #: Id of the job, or of the notebook's lease.
    id: str
    owner: str
    #: The owner's groups that cluster.toml has limits for, in alphabetical order.
    groups: tuple[str, ...]
    purpose: Purpose
    #: Empty for jobs.
    profile: str
    name: str
    #: Models of its GPUs, with commas between different ones, and how many there were at the same time at most.
    model: str
    gpu_count: int
    #: Memory of the GPU on which most memory was in use.
    memory_mib: int
    started_at: float
    #: When it held GPUs for the last time; None before its end.
    ended_at: float | None = None
    used: UsedAmounts = field(default_factory=UsedAmounts)
    currency: str = ""
    #: A smaller GPU of the cluster that would have been enough; None if none would, or it is not known.
    advice: str | None = None
    meters: tuple[GpuMeter, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DayKey:
    """What the sums of a day are kept for."""

    #: Days since 1970, UTC.
    day: int
    owner: str
    groups: tuple[str, ...]
    profile: str
    model: str
    currency: str


@dataclass(frozen=True, slots=True)
class CardSupply:
    """A kind of GPU, and how many of it each node has."""

    card: GpuSpec
    #: Number by node.
    counts: Mapping[str, int]

    @classmethod
    def count(cls, cards: Mapping[str, Sequence[GpuSpec] | None]) -> list[Self]:
        """Return all kinds of GPUs of these nodes, by node; None for a node that was never read."""
        counts: Counter[tuple[GpuSpec, str]] = Counter(
            (card, node) for node, found in cards.items() for card in found or ()
        )
        kinds: dict[GpuSpec, dict[str, int]] = {}
        for (card, node), count in counts.items():
            kinds.setdefault(card, {})[node] = count
        return [cls(card, by_node) for card, by_node in kinds.items()]

    def has_room(self, resources: ResourceRequest, nodes: Iterable[str]) -> bool:
        """Return whether a request would fit on the free nodes among `nodes` with these GPUs alone."""
        counts = [self.counts.get(node, 0) for node in nodes]
        if resources.spread is not None:
            return sum(counts) >= resources.spread
        return sum(count >= resources.gpus_per_node for count in counts) >= resources.nodes


def has_evidence(record: CostRecord, resources: ResourceRequest) -> bool:
    """Return whether enough was measured, and the GPUs were used so little, that a smaller one may have been enough."""
    used, use = record.used, record.used.busy_percent
    is_measured = used.measured_s >= max(MIN_EVIDENCE_S * record.gpu_count, _MIN_EVIDENCE_PART * used.gpu_s)
    is_little = use is not None and use <= _MAX_USE_PERCENT and used.peak_memory_mib > 0
    return is_measured and is_little and resources.share == 1


def find_smaller_card(
    record: CostRecord, resources: ResourceRequest, supply: Iterable[CardSupply], nodes: Sequence[str]
) -> str | None:
    """Return the model of the smallest GPU that would have been enough; None if none would, or evidence is missing.

    Enough is a GPU with less memory that still had a fifth of its memory free, that runs everything that the larger
    one runs, and of which as many are on nodes of the owner, while the larger one was used at most half of the time.
    For GPUs of several models none is named.

    Args:
        nodes: Those on which the owner's work may be placed.
    """
    if not has_evidence(record, resources):
        return None
    kinds = list(supply)
    capabilities = [kind.card.capability for kind in kinds if kind.card.model == record.model and kind.card.capability]
    if not capabilities:
        return None
    capability = max(*capabilities, resources.least_capability or (0, 0))
    fitting = [
        kind.card
        for kind in kinds
        if not kind.card.is_mig
        and record.used.peak_memory_mib <= kind.card.memory_mib * (1 - _FREE_MEMORY)
        and kind.card.memory_mib < record.memory_mib
        and (kind.card.capability or (0, 0)) >= capability
        and kind.has_room(resources, nodes)
    ]
    smallest = min(fitting, key=lambda card: (card.memory_mib, card.model), default=None)
    return None if smallest is None else smallest.model


def describe_costs(record: CostRecord) -> str:
    """Return a line such as `GPU 31 % busy, 9 of 32 GB, 0.42 kWh, 0.18 EUR; an RTX 5060 would have been enough`."""
    used = record.used
    gpus = "GPU" if record.gpu_count == 1 else f"{record.gpu_count} GPUs"
    use = used.busy_percent
    facts = [f"{gpus} for {format_hours(used.gpu_hours)}" if use is None else f"{gpus} {use:.0f} % busy"]
    if used.peak_memory_mib:
        facts.append(f"{_format_number(used.peak_memory_mib / 1024)} of {record.memory_mib / 1024:.0f} GB")
    energy = used.energy_kwh
    if energy is not None:
        facts.append(format_energy(energy, is_estimate=used.estimated_j > 0))
    if record.currency:
        facts.append(f"{used.amount:.2f} {record.currency}")
    line = ", ".join(facts)
    if record.advice is None:
        return line
    smaller = f"{_choose_article(record.advice)} {record.advice}" if record.gpu_count == 1 else f"{record.advice} GPUs"
    return f"{line}; {smaller} would have been enough"


def format_energy(kwh: float, *, is_estimate: bool) -> str:
    """Return an energy such as `0.42 kWh` or `about 3.1 Wh`."""
    text = f"{kwh:.2f} kWh" if kwh >= 0.1 else f"{_format_number(kwh * 1000)} Wh"
    return f"about {text} (estimated)" if is_estimate else text


def format_hours(gpu_hours: float) -> str:
    """Return GPU time such as `2.5 GPU-hours`, or `4 GPU-minutes` where that is less than an hour."""
    if gpu_hours >= 1:
        return f"{_format_number(gpu_hours)} GPU-hours"
    return f"{_format_number(gpu_hours * 60)} GPU-minutes"


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 9.5 else f"{value:.1f}"


def _choose_article(name: str) -> str:
    """Return `an` before a name that begins with a vowel's sound: `an RTX 5060`, `an A100`, `a Tesla T4`."""
    first = name.split(maxsplit=1)[0]
    is_spelled = first.isupper() or any(character.isdigit() for character in first)
    return "an" if name[0].upper() in ("AEFHILMNORSX" if is_spelled else "AEIOU") else "a"
