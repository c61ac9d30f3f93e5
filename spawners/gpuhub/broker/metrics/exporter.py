"""The exporter: all metrics in Prometheus' text format, as of the moment of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.broker.metrics.gpu_metrics import collect_gpus
from gpuhub.broker.metrics.ledger_metrics import LedgerCounters, collect_ledger
from gpuhub.broker.metrics.node_metrics import collect_certificates, collect_disk, collect_nodes
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker.views import slices, views


class _Collected(Collector):
    """Metrics that were collected before, for the text format."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


class MetricsExporter:
    """Collects the metrics of the broker's state, and the counters of the registry."""

    def __init__(
        self,
        core: BrokerState,
        backend: SchedulingBackend,
        *,
        read_head_free: Callable[[], int] | None = None,
        read_certificate_ends: Callable[[], Mapping[str, float]] | None = None,
    ) -> None:
        """Count changes of the ledger from now on.

        Args:
            read_head_free: Returns the free bytes on the disk with the broker's own data.
            read_certificate_ends: Returns when each certificate ends, in seconds since 1970; it may block.
        """
        # Prometheus has its own way to find the start of a counter.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._core = core
        self._backend = backend
        self._read_head_free = read_head_free
        self._read_certificate_ends = read_certificate_ends
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._counters = LedgerCounters(self.registry, core.clock.now())
        core.ledger.observers.append(self._counters.record)

    async def render(self) -> bytes:
        """Return all metrics; the broker serves other requests in between."""
        ends = {} if self._read_certificate_ends is None else await asyncio.to_thread(self._read_certificate_ends)
        metrics = [*await slices.collect(self._collect_state()), *collect_certificates(ends), *self.registry.collect()]
        return await asyncio.to_thread(generate_latest, _Collected(metrics))

    def _collect_state(self) -> Iterator[Metric]:
        core = self._core
        records, monotonic = core.capacity.inventory.nodes, core.clock.monotonic()
        snapshot, now = core.ledger.snapshot, core.clock.now()
        nodes = views.view_nodes(core, self._backend, None)
        yield _build_info(core.cluster.engine)
        has_firewall = core.cluster.network.guard and self._backend.capabilities.containers
        yield from collect_nodes(records, nodes, monotonic, has_firewall=has_firewall)
        yield from collect_gpus(records, nodes, monotonic)
        yield from collect_disk(
            required_free=core.cluster.scheduling.min_free_disk,
            head_free=None if self._read_head_free is None else self._read_head_free(),
        )
        yield from collect_ledger(snapshot, now)
        yield self._counters.collect_gpu_seconds(snapshot, now)


def _build_info(engine: str) -> Metric:
    family = GaugeMetricFamily(
        "gpuhub_build_info", "Always 1; the labels describe the broker.", labels=("version", "engine")
    )
    family.add_metric((version("gpuhub"), engine), 1.0)
    return family
