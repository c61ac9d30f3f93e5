"""Permissions: the table in `rights` against the real application, and the content of refusals."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from gpuhub.broker import audit
from gpuhub.broker.api import dependencies
from gpuhub.broker.api.dependencies import PREFIX
from gpuhub.broker.api.routes import port_routes, service_routes
from gpuhub.broker.db.outbox import DestinationRow
from gpuhub.broker.operations.notebook_shares import build_notebook_id
from gpuhub.common import names
from gpuhub.config.containers.services import ServiceSettings
from gpuhub.config.settings import ProfileSettings
from gpuhub.domain.models import OutputShareRow
from gpuhub.domain.owner_limits import OwnLimits
from tests.support.broker.bench import build_bench
from tests.support.broker.calls import ask, open_socket, post, wait_for_state
from tests.support.broker.in_process import Running, Setting, asgi_broker
from tests.support.broker.rights import CALLERS, MATRIX, MEANINGS, METRICS_ROUTE, MODELS, PUBLIC, STRANGERS, render
from tests.support.docker.simulated_nodes import build_cluster

DOCS = Path(__file__).parents[5] / "docs" / "rights.md"
LEASE = {"profile": "cpu"}
CONTAINER = "c" * 12
JOB = {"server": "other"}
SERVICE = "notes"
NOTEBOOK = "train.ipynb"
EMPTY_NOTEBOOK = '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'
WINDOW = {"starts_at": "2126-01-01T08:00:00Z", "ends_at": "2126-01-01T09:00:00Z"}
#: Request bodies by route.
BODIES: dict[str, Any] = {
    "POST /leases": LEASE,
    "POST /leases as ada": {**LEASE, "owner": "ada"},
    "POST /leases with groups": {**LEASE, "groups": ["lab"]},
    "POST /leases/{lease}/activate": {"container_id": CONTAINER},
    "POST /leases/{lease}/extend": {"time_limit_s": 3600},
    "POST /leases/{lease}/activity": {"is_busy": False, "inactive_s": 60.0},
    "POST /reclaims": {"owner": "ada", "server": ""},
    "POST /jobs": JOB,
    "POST /jobs/arrays": {"job": JOB, "count": 2},
    "POST /jobs/groups": {"jobs": [{**JOB, "detached": True}] * 2},
    "POST /jobs/check": {"job": JOB},
    "PUT /jobs/{job}/shares/ben": {"for_s": 3600},
    "PUT /notebooks/shares/eve": {"path": NOTEBOOK, "for_s": 3600},
    "PUT /files?path=work": bytes(10240),  # an empty tar
    "POST /nodes/rig3/cordon": {"reason": "new fans"},
    "POST /nodes/rig3/power": {"on": True},
    "POST /nodes/rig3/drain": {"grace_s": 60},
    "POST /destinations": {"url": "ntfys://ntfy.sh/ada-0a1b2c", "kinds": ["granted"]},
    "PUT /destinations/{destination}": {"kinds": ["idle"]},
    "PUT /limits/ada": {"max_gpus": 4},
    "PUT /bench": build_bench(),
    "POST /reservations": {"name": "course", "users": ["ben"], **WINDOW},
}


@pytest.fixture
def guarded(tmp_path: Path) -> Setting:
    """A broker where ada's GPU has a time limit, and whose hub knows all callers."""
    profiles = [
        ProfileSettings(name="rtx5090", title="RTX 5090", gpu_model="RTX 5090", time_limit="8h"),
        ProfileSettings(name="cpu", title="No GPU", gpu_count=0),
    ]
    service = ServiceSettings(name=SERVICE, image="gpuhub/base:latest", port=9, users=("ada",))
    cluster = build_cluster(profiles=profiles).model_copy(update={"services": (service,)})
    setting = Setting(tmp_path, cluster=cluster)
    setting.own_token = "head"
    setting.hub.models |= MODELS
    setting.bench_file.write_text(json.dumps(build_bench()), encoding="utf-8")
    (setting.home("ada") / NOTEBOOK).write_text(EMPTY_NOTEBOOK, encoding="utf-8")
    return setting


_numbers = itertools.count(1)


async def build_world(running: Running) -> dict[str, str]:
    """Create the objects that the routes' parameters name, and replace those that an earlier call ended."""
    lease = await ask(running, "ada", profile="rtx5090")
    if lease["state"] == "granted":
        run_container(running, lease)
        lease = await post(running, "ada", f"/leases/{lease['id']}/activate", {"container_id": CONTAINER})
    waiting = await ask(running, "ada", profile="rtx5090", server="second")
    job = await post(running, "ada", "/jobs", {"run_id": f"run-{next(_numbers):06}", "detached": True}, 201)
    shared = await post(running, "ada", "/jobs", {"run_id": f"run-{next(_numbers):06}", "detached": True}, 201)
    await running.core.shares.put(
        OutputShareRow(
            subject=shared["id"], viewer="ben", owner="ada", run_id=shared["run_id"], name="", created_at=1.0, expires_at=1e12,
        )
    )  # fmt: skip
    day = f"{2100 + next(_numbers)}-01-01T"
    window = {"starts_at": f"{day}08:00:00Z", "ends_at": f"{day}09:00:00Z"}
    reserved = {"name": "kept", "nodes": ["rig2"], "users": ["ada"], **window}
    reservation = await post(running, "root", "/reservations", reserved, 201)
    await running.core.scheduler_sync.set_own_limits("ada", OwnLimits(owner="ada", max_jobs=1000, by="root", at=1.0))
    made = {name: made["id"] for name, made in zip(NAMES, (lease, waiting, job, reservation), strict=True)}
    # Its URL cannot be decrypted, so that nothing is sent.
    destination = DestinationRow(
        id="d0a1", owner="ada", name="phone", label="ntfy", url="-", kinds=("granted",), created_at=1.0
    )
    if running.store.outbox.get_destination(destination.id) is None:
        assert running.store.outbox.add_destination(destination)
    shown = build_notebook_id("ada", NOTEBOOK)
    await running.core.shares.put(
        OutputShareRow(
            subject=shown, viewer="ben", owner="ada", run_id="", name=NOTEBOOK, created_at=1.0, expires_at=1e10,
            path=NOTEBOOK,
        )
    )  # fmt: skip
    return {**made, "limited": "ada", "shared": shared["id"], "destination": destination.id, "notebook": shown}


def run_container(running: Running, lease: dict[str, Any]) -> None:
    """Run the lease's container, because the next probe would end the lease without it."""
    node = running.setting.nodes[lease["nodes"][0]]
    labels = {names.LABEL_KIND: "notebook", names.LABEL_LEASE: lease["id"], names.LABEL_EPOCH: str(lease["epoch"])}
    made = node.containers.pop(node.run_container(labels, name=lease["id"]))
    node.containers[CONTAINER] = {**made, "Id": CONTAINER}


NAMES = ("lease", "waiting", "job", "reservation")


def make_body(route: str, body: Any) -> Any:
    """Return the body of a request; keys, run ids and reserved times are new each time."""
    number = next(_numbers)
    if route.startswith("POST /leases") and "profile" in (body or {}):
        return {**body, "key": f"m{number}", "server": f"s{number}"}
    if route == "POST /jobs":
        return {**body, "run_id": f"run-m{number:06}"}
    if route == "POST /jobs/groups":
        jobs = [{**job, "run_id": f"run-m{number:06}-{at}"} for at, job in enumerate(body["jobs"])]
        return {"run_id": f"run-m{number:06}", "jobs": jobs}
    if route in {"POST /jobs/arrays", "POST /jobs/check"}:
        return {**body, "job": {**body["job"], "run_id": f"run-m{number:06}"}}
    if route == "POST /reservations":
        return {**body, "gpus": [f"GPU-rig{1 + number % 3}-0"], "starts_at": f"{2300 + number}-01-01T08:00:00Z",
                "ends_at": f"{2300 + number}-01-01T09:00:00Z"}  # fmt: skip
    return body


async def call(running: Running, route: str, caller: str, known: dict[str, str]) -> tuple[int, Any, str]:
    """Return status, body and content type of the response to a caller's request; `known` has the ids in the route."""
    method, path = route.split()[:2]
    token = None if caller == "nobody" else caller
    path = path.format(**known)
    own = service_routes.build_path(SERVICE)
    path = path if path == own or path.startswith(port_routes.PORTS) else dependencies.API + path
    if method == "WEBSOCKET":
        return await open_socket(running, path, token), None, ""
    async with running.client(token) as client:
        # A service has an address beside that of the broker.
        url = f"http://broker{path}" if path == own else path
        answer = await client.request(method, url, **make_content(route))
    if answer.status_code >= 400:
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert answer.json()["detail"]
        assert answer.json()["code"]
        assert (answer.status_code == 401) == ("WWW-Authenticate" in answer.headers)
    return answer.status_code, answer, answer.text


def make_content(route: str) -> dict[str, Any]:
    """Return the body as arguments of httpx."""
    body = BODIES.get(route)
    return {"content": body} if isinstance(body, bytes) else {"json": make_body(route, body)}


@pytest.mark.parametrize("route", MATRIX)
async def test_status_of_every_route_for_every_caller(guarded: Setting, route: str) -> None:
    """The status of each cell matches the table, and refused callers get a problem document with a code."""
    found: dict[str, int] = {}
    known: dict[str, str] = {}
    async with asgi_broker(guarded) as running:
        for caller in (*STRANGERS, *CALLERS):
            if "{" in route and not known:
                known = await build_world(running)
            found[caller], *_ = await call(running, route, caller, known)
            # What is refused changes nothing, as another test shows.
            known = known if found[caller] >= 400 else {}
    assert found == MATRIX[route].statuses


async def test_public_routes_expose_no_user_data(guarded: Setting) -> None:
    """They respond without a token and contain no user names."""
    async with asgi_broker(guarded) as running, running.client(None) as client:
        await build_world(running)
        answers = {route: await client.request(*route.split()) for route in PUBLIC}
    assert {route: answer.status_code for route, answer in answers.items()} == PUBLIC
    assert [route for route, answer in answers.items() if '"ada"' in answer.text] == []


async def test_refused_requests_change_nothing(guarded: Setting) -> None:
    """After every refused request, leases, jobs, nodes and reservations are unchanged."""
    watched = ("/leases", "/jobs", "/nodes", "/reservations")

    async def look(running: Running) -> list[Any]:
        async with running.client("root") as client:
            answers = [(await client.get(f"{dependencies.API}{path}")).json() for path in watched]
        return [[_without_readings(one) for one in answer] for answer in answers]

    async with asgi_broker(guarded) as running:
        known = await build_world(running)
        for job in ("job", "shared"):
            await wait_for_state(running, f"/jobs/{known[job]}", "running")
        before = await look(running)
        refused = 0
        for route, row in MATRIX.items():
            method, path = route.split()[:2]
            for caller, status in row.statuses.items():
                if method in {"GET", "WEBSOCKET"} or status < 400:
                    continue
                refused += 1
                async with running.client(None if caller == "nobody" else caller) as client:
                    await client.request(method, f"{dependencies.API}{path.format(**known)}", **make_content(route))
        assert await look(running) == before
    assert refused > 100


def _without_readings(found: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in found.items() if key not in {"version", "waiting_for", "expected_start"}}


def list_routes(router: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Return method and path of all routes of an application, including WebSockets."""
    found = []
    for route in router.routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            found += list_routes(inner)
        else:
            methods = getattr(route, "methods", None) or {"WEBSOCKET"}
            found += [(method, route.path.removeprefix(prefix)) for method in methods - {"HEAD"}]
    return found


async def test_every_route_of_the_application_is_in_the_table(guarded: Setting) -> None:
    """A new route without a row fails this test, wherever it was added."""
    async with asgi_broker(guarded) as running:
        app: FastAPI = running.app
        # Visits have a key in place of a token, and ports the same rights for each method: `test_ports` tries both.
        there = {
            f"{method} {_name(path)}"
            for method, path in list_routes(app, PREFIX)
            if not path.startswith((port_routes.VISITS, service_routes.VISITS))
            and path != service_routes.build_path(SERVICE).rstrip("/")
            and not (
                path.startswith((port_routes.PORTS, service_routes.build_path(SERVICE)))
                and method not in {"GET", "WEBSOCKET"}
            )
        }
    rows = {_name(row.split(" as ")[0].split(" with ")[0].split("?")[0]) for row in MATRIX}
    assert there == rows | set(PUBLIC)


def test_administrator_routes_are_audited() -> None:
    """The audit log records each such route, whichever user it affects."""
    only_root = {route for route, row in MATRIX.items() if row.cells == ("N",) * 7 + ("Y",) * 2} - {METRICS_ROUTE}
    assert {_name(route) for route in only_root} == {_name(action) for action in audit.PRIVILEGED}


def test_documentation_has_the_table_of_rights() -> None:
    """docs/rights.md has the same table, and explains each kind of caller."""
    text = DOCS.read_text(encoding="utf-8")
    assert render() in text, f"put this into {DOCS}:\n{render()}"
    assert [one for one, meaning in MEANINGS.items() if f"| {one} | {meaning} |" not in text] == []


def _name(route: str) -> str:
    """Return the route with the same parameter names for the same things."""
    for given, name in (
        ("{lease_id}", "{lease}"),
        ("{waiting}", "{lease}"),
        ("{job_id}", "{job}"),
        ("{path:path}", ""),
        ("{shared}", "{job}"),
        ("{notebook_id}", "{notebook}"),
        ("/notebooks/shares/eve", "/notebooks/shares/ben"),
        ("{viewer}", "ben"),
        ("{reservation_id}", "{reservation}"),
        ("{destination_id}", "{destination}"),
        ("/nodes/{name}/", "/nodes/rig3/"),
        ("/services/{name}/", f"/services/{SERVICE}/"),
        ("/gpus/{index}/", "/gpus/0/"),
        ("/limits/{limited}", "/limits/ada"),
        ("/limits/{owner}", "/limits/ada"),
        (dependencies.API, ""),
    ):
        route = route.replace(given, name)
    return route
