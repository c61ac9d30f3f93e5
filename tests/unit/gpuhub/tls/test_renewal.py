"""The conditions under which internal certificates are renewed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from gpuhub.tls.internal import AUTHORITIES, CERTIFICATES
from gpuhub.tls.renewal import RENEW_BEFORE, CertificateInfo, RenewalScope, decide_renewal

NOW = datetime(2026, 11, 21, tzinfo=UTC)
LATER = NOW + timedelta(days=5 * 365)


def found(**changes: CertificateInfo | None) -> dict[str, CertificateInfo | None]:
    """Return valid certificates of a head node at 10.77.0.1, except for `changes` (with _ for -)."""
    good: dict[str, CertificateInfo | None] = dict.fromkeys(AUTHORITIES, CertificateInfo(ends=LATER))
    good |= dict.fromkeys(CERTIFICATES, CertificateInfo(ends=LATER, names=frozenset({"IP:10.77.0.1", "IP:127.0.0.1"})))
    return good | {name.replace("_", "-"): one for name, one in changes.items()}


def ending(left: timedelta) -> CertificateInfo:
    return CertificateInfo(ends=NOW + left, names=frozenset({"IP:10.77.0.1"}))


@pytest.mark.parametrize(
    ("changes", "renewal", "reason"),
    [
        ({}, RenewalScope.NOTHING, ""),
        (
            dict.fromkeys((name.replace("-", "_") for name in AUTHORITIES), None),
            RenewalScope.FIRST,
            "there are none yet",
        ),
        ({"hub_ca": None}, RenewalScope.EVERYTHING, "hub-ca is missing"),
        ({"broker": None}, RenewalScope.CERTIFICATES, "broker is missing"),
        ({"broker": ending(RENEW_BEFORE)}, RenewalScope.NOTHING, ""),
        ({"broker": ending(RENEW_BEFORE - timedelta(days=1))}, RenewalScope.CERTIFICATES, "broker ends on 2026-12-20"),
        ({"services_ca": ending(timedelta(days=-1))}, RenewalScope.EVERYTHING, "services-ca ends on 2026-11-20"),
        (
            {"broker": None, "notebooks_ca": ending(timedelta(days=3))},
            RenewalScope.EVERYTHING,
            "notebooks-ca ends on 2026-11-24",
        ),
    ],
)
def test_what_is_missing_or_ends_soon_is_made(
    changes: dict[str, CertificateInfo | None], renewal: RenewalScope, reason: str
) -> None:
    """New authorities are created only if necessary, because running notebooks do not trust them."""
    decision = decide_renewal(found(**changes), "10.77.0.1", NOW)
    assert (decision.scope, decision.reason) == (renewal, reason)


def test_an_address_is_known_in_any_spelling() -> None:
    """Certificates hold the shortest one."""
    same = CertificateInfo(ends=LATER, names=frozenset({"IP:fd00::1"}))
    decision = decide_renewal(found(**{name.replace("-", "_"): same for name in CERTIFICATES}), "FD00:0::1", NOW)
    assert decision.scope is RenewalScope.NOTHING


@pytest.mark.parametrize("address", ["10.77.0.2", "fd00::1"])
def test_another_address_needs_other_certificates(address: str) -> None:
    """The authorities stay."""
    decision = decide_renewal(found(), address, NOW)
    assert (decision.scope, decision.reason) == (RenewalScope.CERTIFICATES, f"the head node's address is {address} now")
