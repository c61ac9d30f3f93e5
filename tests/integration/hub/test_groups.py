"""A node and a profile that are restricted to a group, in a real hub and broker: forms, starts and the broker's API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from tests.support.hub.served_hub import SETTINGS, ServedHub
from tests.support.hub.sessions import log_in

GROUPS = """
[[nodes]]
name = "rig2"
address = "127.0.0.2"
docker = "unix:///run/gpuhub-nobody-listens-there.sock"
gpus = [{{ model = "RTX 5090", memory = "32G" }}]
groups = ["vision"]
[[profiles]]
name = "big"
title = "RTX 5090"
gpu_model = "RTX 5090"
[[profiles]]
name = "study"
title = "For the study"
gpu_count = 0
groups = ["nlp", "vision"]
[[groups]]
name = "vision"
members = ["ada"]
[[groups]]
name = "nlp"
members = ["root1"]
"""
RIG1 = 'gpus = [{{ model = "RTX 5060", memory = "8G" }}]\n[[profiles]]'
PROFILE_REFUSAL = "profile 'study' is only for members of nlp or vision, and ben is not one"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHub]:
    """A running hub with the product's spawner, its proxy and broker; no node answers."""
    settings = SETTINGS.replace("[[profiles]]", RIG1, 1) + GROUPS
    folder = tmp_path_factory.mktemp("hub")
    config = "load_subconfig({real!r})\n"
    served = ServedHub("ghgroups", folder, "internal_tls = false", 18560, settings=settings, config=config)
    try:
        served.start()
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="module")
def sessions(hub: ServedHub) -> Iterator[dict[str, httpx.Client]]:
    """Sessions of ada, who is a member of the group, and of ben, who is not."""
    with closing(log_in(hub, "ada")) as ada, closing(log_in(hub, "ben")) as ben:
        yield {"ada": ada, "ben": ben}


def test_form_and_pages_show_what_the_user_may_use(hub: ServedHub, sessions: dict[str, httpx.Client]) -> None:
    """The form and its refresh hide the profile of others; the page of GPUs shows whom the node is for."""
    for name, is_member in {"ada": True, "ben": False}.items():
        browser = sessions[name]
        form = browser.get(f"/hub/spawn/{name}").text
        assert 'value="big"' in form
        assert ('value="study"' in form) == is_member
        view = browser.get("/hub/gpuhub/cluster").json()
        assert ("card-study" in view["parts"]) == is_member
        assert {node["name"]: node["is_open"] for node in view["cluster"]["nodes"]} == {"rig1": True, "rig2": is_member}
        assert ("study" in {profile["name"] for profile in view["cluster"]["profiles"]}) == is_member
        page = browser.get("/hub/gpus")
        assert page.status_code == 200
        assert "only for members of vision" in page.text


def test_start_with_a_profile_of_others_is_refused(hub: ServedHub, sessions: dict[str, httpx.Client]) -> None:
    """By the hub's API, with the groups."""
    answer = sessions["ben"].post("/hub/api/users/ben/server", json={"profile": "study"})
    assert (answer.status_code, answer.json()["message"]) == (403, PROFILE_REFUSAL), hub.log("hub")


def test_broker_refuses_what_is_for_others(hub: ServedHub, sessions: dict[str, httpx.Client]) -> None:
    """With a token of the hub, which reports the user's groups."""
    url = f"http://127.0.0.1:{hub.cluster.hub.broker_port}/services/broker/api/v1"
    for name, status in {"ada": 201, "ben": 403}.items():
        token = sessions[name].post(f"/hub/api/users/{name}/tokens").json()["token"]
        with httpx.Client(base_url=url, headers={"Authorization": f"token {token}"}, trust_env=False) as broker:
            answers = [
                broker.post("/leases", json={"profile": "study", "server": "a", "key": "a"}),
                broker.post("/leases", json={"profile": "big", "server": "b", "key": "b"}),
                broker.post("/jobs", json={"run_id": "run-000001", "models": ["RTX 5090"], "detached": True}),
                broker.post("/jobs", json={"run_id": "run-000002", "exclude_nodes": ["rig1"], "detached": True}),
            ]
            assert [answer.status_code for answer in answers] == [status] * 4, [answer.text for answer in answers]
            if name == "ben":
                assert answers[0].json()["detail"] == PROFILE_REFUSAL
                assert all(answer.json()["detail"].endswith("for members of vision: rig2") for answer in answers[1:])
                assert broker.get("/leases").json() == []
