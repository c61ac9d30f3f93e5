"""When internal certificates are made anew."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpuhub.trust.internal import AUTHORITIES, CERTIFICATES
from gpuhub.trust.renewal import LEAST_LEFT, Found, Renewal, decide

NOW = datetime(2026, 11, 21, tzinfo=UTC)
LATER = NOW + timedelta(days=5 * 365)


def found(**changes: Found | None) -> dict[str, Found | None]:
    """Everything as it should be on a head node at 10.77.0.1, but for `changes` (with _ for -)."""
    good: dict[str, Found | None] = dict.fromkeys(AUTHORITIES, Found(ends=LATER))
    good |= dict.fromkeys(CERTIFICATES, Found(ends=LATER, names=frozenset({"IP:10.77.0.1", "IP:127.0.0.1"})))
    return good | {name.replace("_", "-"): one for name, one in changes.items()}


def ending(left: timedelta) -> Found:
    return Found(ends=NOW + left, names=frozenset({"IP:10.77.0.1"}))


@pytest.mark.parametrize(
    ("changes", "renewal", "reason"),
    [
        ({}, Renewal.NOTHING, ""),
        (dict.fromkeys((name.replace("-", "_") for name in AUTHORITIES), None), Renewal.FIRST, "there are none yet"),
        ({"hub_ca": None}, Renewal.EVERYTHING, "hub-ca is missing"),
        ({"broker": None}, Renewal.CERTIFICATES, "broker is missing"),
        ({"broker": ending(LEAST_LEFT)}, Renewal.NOTHING, ""),
        ({"broker": ending(LEAST_LEFT - timedelta(days=1))}, Renewal.CERTIFICATES, "broker ends on 2026-12-20"),
        ({"services_ca": ending(timedelta(days=-1))}, Renewal.EVERYTHING, "services-ca ends on 2026-11-20"),
        (
            {"broker": None, "notebooks_ca": ending(timedelta(days=3))},
            Renewal.EVERYTHING,
            "notebooks-ca ends on 2026-11-24",
        ),
    ],
)
def test_what_is_missing_or_ends_soon_is_made(changes: dict[str, Found | None], renewal: Renewal, reason: str) -> None:
    """Authorities only where they must be: with new ones, running notebooks know nobody."""
    decision = decide(found(**changes), "10.77.0.1", NOW)
    assert (decision.renewal, decision.reason) == (renewal, reason)


def test_an_address_is_known_in_any_spelling() -> None:
    """Certificates hold the shortest one."""
    same = Found(ends=LATER, names=frozenset({"IP:fd00::1"}))
    decision = decide(found(**{name.replace("-", "_"): same for name in CERTIFICATES}), "FD00:0::1", NOW)
    assert decision.renewal is Renewal.NOTHING


@pytest.mark.parametrize("address", ["10.77.0.2", "fd00::1"])
def test_another_address_needs_other_certificates(address: str) -> None:
    """The authorities stay."""
    decision = decide(found(), address, NOW)
    assert (decision.renewal, decision.reason) == (Renewal.CERTIFICATES, f"the head node's address is {address} now")
