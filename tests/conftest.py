"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Hypothesis measures how long an example takes (200 ms by default): on a busy machine that fails for no other reason.
settings.register_profile("gpuhub", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gpuhub")
