"""Requests from inside a notebook, with its own token: at the broker in others' names, at the hub past its rights."""

from __future__ import annotations

import json

import pytest

from gpuhub.broker.operations.notebook_shares import build_notebook_id
from tests.hostile.scene import SERVER, Scene
from tests.support.broker.bench import build_bench
from tests.support.broker.rights import MATRIX


def test_broker_hides_other_users_objects(scene: Scene) -> None:
    """Every route of the table of rights, about ada's lease and job."""
    lease = next(row for row in scene.ada.ask(scene.ada.broker, "GET", "/leases")[1] if row["subject"] == SERVER)
    names = {
        "lease": lease["id"],
        "waiting": lease["id"],
        "job": scene.job["id"],
        "reservation": "r1",
        "destination": "d0a1",
        "limited": "ada",
        "notebook": build_notebook_id("ada", "train.ipynb"),
    }
    # A body that cannot be read would be refused before anybody's rights are looked at.
    bodies = {
        "/bench": build_bench(),
        "/destinations/{destination}": {"kinds": []},
        "/limits/ada": {"max_gpus": 4},
        "/notebooks/shares/eve": {"path": "train.ipynb"},
    }
    calls, expected = [], []
    for route, row in MATRIX.items():
        method, path, *_ = route.split()
        if row.statuses["ben"] not in {403, 404} or method == "WEBSOCKET" or " as " in route or " with " in route:
            continue
        body = bodies.get(path, {})
        for name, value in names.items():
            path = path.replace(f"{{{name}}}", value)
        calls.append([method, path, body if method in {"POST", "PUT"} else None])
        expected.append(row.statuses["ben"])
    assert len(calls) > 12
    answers = scene.probe("api_calls", base="broker", calls=calls)
    wrong = [
        (call, status, text)
        for call, want, (status, text) in zip(calls, expected, answers, strict=True)
        # A body that a route cannot read is refused as well: that comes first where the route is open to nobody.
        if status not in {want, 422 if call[0] == "POST" else want}
    ]
    assert wrong == []


def test_broker_believes_no_name_in_a_request(scene: Scene) -> None:
    """Headers and fields that name somebody else give no rights."""
    forged = {
        "X-Forwarded-User": "ada",
        "X-JupyterHub-User": "ada",
        "X-Forwarded-For": "127.0.0.1",
        "Host": "localhost",
    }
    body = {"profile": "cpu", "server": "x", "key": "k", "owner": "ada"}
    calls = [["GET", "/leases", None], ["POST", "/leases", body], ["GET", "/usage?owner=ada", None]]
    listed, made, usage = scene.probe("api_calls", base="broker", calls=calls, headers=forged)
    assert listed[0] == 200
    assert {row["owner"] for row in json.loads(listed[1])} == {"ben"}
    assert made[0] == 403
    assert usage[0] == 403


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("[" * 200_000, {400, 413, 422}),
        ('{"profile": ' + "9" * 5000 + "}", {400, 422}),
        ('{"profile": "cpu", "server": "x", "key": "k", "time_limit_s": 1e400}', {400, 422}),
        ('{"profile": "cpu", "server": "x", "key": "k", "time_limit_s": NaN}', {400, 422}),
        ('{"profile": "cpu", "server": "x\\u0000", "key": "k"}', {400, 422}),
        ('{"profile": "' + "a" * 2**20 + '"}', {413}),
        ("\x00\x01", {400, 422}),
    ],
    ids=["deep", "digits", "infinite", "nan", "nul", "large", "binary"],
)
def test_odd_bodies_are_refused(scene: Scene, body: str, expected: set[int]) -> None:
    """A body that no client would send gets an error of the client's, never one of the broker's."""
    with scene.everybody_works_on():
        ((status, text),) = scene.probe("api_calls", base="broker", calls=[["POST", "/leases", body]])
    assert status in expected, (status, text[:500])


def test_notifications_lead_nowhere_inside(scene: Scene) -> None:
    """Destinations in the head node's network, and kinds and parameters that do more than send, are refused."""
    urls = [
        "json://127.0.0.1:8081/hub/api", "json://10.0.0.1/", "json://169.254.169.254/latest/meta-data", "json://[::1]:8010/",
        "mailto://a:b@example.org?smtp=127.0.0.1", "exec://id", "syslog://", "dbus://", "file:///etc/shadow",
        "ntfy://topic?attach=/etc/shadow", "discord://a/b?template=/etc/shadow",
    ]  # fmt: skip
    calls = [["POST", "/destinations", {"url": url, "kinds": ["granted"]}] for url in urls]
    with scene.everybody_works_on():
        answers = scene.probe("api_calls", base="broker", calls=calls)
        listed = scene.probe("api_calls", base="broker", calls=[["GET", "/destinations", None]])
    assert [status for status, _ in answers] == [422] * len(urls)
    assert listed == [[200, "[]"]]


def test_paths_lead_nowhere_else(scene: Scene) -> None:
    """Encoded dots and slashes reach no other route, and the health of services that are not the broker's."""
    tries = ["/leases/..%2f..%2fevents", "/%2e%2e/%2e%2e/docs", "/leases/%00", "/jobs/" + "a" * 3000, "//health"]
    answers = scene.probe("api_calls", base="broker", calls=[["GET", path, None] for path in tries])
    assert {status for status, _ in answers} <= {400, 404, 405, 414, 422}, answers


def test_hub_gives_a_notebook_its_own_name_only(scene: Scene) -> None:
    """Users, tokens, servers, services, routes and the hub's end are not a notebook's."""
    calls = [
        ["GET", "/users", None],
        ["GET", "/users/ada", None],
        ["POST", "/users", {"usernames": ["eve"]}],
        ["POST", "/users/ada/server", {}],
        ["DELETE", f"/users/ada/servers/{SERVER}", None],
        ["POST", "/users/ada/tokens", {}],
        ["POST", "/users/ben/tokens", {}],
        ["GET", "/users/ben/tokens", None],
        ["POST", "/users/ben/servers/more", {"profile": "cpu"}],
        ["POST", "/users/ada/activity", {"last_activity": "2020-01-01T00:00:00Z"}],
        ["GET", "/groups", None],
        ["GET", "/services", None],
        ["GET", "/proxy", None],
        ["POST", "/proxy", None],
        ["GET", "/info", None],
        ["POST", "/shutdown", {}],
    ]
    own, *answers = scene.probe("api_calls", base="hub", calls=[["GET", "/user", None], *calls])
    assert own[0] == 200
    assert json.loads(own[1])["name"] == "ben"
    allowed = [(call, status) for call, (status, _) in zip(calls, answers, strict=True) if status not in {403, 404}]
    assert allowed == []


def test_files_stay_in_ones_own_home(scene: Scene) -> None:
    """Links and dots in a transfer lead to the courier's own, almost empty, file system; never to another's home."""
    assert scene.shell("ln -sfn /etc/shadow leak; ln -sfn / top; ln -sfn /home/ada other")[0] == 0
    paths = ["leak", "top/etc/shadow", "other", "../ada", "/etc/shadow", "../../etc/shadow", "top/proc/1/environ"]
    answers = scene.probe("api_calls", base="broker", calls=[["GET", f"/files?path={path}", None] for path in paths])
    assert scene.shell("rm leak top other")[0] == 0
    for path, (_, text) in zip(paths, answers, strict=True):
        assert "root:" not in text, path
        assert "JUPYTERHUB" not in text, path
        assert "adas_job" not in text, path
