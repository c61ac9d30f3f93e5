"""Permissions at the broker: every route for every kind of caller, as a table that people read and tests check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.broker.in_process import ACCESS

#: Callers that every route with a token refuses, with the status of the answer. The hub answers
#: alike for tokens that it never knew, that have expired or were revoked, and of servers that were stopped.
STRANGERS = {
    "nobody": 401,
    "unknown": 401,
    "expired": 401,
    "stopped": 401,
    "narrow": 403,
    "foreign": 403,
    "metrics": 403,
}
#: The one route that the token of the service `gpuhub-metrics` may use.
METRICS_ROUTE = "GET /metrics"

#: The columns of the table. Ada owns everything that the routes name, but for the reservation, which is root's.
CALLERS = ("reader", "ben", "ada", "ada-nb", "root-nb", "spawner", "culler", "root", "head")

#: What the callers are, for the documentation.
MEANINGS = {
    "reader": "a service that may call the broker and has no other scope",
    "ben": "another user",
    "ada": "the owner, with a browser's session or a token from the hub's token page",
    "ada-nb": "the owner's notebook, with its own token",
    "root-nb": "an administrator's notebook, with its own token: the same rights as any other user's notebook",
    "spawner": "the hub's spawner",
    "culler": "the hub's service that stops idle notebooks, where `[idle]` is set",
    "root": "an administrator, with a token that has the scope `custom:gpuhub:admin`",
    "head": "root on the head node, with the broker's own token",
}

#: Y: allowed, and the response has the status of the second column. N: 403. H: 404, as if the object did not exist.
#: W: 422, a service must name the owner.
#: The service `notes` admits ada alone, and does not listen.
#: {lease} is active, {waiting} waits, {job} has its GPU, {shared} is a job and {notebook} a notebook that she shares with ben, {reservation} is ahead, {destination} gets
#: notifications, {limited} is ada, who has limits of her own.
TABLE = """
                                     |     | reader ben ada ada-nb root-nb spawner culler root head
GET /cluster                         | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
GET /cluster?group=lab               | 200 |   N      N   N   N      N       Y       N      N    N
GET /stream/cluster?for_s=0          | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
GET /stream/cluster?for_s=0&group=x  | 200 |   N      N   N   N      N       Y       N      N    N
GET /stream/own?for_s=0              | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
GET /nodes                           | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
GET /reservations                    | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
GET /recipes                         | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
GET /metrics                         | 200 |   N      N   N   N      N       N       N      Y    Y
GET /events                          | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
GET /notifications                   | 200 |   N      Y   Y   Y      Y       N       N      Y    N
GET /destinations                    | 200 |   N      Y   Y   Y      Y       N       N      Y    N
POST /destinations                   | 201 |   N      Y   Y   Y      Y       N       N      Y    N
PUT /destinations/{destination}      | 200 |   N      H   Y   Y      H       N       N      H    N
DELETE /destinations/{destination}   | 204 |   N      H   Y   Y      H       N       N      H    N
POST /destinations/{destination}/test | 202 |   N      H   Y   Y      H       N       N      H    N
GET /usage                           | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
GET /usage?owner=ada                 | 200 |   N      N   Y   Y      N       Y       N      Y    Y
GET /costs                           | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
GET /costs?owner=ada                 | 200 |   N      N   Y   Y      N       Y       N      Y    Y
GET /costs/report                    | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
GET /costs/report?owner=ada          | 200 |   N      N   Y   Y      N       Y       N      Y    Y
GET /leases                          | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
GET /jobs                            | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
GET /jobs?ended=true                 | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
POST /leases                         | 201 |   W      Y   Y   Y      Y       W       W      Y    W
POST /leases as ada                  | 201 |   N      N   Y   Y      N       Y       N      N    N
POST /leases with groups             | 403 |   W      Y   Y   Y      Y       W       W      Y    W
GET /leases/{lease}                  | 200 |   H      H   Y   Y      H       Y       H      Y    Y
GET /leases/{waiting}/why            | 200 |   H      H   Y   Y      H       Y       H      Y    Y
POST /leases/{lease}/activate        | 200 |   H      H   Y   Y      H       Y       H      Y    Y
POST /leases/{lease}/stage           | 409 |   H      H   N   N      H       Y       H      N    N
POST /leases/{lease}/extend          | 200 |   H      H   Y   Y      H       Y       H      Y    Y
POST /leases/{lease}/activity        | 200 |   H      H   Y   Y      H       Y       H      Y    Y
POST /leases/{lease}/keep            | 409 |   H      H   Y   Y      H       Y       H      Y    Y
POST /leases/{lease}/suspend         | 409 |   H      H   Y   Y      H       Y       H      Y    Y
POST /leases/{lease}/resume          | 200 |   H      H   Y   Y      H       Y       H      Y    Y
POST /leases/{lease}/force           | 409 |   N      N   N   N      N       N       N      Y    Y
DELETE /leases/{waiting}             | 200 |   H      H   Y   Y      H       Y       H      Y    Y
POST /reclaims                       | 200 |   N      N   N   N      N       N       Y      N    N
POST /jobs                           | 201 |   N      Y   Y   Y      Y       N       N      Y    N
POST /jobs/arrays                    | 201 |   N      Y   Y   Y      Y       N       N      Y    N
POST /jobs/groups                    | 201 |   N      Y   Y   Y      Y       N       N      Y    N
POST /jobs/check                     | 204 |   N      Y   Y   Y      Y       N       N      Y    N
GET /jobs/{job}                      | 200 |   H      H   Y   Y      H       Y       H      Y    Y
POST /jobs/{job}/renew               | 204 |   H      H   Y   Y      H       Y       H      Y    Y
DELETE /jobs/{job}                   | 200 |   H      H   Y   Y      H       Y       H      Y    Y
PUT /files?path=work                 | 200 |   N      Y   Y   Y      Y       N       N      Y    N
GET /files?path=.                    | 200 |   N      Y   Y   Y      Y       N       N      Y    N
GET /jobs/{job}/logs                 | 200 |   H      H   Y   Y      H       N       H      N    N
GET /jobs/{job}/state                | 404 |   H      H   Y   Y      H       N       H      N    N
GET /shares                          | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
PUT /jobs/{job}/shares/ben           | 200 |   H      H   Y   Y      H       N       H      N    N
DELETE /jobs/{job}/shares/ben        | 200 |   H      H   Y   Y      H       N       H      N    N
DELETE /jobs/{job}/shares            | 200 |   H      H   Y   Y      H       N       H      N    N
DELETE /shares?user=eve              | 200 |   N      N   N   N      N       Y       N      Y    Y
GET /shared/{job}/logs               | 200 |   H      H   Y   Y      H       N       H      N    N
GET /shared/{shared}/logs            | 200 |   H      Y   Y   Y      H       N       H      N    N
PUT /notebooks/shares/eve            | 200 |   N      H   Y   Y      H       N       N      H    N
DELETE /notebooks/{notebook}/shares/ben | 200 |   H      H   Y   Y      H       N       H      N    N
DELETE /notebooks/{notebook}/shares  | 200 |   H      H   Y   Y      H       N       H      N    N
GET /shared/notebooks/{notebook}     | 200 |   H      Y   Y   Y      H       N       H      N    N
GET /shared/notebooks/{notebook}/html | 200 |   H      Y   Y   Y      H       N       H      N    N
GET /stream/shared/{job}?for_s=0     | 200 |   H      H   Y   Y      H       N       H      N    N
GET /stream/shared/{shared}?for_s=0  | 200 |   H      Y   Y   Y      H       N       H      N    N
WEBSOCKET /jobs/{job}/shell?worker=9 | 409 |   H      H   Y   Y      H       N       H      N    N
WEBSOCKET /jobs/{job}/ssh?worker=9   | 409 |   H      H   Y   Y      H       N       H      N    N
POST /jobs/{job}/visits              | 409 |   H      H   Y   Y      H       N       H      N    N
GET /ports/{job}/                    | 409 |   H      H   Y   Y      H       N       H      N    N
WEBSOCKET /ports/{job}/              | 409 |   H      H   Y   Y      H       N       H      N    N
GET /services                        | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
POST /services/notes/visits          | 201 |   H      H   Y   Y      H       H       H      H    H
GET /services/notes/                 | 503 |   H      H   Y   Y      H       H       H      H    H
WEBSOCKET /services/notes/           | 503 |   H      H   Y   Y      H       H       H      H    H
POST /services/notes/restart         | 200 |   N      N   N   N      N       N       N      Y    Y
GET /services/notes/logs             | 200 |   N      N   N   N      N       N       N      Y    Y
GET /bench                           | 200 |   Y      Y   Y   Y      Y       Y       Y      Y    Y
PUT /bench                           | 200 |   N      N   N   N      N       N       N      Y    Y
POST /nodes/rig3/cordon              | 200 |   N      N   N   N      N       N       N      Y    Y
POST /nodes/rig3/drain               | 200 |   N      N   N   N      N       N       N      Y    Y
POST /nodes/rig3/undrain             | 200 |   N      N   N   N      N       N       N      Y    Y
POST /nodes/rig3/gpus/0/accept       | 409 |   N      N   N   N      N       N       N      Y    Y
POST /nodes/rig3/power               | 422 |   N      N   N   N      N       N       N      Y    Y
GET /limits                          | 200 |   N      N   N   N      N       N       N      Y    Y
PUT /limits/ada                      | 200 |   N      N   N   N      N       N       N      Y    Y
DELETE /limits/{limited}             | 204 |   N      N   N   N      N       N       N      Y    Y
POST /reservations                   | 201 |   N      N   N   N      N       N       N      Y    Y
DELETE /reservations/{reservation}   | 204 |   N      N   N   N      N       N       N      Y    Y
"""
#: Routes that are open to all and contain nothing about users.
PUBLIC = {"GET /health": 200, "GET /": 307, "GET /openapi.json": 200, "GET /storage.js": 200}

_STATUSES = {"N": 403, "H": 404, "W": 422}
_WORDS = {"Y": "yes", "N": "no", "H": "hidden", "W": "owner required"}


@dataclass(frozen=True)
class Row:
    """One route."""

    route: str
    success: int
    cells: tuple[str, ...]

    @property
    def statuses(self) -> Mapping[str, int]:
        """Return the HTTP status by caller, including unauthenticated ones."""
        found = {one: _STATUSES.get(cell, self.success) for one, cell in zip(CALLERS, self.cells, strict=True)}
        metrics = {"metrics": self.success} if self.route == METRICS_ROUTE else {}
        return {**STRANGERS, **metrics, **found}


def _parse() -> dict[str, Row]:
    first, *lines = TABLE.strip("\n").splitlines()
    assert tuple(first.split("|")[2].split()) == CALLERS
    rows = [[part.strip() for part in line.split("|")] for line in lines]
    return {route: Row(route, int(success), tuple(cells.split())) for route, success, cells in rows}


MATRIX = _parse()


def _notebook_of(name: str, *, admin: bool) -> dict[str, Any]:
    """Return the hub's model of a notebook's token; tests/integration/hub/test_rights.py compares it with a real one."""
    own = ["groups", "name", "activity"]
    scopes = [f"access:servers!server={name}/", f"users:activity!user={name}", ACCESS]
    scopes += [f"read:users:{what}!user={name}" for what in own]
    return {"kind": "user", "name": name, "admin": admin, "scopes": scopes}


#: The hub's models of the callers' tokens, in addition to those of `StubHub`.
MODELS: dict[str, dict[str, Any] | None] = {
    "expired": None,
    "stopped": None,
    "foreign": {"kind": "service", "name": "foreign", "scopes": ["list:users", "custom:other:any-owner"]},
    "metrics": {"kind": "service", "name": "gpuhub-metrics", "scopes": ["read:metrics"]},
    "reader": {"kind": "service", "name": "reader", "scopes": [ACCESS]},
    "culler": {"kind": "service", "name": "gpuhub-idle-culler", "scopes": [ACCESS, "custom:gpuhub:reclaim"]},
    "ben": {"kind": "user", "name": "ben", "admin": False, "groups": ["lab"], "scopes": [ACCESS]},
    "ada-nb": _notebook_of("ada", admin=False),
    "root-nb": _notebook_of("root", admin=True),
    "head": None,
}


def render() -> str:
    """Return the table for the documentation."""
    head = ["", *CALLERS]
    lines = [head, ["---"] * len(head)]
    lines += [[f"`{row.route}`", *(_WORDS[cell] for cell in _shown_cells(row))] for row in MATRIX.values()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown_cells(row: Row) -> tuple[str, ...]:
    """No caller to whom a route is refused may succeed with it."""
    return tuple("N" if cell == "Y" and row.success == 403 else cell for cell in row.cells)
