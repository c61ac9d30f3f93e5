"""The doctor's findings about services that stay."""

from __future__ import annotations

import pytest

from gpuhub.broker_api.schemas.services import ServiceState, ServiceView
from gpuhub.common.paths import Paths
from gpuhub.ops.doctor.findings import Severity
from gpuhub.ops.doctor.service_checks import MANY_RESTARTS, check_services, read_services


@pytest.mark.parametrize(
    ("state", "restarts", "severity", "text"),
    [
        (ServiceState.RUNNING, 0, Severity.OK, "notes on rig1 runs"),
        (ServiceState.RUNNING, MANY_RESTARTS, Severity.WARNING, "was started again 5 times"),
        (ServiceState.STARTING, 0, Severity.WARNING, "is being started: why"),
        (ServiceState.FAILED, 3, Severity.FAILED, "does not run: why"),
        (ServiceState.UNREACHABLE, 0, Severity.FAILED, "is out of reach: why"),
    ],
)
def test_a_service_that_is_down_is_a_failure(state: ServiceState, restarts: int, severity: Severity, text: str) -> None:
    """The finding names service, node and reason, and the command that shows more."""
    view = ServiceView(
        name="notes", path="/services/notes/", node="rig1", state=state, message="why", restarts=restarts
    )
    (finding,) = check_services([view])
    assert (finding.severity, text in finding.value) == (severity, True)
    assert (state is ServiceState.FAILED) <= ("gpuhub service logs notes" in finding.advice)


async def test_without_a_broker_nothing_is_known() -> None:
    """That the broker does not run is a finding of its own."""
    assert await read_services(Paths("ghnone")) == []
