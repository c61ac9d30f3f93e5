"""A node, a profile and a service of a group, for a user who is not a member, by every way in."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.hostile.scene import GROUP, GROUPS_NODE, GROUPS_SERVICE, SERVER, Scene
from tests.support.hub.browser import gpuhub
from tests.support.hub.users import UPGRADE
from tests.support.product import wait_for

#: The profile of the node, and the model that only this node has.
PROFILE, MODEL = "rtx5070", "RTX 5070"
PROFILE_REFUSAL = f"profile '{PROFILE}' is only for members of {GROUP}, and ben is not one"
NODE_REFUSAL = f"only for members of {GROUP}: {GROUPS_NODE}"
DETACHED = {"detached": True, "name": "train.py"}
#: What only the restricted node could serve.
DEMANDS: dict[str, dict[str, Any]] = {
    "model": {"models": [MODEL]},
    "node": {"exclude_nodes": ["rig1", "rig3"]},
    "nodes": {"nnodes": 3},
    "gpus": {"gpus": 3},
    "elastic": {"models": [MODEL], "nnodes": 2, "min_nnodes": 1},
    "notebook's": {"models": [MODEL], "server": SERVER, "detached": False},
    "scavenging": {"models": [MODEL], "scavenge": True},
    "exclusive": {"models": [MODEL], "exclusive": True},
    "later": {"models": [MODEL], "batch": True, "priority": -100, "time_limit_s": 60},
    "server": {"models": [MODEL], "port": 8000, "port_users": ["ada"], "sleeps": True},
    "retried": {"models": [MODEL], "max_retries": 100},
}
TASKS = """\
name: many
execution: parallel
---
name: first
resources: {accelerators: RTX5060}
run: "true"
---
name: second
resources: {accelerators: RTX5070}
run: "true"
"""


@pytest.fixture(autouse=True)
def nothing_is_bens(scene: Scene) -> Iterator[None]:
    """Check that ben has his notebook and nothing else before and after each test."""
    assert list_leases(scene) == [SERVER]
    yield
    assert list_leases(scene) == [SERVER]
    assert set(scene.ben.servers() or {}) == {SERVER}


def list_leases(scene: Scene) -> list[str]:
    """Return of what ben has leases, or waits for them."""
    return [str(lease["subject"]) for lease in scene.ben.ask(scene.ben.broker, "GET", "/leases")[1]]


def ask_broker(scene: Scene, calls: Sequence[tuple[str, str, Any]], **headers: str) -> list[tuple[int, str]]:
    """Return the answers to ben's notebook, and then those to ben's own token, which has all his rights."""
    inside = scene.probe("api_calls", base="broker", calls=calls, headers=headers)
    outside = [scene.ben.ask(scene.ben.broker, *call) for call in calls]
    return [(int(status), str(answer)) for status, answer in (*inside, *outside)]


def test_forged_form_starts_nothing(scene: Scene) -> None:
    """The form does not offer the profile, and what it did not offer is refused with the group."""
    address = scene.product.address
    with httpx.Client(base_url=address, follow_redirects=True, trust_env=False, timeout=60) as web:

        def find_xsrf() -> str:
            return next(cookie.value or "" for cookie in web.cookies.jar if cookie.name == "_xsrf")

        web.get("/hub/login")
        login = {"username": "ben", "password": scene.product.password, "_xsrf": find_xsrf()}
        web.post("/hub/login", data=login).raise_for_status()
        form = web.get("/hub/spawn/ben/forged")
        assert 'value="part"' in form.text
        assert f'value="{PROFILE}"' not in form.text
        params = {"_xsrf": find_xsrf()}
        forged = web.post("/hub/spawn/ben/forged", params=params, data={"profile": PROFILE})
        assert forged.status_code == 403
        assert f"only for members of {GROUP}" in forged.text
        for more in ({"groups": GROUP}, {"owner": "ada"}):
            answer = web.post("/hub/spawn/ben/forged", params=params, data={"profile": PROFILE} | more)
            assert answer.status_code == 400
        assert web.post("/hub/spawn/ada/forged", params=params, data={"profile": "cpu"}).status_code == 404


def test_servers_of_the_hubs_api(scene: Scene) -> None:
    """Neither as the profile nor by options that the form does not have."""

    def start(**options: Any) -> tuple[int, str]:
        body = {"profile": PROFILE} | options
        status, answer = scene.ben.ask(scene.ben.hub, "POST", "/users/ben/servers/forged", body)
        return status, answer["message"]

    assert start() == start(keep="yes") == (403, PROFILE_REFUSAL)
    for options in ({"groups": [GROUP]}, {"owner": "ada"}, {"profile": [PROFILE]}):
        assert start(**options)[0] == 400


def test_nobody_joins_a_group(scene: Scene) -> None:
    """The hub's groups are the administrators', and cluster.toml's are not even known to it."""
    calls: list[tuple[str, str, Any]] = [
        ("POST", f"/groups/{GROUP}", {"users": ["ben"]}),
        ("POST", f"/groups/{GROUP}/users", {"users": ["ben"]}),
        ("PATCH", "/users/ben", {"name": "ada"}),
        ("PATCH", "/users/ben", {"admin": True}),
    ]
    for client in (scene.ben, scene.ada):
        assert {client.ask(client.hub, *call)[0] for call in calls} <= {403, 404}
    assert {status for status, _ in scene.probe("api_calls", base="hub", calls=calls)} <= {403, 404}


def test_leases(scene: Scene) -> None:
    """The profile is refused, whatever the request or its headers say about groups and owners."""
    body = {"profile": PROFILE, "server": "forged", "key": "forged"}
    calls = [
        ("POST", "/leases", body | more) for more in ({}, {"groups": [GROUP]}, {"owner": "ada", "groups": [GROUP]})
    ]
    answers = ask_broker(scene, calls, **{"X-Forwarded-User": "ada", "X-Forwarded-Groups": GROUP})
    assert [status for status, _ in answers] == [403] * len(answers)
    assert all(PROFILE_REFUSAL in answers[number][1] for number in (0, len(calls)))


@pytest.mark.parametrize("demand", DEMANDS.values(), ids=DEMANDS)
def test_jobs(scene: Scene, demand: dict[str, Any]) -> None:
    """A job, its check, and an array of such jobs are refused with node and group."""
    job = {"run_id": "run-forged1", **DETACHED, **demand}
    calls = [("POST", "/jobs", job), ("POST", "/jobs/check", {"job": job})]
    if not {"nnodes", "gpus", "port"} & demand.keys() and job["detached"]:
        calls += [("POST", "/jobs/arrays", {"job": job, "count": 2}), ("POST", "/jobs/check", {"job": job, "count": 2})]
    for status, text in ask_broker(scene, calls):
        assert status == 403, text
        assert NODE_REFUSAL in text


def test_profile_of_a_job(scene: Scene) -> None:
    """Whose image a job would run, also on a node that is open."""
    job = {"run_id": "run-forged2", **DETACHED, "models": ["RTX 5060"], "profile": PROFILE}
    calls = [("POST", "/jobs", job), ("POST", "/jobs/arrays", {"job": job, "count": 2})]
    for status, text in ask_broker(scene, calls):
        assert status == 403, text
        assert PROFILE_REFUSAL in text


def test_job_groups(scene: Scene) -> None:
    """One of its jobs is for an open node, and is refused with the other one."""
    first, second = (
        {"run_id": f"run-forged{number}", **DETACHED, "models": [model]}
        for number, model in ((5, "RTX 5060"), (6, MODEL))
    )
    group = {"run_id": "run-forged7", "jobs": [first, second]}
    check = {"job": first, "others": [second]}
    for status, text in ask_broker(scene, [("POST", "/jobs/groups", group), ("POST", "/jobs/check", check)]):
        assert status == 403, text
        assert NODE_REFUSAL in text


def test_workers_for_another_users_run(scene: Scene) -> None:
    """Ada's job on the node takes no workers of ben's."""
    job = {"run_id": "run-forged3", "models": ["RTX 5060"], "joins": scene.job["run_id"]}
    assert {status for status, _ in ask_broker(scene, [("POST", "/jobs", job)])} <= {404, 422}


@pytest.mark.parametrize(
    "command",
    [
        'run --detach --model "RTX 5070" task.py',
        "run --detach --profile rtx5070 task.py",
        'run --array 0-3 --model "RTX 5070" task.py',
        'run --detach --scavenge --model "RTX 5070" task.py',
        'run --detach --port 8000 --model "RTX 5070" task.py',
        "run --detach --array 0-3 one.yaml",
        "run --detach one.yaml",
        "run --detach many.yaml",
    ],
)
def test_commands_and_task_files(scene: Scene, command: str) -> None:
    """`gpu-launch` in the notebook: nothing of an array or of a job group is sent or starts."""
    one = TASKS.rpartition("---\n")[2]
    files = f"touch task.py && echo {shlex.quote(one)} > one.yaml && echo {shlex.quote(TASKS)} > many.yaml"
    status, output = scene.shell(f"mkdir -p ~/forged && cd ~/forged && {files} && gpu-launch {command}")
    assert status != 0, output
    assert f"only for members of {GROUP}" in output, output


def test_reservation_opens_no_node(scene: Scene) -> None:
    """Ben reserves nothing, and a reservation that an administrator makes for him does not make him a member."""
    window = {"starts_at": "2030-01-01T00:00:00Z", "ends_at": "2030-01-02T00:00:00Z"}
    body = {"name": "mine", "nodes": [GROUPS_NODE], "users": ["ben"], **window}
    assert {status for status, _ in ask_broker(scene, [("POST", "/reservations", body)])} == {403}
    reserved = gpuhub("reservation", "add", "course", "--nodes", GROUPS_NODE, "--users", "ben", "--for", "1h")
    try:
        job = {"run_id": "run-forged4", **DETACHED, "models": [MODEL]}
        for status, text in ask_broker(scene, [("POST", "/jobs", job)]):
            assert status == 403, text
            assert NODE_REFUSAL in text
    finally:
        gpuhub("reservation", "cancel", reserved.split()[-1])


def test_waiting_job_gets_the_open_node_alone(scene: Scene) -> None:
    """What the open nodes can serve waits for those; the owner reads which node is not for him."""
    ids = []
    try:
        for number in range(2):
            body = {"run_id": f"run-open{number:03}", **DETACHED, "exclude_nodes": ["rig1"]}
            status, job = scene.ben.ask(scene.ben.broker, "POST", "/jobs", body)
            assert status == 201, job
            ids.append(job["id"])
        leases = {row["subject"]: row for row in scene.ben.ask(scene.ben.broker, "GET", "/leases")[1]}
        assert [leases[job]["nodes"] for job in ids] == [["rig3"], []]
        why = scene.ben.ask(scene.ben.broker, "GET", f"/leases/{leases[ids[1]]['id']}/why")[1]
        assert NODE_REFUSAL in why["waits_for"]
    finally:
        for job in ids:
            scene.ben.ask(scene.ben.broker, "DELETE", f"/jobs/{job}")
        wait_for(lambda: list_leases(scene) == [SERVER], "ben's jobs are gone", 60)


def test_cluster_shows_holders_and_no_profile(scene: Scene) -> None:
    """Ben sees who holds the node, as all users do, and that it is not open to him; its group is not asked for."""
    for client, is_member in ((scene.ada, True), (scene.ben, False)):
        status, view = client.ask(client.broker, "GET", "/cluster")
        assert status == 200
        node = next(node for node in view["nodes"] if node["name"] == GROUPS_NODE)
        assert (node["is_open"], node["groups"]) == (is_member, [GROUP])
        assert node["gpus"][0]["holder"]["owner"] == "ada"
        assert (PROFILE in {profile["name"] for profile in view["profiles"]}) == is_member
    (status, text), *_ = scene.probe("api_calls", base="broker", calls=[["GET", "/cluster", None]])
    assert (status, f'"name":"{PROFILE}"' in text) == (200, False)
    views = [("GET", path, None) for path in (f"/cluster?group={GROUP}", f"/stream/cluster?for_s=0&group={GROUP}")]
    assert {status for status, _ in ask_broker(scene, views)} == {403}


def test_service_of_the_group(scene: Scene) -> None:
    """Ada reaches it; ben neither sees nor reaches it, by the hub, the broker or the gateway of a container."""
    base, tokens = f"{scene.product.address}/services/{GROUPS_SERVICE}/", {}
    for client in (scene.ada, scene.ben):
        tokens[client.name] = {"Authorization": f"token {client.token}"}

    def get(owner: str, **headers: str) -> int:
        return httpx.get(base, headers=tokens[owner] | headers, trust_env=False, timeout=30).status_code

    wait_for(lambda: get("ada") == 200, "the service answers ada", 120)
    assert [get("ben"), get("ben", **UPGRADE), get("ben", **{"X-Forwarded-User": "ada"})] == [404] * 3
    calls = [("GET", "/services", None), ("POST", f"/services/{GROUPS_SERVICE}/visits", None)]
    listed, visit, listed_outside, visit_outside = ask_broker(scene, calls)
    assert listed == listed_outside == (200, "[]")
    assert visit[0] == visit_outside[0] == 404
    variables = {name: scene.shell("env", seen=seen)[1] for name, seen in scene.notebooks.items()}
    assert {name: "LABELS_URL=" in text for name, text in variables.items()} == {"ada": True, "ben": False}
    gateway = scene.shell(
        f"curl -s -m 5 -o /dev/null -w '%{{http_code}}' http://127.0.0.1:18034/services/{GROUPS_SERVICE}/"
    )
    assert gateway[1].strip() in {"000", "404"}
