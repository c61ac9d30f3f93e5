"""The broker answers every request as its OpenAPI document describes: schemathesis against a real broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.core.parameters import ParameterLocation
from schemathesis.generation import GenerationMode

from gpuhub.broker.api.dependencies import PREFIX
from gpuhub.broker.api.routes import (
    cluster_routes,
    file_routes,
    job_routes,
    lease_routes,
    node_routes,
    reservation_routes,
)
from tests.support.broker.in_process import Setting, served_broker

#: The number of valid requests for each operation, and of invalid ones.
EXAMPLES = 16
#: Path parameters, and the existing objects that replace their values.
PATHS = {"lease_id": "lease", "job_id": "job", "reservation_id": "reservation", "index": "gpu"}


@schemathesis.serializer(file_routes.TAR)
def send_unchanged(_context: Any, value: Any) -> bytes:
    """Send generated tar content unchanged."""
    return bytes(value.data) if hasattr(value, "data") else str(value).encode()


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A broker in a thread, and ids of existing objects for the operations."""
    setting = Setting(Path(tmp_path_factory.mktemp("fuzz")))
    with served_broker(setting) as running:

        def make(path: str, token: str, **body: Any) -> str:
            answer = running.send("POST", f"/api/v1{path}", token, json=body)
            assert answer.status_code == 201, answer.text
            return str(answer.json()["id"])

        window = {"starts_at": "2126-01-01T08:00:00Z", "ends_at": "2126-01-01T09:00:00Z"}
        yield {
            "url": running.url,
            "lease": make("/leases", "ada", profile="rtx5090", key="first"),
            "job": make("/jobs", "root", run_id="run-000001", detached=True),
            "reservation": make("/reservations", "root", name="kept", nodes=["rig3"], users=["ada"], **window),
            "node": "rig2",
            "gpu": "0",
        }


@pytest.fixture(scope="module")
def described(known: dict[str, str]) -> Any:
    """The OpenAPI document of the broker."""
    return schemathesis.openapi.from_url(f"{known['url']}/openapi.json")


def has_parts(route: Any) -> bool:
    """Return whether any part of a request can be invalid."""
    return bool(route.dependant.path_params or route.dependant.query_params or route.dependant.body_params)


MODULES = (lease_routes, job_routes, cluster_routes, node_routes, reservation_routes, file_routes)
CASES = [
    (method, route.path, mode)
    for module in MODULES
    for route in module.api.routes
    for method in sorted(route.methods)
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or has_parts(route)
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES, ids=[f"{m} {path} {mode.value}" for m, path, mode in CASES])
def test_every_response_matches_the_openapi_schema(
    described: Any, known: dict[str, str], method: str, path: str, mode: GenerationMode
) -> None:
    """There is no 5xx, all responses are as documented, invalid requests are refused, and valid ones are not refused as
    invalid.
    """
    operation = described[f"{PREFIX}{path}"][method]
    checked = 0

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        nonlocal checked
        if mode is GenerationMode.POSITIVE:
            meet_what_there_is(case, known)
        answer = case.call_and_validate(
            headers={"Authorization": "token root"},
            excluded_checks=[schemathesis.checks.CHECKS.get_one(name) for name in excluded(case)],
        )
        if mode is GenerationMode.POSITIVE and answer.status_code == 422:
            assert answer.json()["code"] == "invalid-request", answer.text
        checked += 1

    check()
    assert checked


def excluded(case: Any) -> list[str]:
    """Return the checks that do not apply to a request."""
    # A valid request may still ask for more GPUs than exist: its problem code shows that.
    names = ["positive_data_acceptance"]
    header = case.meta.components.get(ParameterLocation.HEADER)
    if header is not None and header.mode is GenerationMode.NEGATIVE:
        # Only its token could be invalid, and it is sent with a valid one.
        names.append("negative_data_rejection")
    return names


def meet_what_there_is(case: Any, known: dict[str, str]) -> None:
    """Replace some invented ids by existing ones, because most errors are only possible with those."""
    for name, value in case.path_parameters.items():
        if len(str(value)) % 3:
            case.path_parameters[name] = known[PATHS.get(name, "node")]
    if "wait_s" in (case.query or {}):
        case.query["wait_s"] = 0.01
    if "follow" in (case.query or {}):
        case.query["follow"] = "false"  # the job never ends
