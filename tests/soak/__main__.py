"""`python -m tests.soak --hours 2`: use and break the practice closet, and say whether anything grows.

Users start and stop notebooks, cancel starts, and run jobs all the time. In the first third of the run, faults of every
kind happen: kills of hub, broker and daemons, and cut links. Later only links are cut, so that the processes live on and
what they keep adds up. After each round everything is calm for a moment, and a sample is taken; the second half is judged.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gpuhub.ops.deploy.programs import BROKER, HUB
from gpuhub_closet.layouts import build_plan
from gpuhub_closet.topology import ClosetPlan
from tests.acceptance.random_faults import Fault, FaultInjector, schedule_faults
from tests.acceptance.settling import settle
from tests.acceptance.user_load import UserLoad
from tests.soak.readings import take_sample, write_samples
from tests.soak.verdict import Sample, Trend, format_table, judge
from tests.support.closet.observer import Observer
from tests.support.hub.browser import Product, run_product
from tests.support.hub.users import Client, log_in
from tests.support.product import ROOT, wait_for

SEED = 20261122
#: Faults in a round, and the calm before a sample in which caches and connections of the round go, seconds.
FAULTS_PER_ROUND = 3
CALM_S = 5.0
#: The part of the run with kills: what was started last has filled its pools of threads and connections by the half.
KILLING = 1 / 3
USERS = ("ada", "ben")
PROFILES = ("rtx5070", "rtx5060", "cpu")
RESULTS = ROOT / ".cache" / "soak" / "samples.json"


@dataclass(slots=True)
class Soak:
    """One run."""

    product: Product
    plan: ClosetPlan
    clients: list[Client]
    load: UserLoad
    observer: Observer
    faults: FaultInjector
    samples: list[Sample] = field(default_factory=list)
    leaks: int = 0

    def run(self, length_s: float) -> None:
        """Load, break, calm down and look, again and again."""
        moments = (fault for seed in itertools.count(SEED) for fault in schedule_faults(seed, 40, self._names()))
        began = time.monotonic()
        self.observer.begin()
        self.load.begin()
        try:
            while (now := time.monotonic() - began) < length_s:
                self._run_round(moments, only_cuts=now > length_s * KILLING)
                self.samples.append(take_sample(self.product.paths, self.plan, time.monotonic() - began))
                write_samples(RESULTS, self.samples)
                self._print_progress(time.monotonic() - began)
        finally:
            self.load.end()
            self.observer.end()

    def _names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.plan.nodes)

    def _run_round(self, moments: Iterator[Fault], *, only_cuts: bool) -> None:
        self.load.calm.clear()
        for fault in itertools.islice(moments, FAULTS_PER_ROUND):
            self.load.over.wait(fault.after_s)
            self.faults.inflict(replace(fault, what="cut") if only_cuts else fault)
        self.faults.heal()
        self.load.pause()
        self.leaks += settle(self.clients, self.observer)
        for name in (HUB, BROKER):
            wait_for(lambda name=name: self.product.supervisor.state(name) == "RUNNING", f"{name} runs", 60)
        time.sleep(CALM_S)

    def _print_progress(self, at_s: float) -> None:
        values = self.samples[-1].values
        sizes = ", ".join(f"{name} {values[f'{name}.memory_mib']:.0f} MiB" for name in (HUB, BROKER))
        print(f"{at_s:6.0f} s: {sizes}, {self.load.done}, {dict(self.faults.done)}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the soak; return 0 if everything is flat and nothing was doubled, leaked or lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=2.0, help="length of the run")
    hours = parser.parse_args().hours
    with run_product() as product:
        soak = _make(product)
        soak.run(hours * 3600)
        for client in soak.clients:
            client.close()
        # Before the product is stopped, which can fail as well.
        return _report(soak, judge(soak.samples))


def _make(product: Product) -> Soak:
    plan = build_plan(product.paths.instance)
    clients = [log_in(product.address, name, product.password) for name in USERS]
    load = UserLoad(clients, SEED, PROFILES)
    return Soak(product, plan, clients, load, Observer(plan, product.paths), FaultInjector(product, plan))


def _report(soak: Soak, trends: list[Trend]) -> int:
    print(format_table(trends))
    doubled, failures = len(set(soak.observer.double)), soak.load.failures
    growing = [trend for trend in trends if not trend.is_flat]
    for text in failures:
        print(text)
    done = soak.load.done
    print(f"soak.seconds {soak.samples[-1].at_s:.0f} s, {len(soak.samples)} samples: {RESULTS}")
    print(f"soak.notebooks {done['notebooks']}, soak.jobs {done['jobs']}, soak.faults {dict(soak.faults.done)}")
    print(f"soak.double_leases {doubled}, soak.leaks {soak.leaks}, soak.failures {len(failures)}")
    print(f"soak.growing {len(growing)} of {len(trends)} series")
    return 1 if growing or doubled or soak.leaks or failures else 0


if __name__ == "__main__":
    sys.exit(main())
