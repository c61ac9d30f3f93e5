"""Metrics in Prometheus' text format, as tests read them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from gpuhub.broker.api.dependencies import API
from tests.support.broker.in_process import Running


class Metrics:
    """All samples of one scrape, or of some families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = list(families)
        self._samples = [sample for family in self.families for sample in family.samples]

    @property
    def names(self) -> set[str]:
        """The names of all samples."""
        return {sample.name for sample in self._samples}

    def list(self, name: str, **labels: str) -> list[dict[str, str]]:
        """Return the labels of every sample with this name and these labels."""
        return [
            sample.labels for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def value(self, name: str, **labels: str) -> float:
        """Return the value of the only sample with this name and these labels."""
        [value] = self.values(name, **labels)
        return value

    def values(self, name: str, **labels: str) -> list[float]:
        """Return the values of every sample with this name and these labels."""
        return [
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        ]


async def scrape(running: Running, token: str = "metrics") -> Metrics:
    """Return what Prometheus would get from the broker."""
    return Metrics(text_string_to_metric_families(await scrape_text(running, token)))


async def scrape_text(running: Running, token: str = "metrics") -> str:
    """Return the text that Prometheus would get from the broker."""
    async with running.client(token) as client:
        answer = await client.get(f"{API}/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["Content-Type"] == CONTENT_TYPE_PLAIN_0_0_4
    return answer.text
