"""The real broker against the physical state of machines, under any order of use, faults and kills."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.integration.gpuhub.broker.stateful.machine import BrokerMachine
from tests.integration.gpuhub.broker.stateful.slurm_machine import SlurmBrokerMachine

#: `GPUHUB_STATEFUL=nightly` searches for hours, differently each night; otherwise the same short search every time.
IS_NIGHTLY = os.environ.get("GPUHUB_STATEFUL") == "nightly"
_ALWAYS = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}

_SETTINGS = (
    settings(max_examples=10_000, stateful_step_count=50, **_ALWAYS)
    if IS_NIGHTLY
    else settings(max_examples=20, stateful_step_count=30, derandomize=True, database=None, **_ALWAYS)
)

TestBroker = BrokerMachine.TestCase
TestSlurmBroker = SlurmBrokerMachine.TestCase
for _case in (TestBroker, TestSlurmBroker):
    _case.settings = _SETTINGS
del _case  # pytest would collect it as one more test
